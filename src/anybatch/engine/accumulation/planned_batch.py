"""From a batch of any kind to micro-batches that are planned, counted and lined up."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from anybatch.core.batch import Placement, Position, picked, taken
from anybatch.core.compatibility import Feature, refuse_compositions
from anybatch.core.loss import Loss, TermFactors, factors_of, unit_counts
from anybatch.core.randomness import BatchKey, joint_seed, unit_seed
from anybatch.core.splitting import BatchPlan, CutConstraints, Unit, plan_shares
from anybatch.core.tree import Batch, copied, moved_to, read_samples, slice_read, tensors_of
from anybatch.engine.accumulation.accumulate import MicroBatch
from anybatch.errors import BatchSizeError, DataError, LossError, RankFailedError
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class RankShare:
    """The samples one rank brings to an effective batch from its own loader; None when its loader has ended."""

    batch: Batch | None

    def __repr__(self) -> str:
        """Return the share in a sentence, without the numbers in its tensors."""
        if self.batch is None:
            return "Share of a rank whose loader has ended: no samples."
        return f"Share of one rank in an effective batch: {type(self.batch).__name__} in share.batch."


class PlannedBatch(NamedTuple):
    """An effective batch that has been planned; nothing of it is loaded yet. A tuple, since each step makes one.

    Attributes:
        plan: which rank runs which units.
        units: this rank's.
        sample_ids: global ids of all samples, in the order in which they are cut.
        seed: first word of every random key.
        end: where the data stands after a step on it.
        micro_batches: the data of each unit of this rank, on the host; loaded as they are asked for.
        pick: function (lists of places in the plan) -> a micro-batch for each list, on the host, loaded once more.
        picks_any: `pick` takes places of other ranks too.
    """

    plan: BatchPlan
    units: tuple[Unit, ...]
    sample_ids: Sequence[int]
    seed: int
    end: Position
    micro_batches: Iterator[Batch]
    pick: Callable[[Sequence[Sequence[int]]], Iterator[Batch]]
    picks_any: bool


class CountedBatch(NamedTuple):
    """An effective batch whose divisors are known, with this rank's micro-batches lined up. A tuple as well.

    Attributes:
        planned: the batch and its plan.
        divisors: the count of each loss term over all ranks.
        micro_batches: this rank's that have something to add, each with its data on the device.
        replay: the data of `micro_batches` once more, from the host, for a loss across samples; nothing for others.
        seed: of what such a loss draws once for the whole effective batch.
        left_out: a micro-batch of this rank that counts nothing, on the host; None without one.
    """

    planned: PlannedBatch
    divisors: tuple[float, ...]
    micro_batches: Iterator[tuple[MicroBatch, Batch]]
    replay: Iterator[Batch]
    seed: int
    left_out: Batch | None = None


def plan_effective_batch(batch: Any, placement: Placement, world: World, start: Position) -> PlannedBatch:  # noqa: ANN401
    """Plan an effective batch, or what every rank brought as its share of one.

    Args:
        batch: an `EffectiveBatch`, a `RankShare`, or any nested batch, which is then this rank's share.
        placement: how to cut and deal.
        world: the ranks.
        start: where the data stands before this step.

    Raises:
        BatchSizeError: no rank brought a sample.
        DataError: a rank brought none, and ranks run in lockstep.
    """
    if isinstance(batch, RankShare) or not is_effective_batch(batch):
        return _plan_share(batch if isinstance(batch, RankShare) else RankShare(batch), placement, world, start)
    batch, lengths = placement.laid_out(batch)
    sample_ids = batch.sample_ids
    plan = placement.plan(len(sample_ids), lengths)
    units = plan.shares[placement.rank]
    return PlannedBatch(
        plan=plan,
        units=units,
        sample_ids=sample_ids if plan.order is None else taken(sample_ids, plan.order),
        seed=batch.seed,
        end=batch.end,
        micro_batches=batch.feed([plan.positions(unit) for unit in units], placement.units),
        pick=lambda lists: batch.feed(lists if plan.order is None else [taken(plan.order, one) for one in lists]),
        picks_any=True,
    )


class SumsWithoutCount(Protocol):
    """Finds out of which terms micro-batches have something to add where they count nothing."""

    def is_needed(self, counts: Sequence[tuple[float, ...]]) -> bool:
        """Whether that has to be found out for micro-batches with these counts."""
        ...

    def probe(self, micro_batches: Sequence[Batch], counts: Sequence[tuple[float, ...]]) -> None:
        """Find it out."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The terms that have, as far as is known."""
        ...


@dataclass(frozen=True, slots=True)
class _UnitInTurn:
    """A unit that this rank runs, with all that follows from the plan and the counts."""

    place: int  # among those of this rank
    unit: Unit
    factors: tuple[TermFactors, ...]
    turn: Turn


class BatchCounter:
    """Counts the terms of the loss in effective batches, and lines their micro-batches up.

    Args:
        loss: the declared loss, as the loop calls it.
        world: the ranks.
        constraints: of cuts, on how units are run.
        sums: knows which terms add up without a count.
    """

    def __init__(self, loss: Loss, world: World, constraints: CutConstraints, sums: SumsWithoutCount) -> None:
        self._loss = loss
        self._world = world
        self._constraints = constraints
        self._sums = sums
        self._needs_data, self._has_two_passes = loss.needs_data_to_count, loss.kind.encode is not None
        self._is_on_host = world.device.type == "cpu"
        # Most steps are cut alike: what follows from the plan alone is kept for the next one with it.
        self._newest: tuple[BatchPlan | None, tuple[float, ...], list[_UnitInTurn]] = (None, (), [])

    def count(self, planned: PlannedBatch, step: int) -> CountedBatch:
        """Count the terms of the loss, agree on the counts over ranks, and line the micro-batches up.

        Where counts need the data, all of this rank's micro-batches are loaded (on the host) before the first runs.

        Args:
            planned: the effective batch.
            step: its number.

        Raises:
            LossError: the whole effective batch has nothing to count, so its loss is not defined.
            DataError: a rank has nothing to count, and the strategy keeps ranks in lockstep.
        """
        device, micro_batches, left_out = self._world.device, planned.micro_batches, None
        if self._needs_data:
            planned, loaded, counts, divisors = self._count_from_data(planned)
            in_turn = self._in_turn(planned, counts, divisors)
            micro_batches = iter([loaded[one.place] for one in in_turn])
            left_out = next((batch for batch, count in zip(loaded, counts, strict=True) if not any(count)), None)
        else:
            divisors, in_turn = self._count_samples(planned)
        replay: Iterator[Batch] = iter(())
        if self._has_two_passes:
            micro_batches, replay = itertools.tee(micro_batches)  # kept on the host, until they have gone by twice
            # The first pass may change what it is given, which is a copy already if it had to be moved.
            micro_batches = (_private_copy(batch, device) for batch in micro_batches)
        if not self._is_on_host:
            micro_batches, replay = to_device(micro_batches, device), to_device(replay, device)
        # Made here: between two backwards the same lines would run from cold caches, several times as long.
        key = BatchKey(planned.seed, step, planned.sample_ids)
        lined_up = []
        for one in in_turn:
            seed = unit_seed(planned.seed, step, planned.sample_ids[one.unit.start])
            lined_up.append(MicroBatch(one.unit, one.factors, one.turn, seed, key))
        return CountedBatch(
            planned=planned,
            divisors=divisors,
            micro_batches=zip(lined_up, micro_batches, strict=True),
            replay=replay,
            seed=joint_seed(planned.seed, step) if self._has_two_passes else 0,
            left_out=left_out,
        )

    def _count_samples(self, planned: PlannedBatch) -> tuple[tuple[float, ...], list[_UnitInTurn]]:
        """Return divisors and units where every term counts samples, which the plan knows.

        Nothing is loaded ahead, and ranks need not talk.
        """
        plan = planned.plan
        if plan is not self._newest[0]:
            num_terms = len(self._loss.names)
            counts = [(float(unit.num_samples),) * num_terms for unit in planned.units]
            divisors = (float(planned.plan.num_samples),) * num_terms
            self._refuse_nothing(planned, divisors)
            self._newest = plan, divisors, self._in_turn(planned, counts, divisors)
        return self._newest[1:]

    def _count_from_data(
        self, planned: PlannedBatch
    ) -> tuple[PlannedBatch, list[Batch], list[tuple[float, ...]], tuple[float, ...]]:
        """Return the batch, its data, counts of its units, and divisors."""
        loss, world, sums, constraints = self._loss, self._world, self._sums, self._constraints
        loaded: list[Batch] = []
        counts: list[tuple[float, ...]] = []

        def load_and_count(units: Sequence[Unit] = planned.units) -> list[float]:
            loaded.extend(planned.micro_batches)
            counts.extend(unit_counts(loss, batch, unit.num_samples) for batch, unit in zip(loaded, units, strict=True))
            # A unit of weight 0 repeats samples that another unit counts already.
            own = [sum(c[j] for c, u in zip(counts, units, strict=True) if u.weight) for j in range(len(loss.names))]
            return [*own, float(any(map(any, counts))), float(sums.is_needed(counts))]

        # One message carries the counts of all terms, whether this rank has anything to run at all, and a question.
        rows = world.gather_from(load_and_count, len(loss.names) + 2)
        divisors = tuple(sum(column) for column in zip(*rows, strict=True))[:-2]
        # In lockstep every rank runs the model equally often, also for a question of one of them.
        is_asked = any(row[-1] for row in rows) if constraints.lockstep else rows[world.rank][-1]
        if is_asked and any(divisors):
            sums.probe(loaded, counts)
        if constraints.lockstep and any(divisors) and not sums.names:
            _refuse_idle_rank([int(row[-2]) for row in rows], "no item that the loss counts (all targets masked?)")
            planned, loaded, counts = _fill_empty_units(planned, loaded, counts)
        self._refuse_nothing(planned, divisors)
        return planned, loaded, counts, divisors

    def _in_turn(
        self, planned: PlannedBatch, counts: Sequence[tuple[float, ...]], divisors: tuple[float, ...]
    ) -> list[_UnitInTurn]:
        """Return the units that have something to add.

        A mean over nothing is NaN, so units without a count are left out, unless a term returns sums.
        """
        loss, sums, constraints = self._loss, self._sums.names, self._constraints
        every_unit = constraints.every_unit or constraints.lockstep or bool(sums)
        # The last unit that runs starts the reduction, so it has to be known before the first one does.
        running = [number for number, count in enumerate(counts) if any(count) or every_unit]
        first, last = (running[0], running[-1]) if running else (-1, -1)
        known: dict[tuple[tuple[float, ...], float], tuple[TermFactors, ...]] = {}  # most units count alike
        in_turn = []
        for number in running:
            unit = planned.units[number]
            key = (counts[number], unit.weight)
            if key not in known:
                known[key] = factors_of(loss, counts[number], divisors, unit.weight, sums)
            in_turn.append(_UnitInTurn(number, unit, known[key], Turn(first=number == first, last=number == last)))
        return in_turn

    def _refuse_nothing(self, planned: PlannedBatch, divisors: tuple[float, ...]) -> None:
        """Refuse a loss that would be 0 / 0.

        Raises:
            LossError: with its terms.
        """
        names = self._loss.names
        if not any(divisors):
            message = (
                f"nothing to learn from: every loss term ({', '.join(names)}) counts 0 over all "
                f"{planned.plan.num_samples} samples of the effective batch (all targets masked?). "
                "The loss would be 0 / 0. Filter such batches out, or use a larger effective batch."
            )
            raise LossError(message, term=names[0] if len(names) == 1 else None)


def _private_copy(batch: Batch, device: torch.device) -> Batch:
    """Return a batch of which nothing is shared but tensors that are copied when they are moved to the device."""
    return copied(batch, lambda tensor: tensor if tensor.device != device else tensor.clone())


def report_failed_count(error: BaseException, loss: Loss, world: World) -> None:
    """Tell the other ranks, which wait in `BatchCounter` for this rank's counts, that it has none; raises the error."""

    def fail() -> list[float]:
        raise error

    world.gather_from(fail, len(loss.names) + 2)


def _fill_empty_units(
    planned: PlannedBatch, loaded: Sequence[Batch], counts: Sequence[tuple[float, ...]]
) -> tuple[PlannedBatch, list[Batch], list[tuple[float, ...]]]:
    """Under lockstep every unit has to run; one that counts nothing runs another's samples with weight 0 instead."""
    # There is one: a rank that counts nothing has been refused just before.
    busy = next(number for number, count in enumerate(counts) if any(count))
    chosen = [number if any(count) else busy for number, count in enumerate(counts)]
    units = tuple(
        unit if any(count) else dataclasses.replace(planned.units[busy], number=unit.number, weight=0.0)
        for unit, count in zip(planned.units, counts, strict=True)
    )
    return (
        planned._replace(units=units),
        [loaded[number] for number in chosen],
        [counts[number] for number in chosen],
    )


def _refuse_idle_rank(busy: Sequence[int], lacks: str) -> None:
    """Refuse, on every rank, a batch in which some rank has nothing that it could run along with the others.

    Raises:
        DataError: with the rank.
    """
    if all(busy):
        return
    message = (
        f"rank {busy.index(0)} has {lacks} in its share of the batch, but the strategy or norms policy keeps ranks "
        "in lockstep: each runs in every step. Use a larger effective batch, or strategy='all_reduce' and norms='keep'."
    )
    raise DataError(message)


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Return the batches on the device. On CUDA copies run in a stream of their own, beside what computes."""
    if device.type == "cuda":
        return _copied_beside(batches, device)
    return batches if device.type == "cpu" else (moved_to(batch, device) for batch in batches)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to a device, the same one in all steps.

    torch's allocator shares no memory between streams: with a new one for each step, memory would stay reserved for
    each of the 32 streams of torch's pool.
    """
    return torch.cuda.Stream(device)


def _copied_beside(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    copies = _copy_stream(device)
    for batch in batches:
        with torch.cuda.stream(copies):
            moved = moved_to(batch, device, non_blocking=True)
        computing = torch.cuda.current_stream(device)
        # The device waits for the copy before it computes on it; the host goes on.
        computing.wait_stream(copies)
        for tensor in tensors_of(moved):
            tensor.record_stream(computing)  # the allocator must not hand its memory to the next copy too early
        yield moved


def is_effective_batch(batch: object) -> bool:
    """Whether a batch finds and loads its samples itself, and is not the share of a rank."""
    # Asked of the object and not of its class: an effective batch may be of a class of the user's own.
    return hasattr(batch, "feed") and hasattr(batch, "sample_ids")


def _sizes_on_ranks(count: Callable[[], int], world: World, start: Position) -> list[int]:
    """Return how many samples each rank brings.

    Raises:
        DataError: ranks are in different steps, because the loader of one has ended before that of another.
        RankFailedError: another rank ended.
    """
    cure = (
        "Where loaders of ranks differ in length, iterate ab.shares(loader): ranks that are done first bring empty "
        "shares until all are."
    )
    try:
        rows = world.gather_from(lambda: [float(count()), float(start.epoch), float(start.sample_offset)], 3)
    except RankFailedError as error:
        error.add_note(f"anybatch: this rank waited for the samples that others bring to the step. {cure}")
        raise
    for rank, (_, *place) in enumerate(rows):
        if place != rows[0][1:]:
            message = (
                f"ranks are not in the same step: rank 0 stands behind {rows[0][2]:,.0f} samples of its data, rank "
                f"{rank} behind {place[1]:,.0f}; one of them has gone on to something else. {cure}"
            )
            raise DataError(message)
    return [int(row[0]) for row in rows]


def _plan_share(share: RankShare, placement: Placement, world: World, start: Position) -> PlannedBatch:
    # A rank whose loader has ended takes part with 0 samples: the others would wait for its answer.
    batch: Batch = None

    def read() -> int:
        nonlocal batch
        batch, number = (None, 0) if share.batch is None else read_samples(share.batch)
        return number

    sizes = _sizes_on_ranks(read, world, start)
    if not sum(sizes):
        message = "the effective batch is empty: no rank brought a sample. End the loop before, as ab.shares does."
        raise BatchSizeError(message, effective_batch_size=0, world_size=world.size)
    if placement.cut.lockstep:
        _refuse_idle_rank(sizes, "no sample")
    if placement.budget is not None:
        refuse_compositions({Feature.TOKEN_BUDGET: "", Feature.RANK_SHARES: ""})
    plan = plan_shares(sizes, placement.cut)
    first = sum(sizes[: placement.rank])
    units = plan.shares[placement.rank]
    return PlannedBatch(
        plan=plan,
        units=units,
        sample_ids=range(start.sample_offset, start.sample_offset + sum(sizes)),
        seed=0,  # a loader of the user's own has none; the planner gives one
        # Where the epochs of such a loader end is not known, so its samples are counted on.
        end=Position(start.epoch, start.sample_offset + sum(sizes)),
        micro_batches=iter([slice_read(batch, unit.start - first, unit.stop - first) for unit in units]),
        pick=functools.partial(picked, batch, first=first),
        picks_any=False,
    )
