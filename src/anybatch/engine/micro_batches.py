"""Plan any batch, count the items of its loss terms, and prepare its micro-batches in the order in which they run."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anybatch.core.batch import LaterUnits, Placement, Position, Positions, select, select_each
from anybatch.core.compatibility import Feature, check_combinations
from anybatch.core.loss import Loss, TermFactors, factors_of, unit_counts
from anybatch.core.randomness import BatchKey, joint_seed, micro_batch_seed
from anybatch.core.splitting import BatchPlan, SplitConstraints, Unit, plan_shares
from anybatch.core.tree import Batch, copied, mark_and_count, moved_to, slice_marked, tensors_of
from anybatch.engine.accumulate import MicroBatch
from anybatch.errors import BatchSizeError, DataError, LossError, RankFailedError
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's samples of an effective batch, from the rank's loader; None after this loader has ended."""

    batch: Batch | None

    def __repr__(self) -> str:
        """Return a description of the share without the values of its tensors."""
        if self.batch is None:
            return "Share of a rank whose loader has ended: no samples."
        return f"Share of one rank in an effective batch: {type(self.batch).__name__} in share.batch."


class PlannedBatch(NamedTuple):
    """An effective batch that is planned but not loaded; a tuple for speed.

    Attributes:
        plan: the units (numbered micro-batches) of each rank.
        units: this rank's units.
        sample_ids: global ids of all samples, in the order in which they are split into units.
        seed: seed of the data; with the step and sample, it determines all random numbers.
        end: position in the data after this batch.
        micro_batches: the data of each unit of this rank, on the host, loaded on demand.
        pick: function (lists of sample positions in the plan) -> a micro-batch for each list, loaded again on the host.
        picks_any: whether `pick` accepts samples of other ranks too.
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
    """An effective batch with its divisors and this rank's micro-batches; a tuple for speed.

    Attributes:
        planned: the batch and its plan.
        divisors: the count of each loss term (the number of items it averages over), over all ranks.
        micro_batches: this rank's micro-batches that contribute to the loss, each with its data on the device.
        replay: the data of `micro_batches` again, for the second pass of `ab.joint`; empty for other losses.
        seed: seed of the random numbers that an `ab.joint` loss draws once for the whole effective batch.
    """

    planned: PlannedBatch
    divisors: tuple[float, ...]
    micro_batches: Iterator[tuple[MicroBatch, Batch]]
    replay: Iterator[Batch]
    seed: int


def plan_effective_batch(batch: Any, placement: Placement, world: World, start: Position) -> PlannedBatch:  # noqa: ANN401
    """Plan an effective batch; `batch` is the whole batch (as from `ab.batches`) or this rank's share of it."""
    if isinstance(batch, RankShare) or not is_effective_batch(batch):
        return _plan_share(batch if isinstance(batch, RankShare) else RankShare(batch), placement, world, start)
    lengths = getattr(batch, "lengths", None)  # as in `lengths_of`, without a call in every step
    if lengths is not None:
        batch, lengths = placement.choose_layout(batch)
    sample_ids = batch.sample_ids
    plan = placement.plan(len(sample_ids), lengths)

    def load(in_plan: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        in_batch = in_plan if plan.order is None else [select(plan.order, positions) for positions in in_plan]
        micro_batches: Iterator[Batch] = batch.feed(in_batch, later_units)
        return micro_batches

    units = plan.shares[placement.rank]
    return PlannedBatch(
        plan=plan,
        units=units,
        sample_ids=sample_ids if plan.order is None else select(sample_ids, plan.order),
        seed=batch.seed,
        end=batch.end,
        micro_batches=load([range(unit.start, unit.stop) for unit in units], placement.units),
        pick=load,
        picks_any=True,
    )


@dataclass(frozen=True, slots=True)
class _RunningUnit:
    """A unit that this rank runs, with the factors of its loss and its turn (whether it is the first or the last)."""

    index: int  # among all units of this rank
    unit: Unit
    factors: tuple[TermFactors, ...]
    turn: Turn


class BatchCounter:
    """Counts the terms of the loss in effective batches, and prepares their micro-batches."""

    def __init__(self, loss: Loss, world: World, constraints: SplitConstraints, sums: Any) -> None:  # noqa: ANN401 (`UncountedSums`)
        self._loss = loss
        self._world = world
        self._constraints = constraints
        self._sums = sums
        self._needs_data, self._has_two_passes = loss.needs_data_to_count, loss.kind.encode is not None
        self._is_on_host = world.device.type == "cpu"
        # The last plan, and values that depend on the plan only; cached, since most steps have the same plan.
        self._newest: tuple[BatchPlan | None, tuple[float, ...], list[_RunningUnit]] = (None, (), [])

    def count(self, planned: PlannedBatch, step: int) -> CountedBatch:
        """Count the items of each loss term, sum the counts over ranks, and prepare the micro-batches.

        If counts need the data, all of this rank's micro-batches are loaded (on the host) before the first one runs.
        """
        device, micro_batches = self._world.device, planned.micro_batches
        if self._needs_data:
            planned, loaded, counts, divisors = self._count_from_data(planned)
            running = self._running_units(planned, counts, divisors)
            micro_batches = iter([loaded[item.index] for item in running])
        else:
            divisors, running = self._count_samples(planned)
        replay: Iterator[Batch] = iter(())
        if self._has_two_passes:
            micro_batches, replay = itertools.tee(micro_batches)  # kept on the host until both passes have used them
            # The first pass may change its batch, so it gets a copy, unless a move to the device makes one.
            micro_batches = (_private_copy(batch, device) for batch in micro_batches)
        if not self._is_on_host:
            micro_batches, replay = to_device(micro_batches, device), to_device(replay, device)
        # Created in advance, because between two backwards this code takes several times as long, with cold caches.
        key = BatchKey(planned.seed, step, planned.sample_ids)
        prepared = []
        for item in running:
            seed = micro_batch_seed(planned.seed, step, planned.sample_ids[item.unit.start])
            prepared.append(MicroBatch(item.unit, item.factors, item.turn, seed, key))
        return CountedBatch(
            planned=planned,
            divisors=divisors,
            micro_batches=zip(prepared, micro_batches, strict=True),
            replay=replay,
            seed=joint_seed(planned.seed, step) if self._has_two_passes else 0,
        )

    def _count_samples(self, planned: PlannedBatch) -> tuple[tuple[float, ...], list[_RunningUnit]]:
        """Return divisors and units if every term is a mean over samples: from the plan, without communication."""
        plan = planned.plan
        if plan is not self._newest[0]:
            num_terms = len(self._loss.names)
            counts = [(float(unit.num_samples),) * num_terms for unit in planned.units]
            divisors = (float(planned.plan.num_samples),) * num_terms
            self._check_has_items(planned, divisors)
            self._newest = plan, divisors, self._running_units(planned, counts, divisors)
        return self._newest[1:]

    def _count_from_data(
        self, planned: PlannedBatch
    ) -> tuple[PlannedBatch, list[Batch], list[tuple[float, ...]], tuple[float, ...]]:
        """Load this rank's micro-batches; return the batch, this data, the counts of its units, and the divisors."""
        loss, world, sums, constraints = self._loss, self._world, self._sums, self._constraints
        loaded: list[Batch] = []
        counts: list[tuple[float, ...]] = []

        def load_and_count(units: Sequence[Unit] = planned.units) -> list[float]:
            loaded.extend(planned.micro_batches)
            counts.extend(unit_counts(loss, batch, unit.num_samples) for batch, unit in zip(loaded, units, strict=True))
            # Units of weight 0 are not counted, since they repeat samples of other units.
            local = [sum(c[j] for c, u in zip(counts, units, strict=True) if u.weight) for j in range(len(loss.names))]
            return [*local, float(any(map(any, counts))), float(sums.is_needed(counts))]

        # One message has the counts of all terms, whether this rank has anything to run, and whether it must run the
        # model to find the terms that are sums without a count.
        rows = world.gather_from(load_and_count, len(loss.names) + 2)
        divisors = tuple(sum(column) for column in zip(*rows, strict=True))[:-2]
        # In lockstep every rank must run the model equally often, so if one rank needs this run, all ranks make it.
        needs_probe = any(row[-1] for row in rows) if constraints.lockstep else rows[world.rank][-1]
        if needs_probe and any(divisors):
            sums.probe(loaded, counts)
        if constraints.lockstep and any(divisors) and not sums.names:
            _check_idle_ranks([int(row[-2]) for row in rows], "no item that the loss counts (all targets masked?)")
            planned, loaded, counts = _fill_empty_units(planned, loaded, counts)
        self._check_has_items(planned, divisors)
        return planned, loaded, counts, divisors

    def _running_units(
        self, planned: PlannedBatch, counts: Sequence[tuple[float, ...]], divisors: tuple[float, ...]
    ) -> list[_RunningUnit]:
        """Return the units to run: units with a count above 0, or all units if a term is a sum without a count.

        A mean over no items is NaN, so other units are skipped.
        """
        loss, sums, constraints = self._loss, self._sums.names, self._constraints
        every_unit = constraints.every_unit or constraints.lockstep or bool(sums)
        # The last unit that runs starts the reduction, so it must be known before the first unit runs.
        numbers = [number for number, count in enumerate(counts) if any(count) or every_unit]
        first, last = (numbers[0], numbers[-1]) if numbers else (-1, -1)
        known: dict[tuple[tuple[float, ...], float], tuple[TermFactors, ...]] = {}  # most units have equal counts
        running = []
        for number in numbers:
            unit = planned.units[number]
            key = (counts[number], unit.weight)
            if key not in known:
                known[key] = factors_of(loss, counts[number], divisors, unit.weight, sums)
            running.append(_RunningUnit(number, unit, known[key], Turn(first=number == first, last=number == last)))
        return running

    def _check_has_items(self, planned: PlannedBatch, divisors: tuple[float, ...]) -> None:
        """Raise a `LossError` for a loss that would be 0 / 0."""
        names = self._loss.names
        if not any(divisors):
            message = (
                f"nothing to learn from: every loss term ({', '.join(names)}) has a count of 0 over all "
                f"{planned.plan.num_samples} samples of the effective batch (all targets masked?). "
                "The loss would be 0 / 0. Filter such batches out, or use a larger effective batch."
            )
            raise LossError(message, term=names[0] if len(names) == 1 else None)


def _private_copy(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch; tensors on other devices are not copied, since the move to `device` copies them."""
    return copied(batch, lambda tensor: tensor if tensor.device != device else tensor.clone())


def _fill_empty_units(
    planned: PlannedBatch, loaded: Sequence[Batch], counts: Sequence[tuple[float, ...]]
) -> tuple[PlannedBatch, list[Batch], list[tuple[float, ...]]]:
    """Replace units with a count of 0 by fillers (copies of weight 0), since in lockstep every unit must run."""
    # Every rank has a unit with a count above 0: `_check_idle_ranks` refuses other batches.
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


def _check_idle_ranks(has_items: Sequence[int], lacks: str) -> None:
    """Raise a `DataError` on every rank if any rank has nothing to run."""
    if all(has_items):
        return
    message = (
        f"rank {has_items.index(0)} has {lacks} in its share of the batch, but with this strategy or norms=, all ranks "
        "must run the same number of micro-batches. Use a larger effective batch, or strategy='all_reduce' and "
        "norms='keep'."
    )
    raise DataError(message)


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Return the batches on the device. On CUDA, copies run in a separate stream and overlap with computation."""
    if device.type == "cuda":
        return _copied_in_stream(batches, device)
    return batches if device.type == "cpu" else (moved_to(batch, device) for batch in batches)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to a device, the same one in all steps.

    torch's allocator shares no memory between streams: with a new stream in each step, memory would stay reserved for
    each of the 32 streams of torch's pool.
    """
    return torch.cuda.Stream(device)


def _copied_in_stream(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    copies = _copy_stream(device)
    for batch in batches:
        with torch.cuda.stream(copies):
            moved = moved_to(batch, device, non_blocking=True)
        computing = torch.cuda.current_stream(device)
        # The device waits for the copy before the computation; the host does not wait.
        computing.wait_stream(copies)
        for tensor in tensors_of(moved):
            tensor.record_stream(computing)  # its memory must not be reused for a copy before the computation ends
        yield moved


def is_effective_batch(batch: object) -> bool:
    """Return whether a batch is a whole effective batch that loads its samples, and not a rank's share."""
    # Check for a method, because users may define such classes, and `hasattr` on a property might load samples.
    return callable(getattr(batch, "feed", None))


def _sizes_on_ranks(count: Callable[[], int], world: World, start: Position) -> list[int]:
    """Return the number of samples of each rank."""
    hint = (
        "If the ranks' loaders differ in length, iterate ab.shares(loader): ranks that finish early then take part "
        "with empty shares until all loaders have ended."
    )
    try:
        rows = world.gather_from(lambda: [float(count()), float(start.epoch), float(start.sample_offset)], 3)
    except RankFailedError as error:
        error.add_note(f"anybatch: this rank waited for the other ranks' numbers of samples. {hint}")
        raise
    for rank, (_, *position) in enumerate(rows):
        if position != rows[0][1:]:
            message = (
                f"ranks are not in the same step: rank 0 is at sample {rows[0][2]:,.0f} of its data, rank {rank} at "
                f"sample {position[1]:,.0f}. {hint}"
            )
            raise DataError(message)
    return [int(row[0]) for row in rows]


def _plan_share(share: RankShare, placement: Placement, world: World, start: Position) -> PlannedBatch:
    # A rank whose loader has ended takes part with 0 samples, because other ranks wait for its number of samples.
    batch: Batch = None

    def read() -> int:
        nonlocal batch
        batch, number = (None, 0) if share.batch is None else mark_and_count(share.batch)
        return number

    sizes = _sizes_on_ranks(read, world, start)
    if not sum(sizes):
        message = (
            "the effective batch is empty: no rank has a sample. End the loop before this step, as ab.shares does."
        )
        raise BatchSizeError(message, effective_batch_size=0, world_size=world.size)
    if placement.split.lockstep:
        _check_idle_ranks(sizes, "no sample")
    if placement.budget is not None:
        check_combinations({Feature.TOKEN_BUDGET: "", Feature.RANK_SHARES: ""})
    plan = plan_shares(tuple(sizes), placement.split)
    first = sum(sizes[: placement.rank])
    units = plan.shares[placement.rank]
    return PlannedBatch(
        plan=plan,
        units=units,
        sample_ids=range(start.sample_offset, start.sample_offset + sum(sizes)),
        seed=0,  # replaced by the planner, since loaders other than ab.batches have no seed
        # The engine does not know where the loader's epochs end, so samples are counted from the start of the run.
        end=Position(start.epoch, start.sample_offset + sum(sizes)),
        micro_batches=iter([slice_marked(batch, unit.start - first, unit.stop - first) for unit in units]),
        pick=functools.partial(select_each, batch, first=first),
        picks_any=False,
    )
