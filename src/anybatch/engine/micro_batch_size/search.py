"""The search for micro_batch_size="auto": of a few sizes that fit, the smallest that is about as fast as the fastest.

No other file of the engine reads a clock. The result is stored as a decision in the run header and in checkpoints, so
that a resumed run makes the same choice.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from anybatch.core.geometry import (
    KnownSize,
    SecondsFit,
    ceil_div,
    even_size,
    fit_seconds,
    sizes_to_time,
    smallest_of_the_fastest,
    step_seconds,
)
from anybatch.core.loss import factors_of, unit_counts
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tree import Batch, copied
from anybatch.engine.accumulate import LoopContext, MicroBatch
from anybatch.engine.batch_norm import Execute
from anybatch.engine.loss_check.runs import LossRuns
from anybatch.engine.micro_batches import to_device
from anybatch.engine.torch_internals import is_compiled
from anybatch.engine.user_code import SeededGenerators, without_side_effects
from anybatch.errors import BatchSizeError
from anybatch.memory.device_memory import HostRoom
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

# Neither first nor last: a last micro-batch would start a reduction, and other ranks may run fewer.
_NEITHER = Turn(first=False, last=False)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial run."""

    outcome: Literal["ran", "out_of_memory", "failed"]
    seconds: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialParts:
    """The parts for trial runs of the first batch; `execute` runs micro-batches without waiting for other ranks."""

    context: LoopContext
    modules: nn.Module
    execute: Execute
    clear: Callable[[], None]
    optimizer_is_new: bool
    precision: str
    loss_runs: Callable[[SeededGenerators], LossRuns]

    @property
    def num_parameters(self) -> int:
        """Number of trained parameter elements."""
        return sum(p.numel() for p in self.context.prepared.parameters.values())

    @property
    def why_clocks_do_not_count(self) -> str:
        """Why speed must not decide anything in this run, as a clause; empty if it may."""
        if self.context.loss.kind.encode is not None:
            return "a loss across samples runs each forward twice if it is cut"
        if any(map(is_compiled, self.modules.modules())):
            return "torch.compile would recompile the model for each size"
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and timings are not deterministic"
        return ""

    @contextmanager
    def undone(self, device: torch.device) -> Iterator[SeededGenerators]:
        """Restore everything that trial runs change, on exit."""
        functions = self.context.loss.functions.values()
        # Compiled modules run compiled, to measure the memory of real steps.
        with without_side_effects(self.modules, device, functions=functions, as_compiled=True) as generators:
            try:
                yield generators
            finally:
                self.clear()


@dataclass(eq=False, repr=False)
class TrialRuns:
    """Runs the first micro-batches of this rank's share, of any size, without a reduction or an update.

    Gradients are cleared before and after; the caller restores buffers, attributes and random numbers.
    """

    trial: TrialParts
    # Function (size, most) -> the first micro-batches of this rank's share, on the host, at most `most`.
    pieces: Callable[[int, int], Iterable[Batch]]
    num_samples: int  # of this rank's share
    _: KW_ONLY
    num_in_batch: int
    num_in_lockstep: int | None = None  # samples of the largest share, if all ranks must run as often as its rank
    device: torch.device
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._marks: list[float] = []
        self._context = dataclasses.replace(
            self.trial.context,
            before=(lambda _: self._mark(),),
            after=(lambda _item, _terms: self._mark(),),
            audience=None,
        )

    def run(self, size: int, most: int) -> TrialResult:
        """Run the first micro-batches of `size`, at most `most`; a share without samples runs none."""
        self.trial.clear()
        self._context.strategy.place_gradients()
        self._marks.clear()
        outcome: Literal["out_of_memory", "failed"]
        error = ""
        try:
            self._run(size, most)
            return TrialResult(
                "ran", tuple(end - start for start, end in zip(self._marks[::2], self._marks[1::2], strict=True))
            )
        except torch.OutOfMemoryError:
            outcome = "out_of_memory"
        except Exception as caught:  # noqa: BLE001 (the step itself raises it)
            outcome, error = "failed", f"{type(caught).__name__}: {caught}"
        # Outside the handlers, so that the failed frames and their tensors are freed before the next run.
        self.trial.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return TrialResult(outcome, (), error)

    def _run(self, size: int, most: int) -> None:
        lined_up = []
        pieces = to_device(iter(self.pieces(size, most)), self.device)
        # Not strict: there are at most `most` pieces.
        for start, piece in zip(range(0, self.num_samples, size), pieces, strict=False):
            stop = min(start + size, self.num_samples)
            # Divided by the micro-batch's count: without an update, the count of the whole batch is not needed.
            counts = unit_counts(self._context.loss, piece, stop - start)
            if self.num_in_lockstep is not None:  # all ranks run all of them; the loss of a trial does not matter
                counts = tuple(count or 1.0 for count in counts)
            factors = factors_of(self._context.loss, counts, counts, 1.0)
            if any(counts):
                # The key is arbitrary: no result depends on it.
                key = BatchKey(0, 0, range(stop))
                lined_up.append((MicroBatch(Unit(0, start, stop), factors, _NEITHER, 0, key), piece))
        if self.num_in_lockstep is not None:  # the rank with the largest share may have one more
            missing = min(most, ceil_div(self.num_in_lockstep, size)) - len(lined_up)
            last, batch = lined_up[-1]
            lined_up += [(last, copied(batch)) for _ in range(missing)]
        with self._context.randomness:
            if self._context.loss.kind.encode is None:
                self.trial.execute(self._context, lined_up)
            else:
                from anybatch.engine.two_pass import run_trial  # noqa: PLC0415 (few losses need it)

                run_trial(self._context, self.trial.modules, lined_up, self.num_in_batch)

    def _mark(self) -> None:
        """Record the time after the device has finished all work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._marks.append(self.clock())


WORTH_TIMING = 1_000_000
"""Minimum of parameters times samples of a rank share for timing sizes; below it, a step takes milliseconds."""
NUM_ROUNDS = 3
"""Timings of each size; the shortest counts, since disturbances only make it longer."""
_SHORTEST_SECONDS = 0.005
"""Minimum seconds of a timing, unless the share ends earlier: shorter times depend on the clock's resolution."""
_PAYS = 1.1
"""Minimum gain in samples per second for doubling to be worthwhile."""
# From good to bad: ranks agree on the maximum of their indices.
_CODES = ("ran", "out_of_memory", "failed")


class Memory(Protocol):
    """A cache of sizes across processes, such as `anybatch.sizes.KnownSizes`."""

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return the size saved under exactly these circumstances (names to plain values), or None."""
        ...

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Save a size and its samples per second over all ranks, and return whether that succeeded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """`micro_batch_size=Auto(...)`: "auto" with a planned limit, a cache of sizes, or a time limit.

    ```python
    ab.Engine(model, optimizer, loss, micro_batch_size=Auto(known=KnownSizes()))
    ```

    Args:
        largest: function (batch, num_samples) -> the largest size that is planned to fit, or None if unknown; see
            `anybatch.sizes.planned_largest`. Its arguments are the rank's share of the first
            effective batch, on the host, and the samples of the largest share; a `PlanError` becomes part of the
            decision. No larger size is tried, and fewer sizes are. None: sizes are doubled until memory runs out or the
            whole share fits.
        known: cache of measured sizes across processes; None measures in each.
        most_seconds: time limit. Doubling continues beyond it only while that makes samples a tenth faster.
        clock: monotonic time in seconds.
    """

    largest: Callable[[Batch, int], int | None] | None = None
    known: Memory | None = None
    most_seconds: float = 10.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class FoundSize:
    """A size (None for the whole rank share) and the reason for it; `rate` in samples per second over all ranks."""

    size: int | None
    words: str
    rate: float | None = None
    layout: str = ""


class _AgreedResult(NamedTuple):
    """The result of a trial run on all ranks: the worst outcome, and the slowest rank's seconds."""

    outcome: str
    seconds: float  # of one full micro-batch
    step_seconds: float  # of all micro-batches of a rank share
    may_double: bool


@dataclass(slots=True)
class _Doubling:
    """The result of doubling the size: seconds of a micro-batch and of a rank share, by size, and the limits found."""

    seconds: dict[int, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    largest: int = 0
    too_large: int | None = None
    ended: str = ""

    def fits(self, size: int, trial: _AgreedResult) -> None:
        """Record a size that has run."""
        self.largest, self.seconds[size], self.steps[size] = size, trial.seconds, trial.step_seconds


@dataclass(eq=False, repr=False)
class Search:
    """Finds a micro-batch size by trial runs. All ranks run the same sizes, and get the same result."""

    runs: TrialRuns
    world: World
    _: KW_ONLY
    share: int
    num_in_batch: int
    auto: Auto
    room: HostRoom | None = None
    group: int = 1
    optimizer_is_new: bool = False

    def __post_init__(self) -> None:
        self._planned: int | None = None
        self._unplanned = ""
        self._upper = self.share
        self._begun = self.auto.clock()
        self._elapsed = 0.0
        self._error = ""
        self._line: SecondsFit | None = None

    def plan(self, planned: int | None, unplanned: str = "") -> None:
        """Limit the search to the planned size, try fewer sizes, and restart the clock."""
        # Parts of the share hold whole groups; the whole share may end with an incomplete one.
        if planned is not None and planned < self.share:
            planned = max(1, planned // self.group) * self.group
        self._planned = planned
        self._unplanned = unplanned
        self._upper = self.share if planned is None else min(self.share, planned)
        self._begun = self.auto.clock()

    def fits(self, size: int) -> bool:
        """Return whether two micro-batches of `size` run on every rank."""
        # The second one runs with allocated gradients, like all but the first micro-batch of a step.
        return self._try(size, 2).outcome == "ran"

    def largest(self, device: str) -> FoundSize:
        """Return the largest size that fits, in equal parts, without timing.

        Raises:
            BatchSizeError: not even one sample fits.
        """
        doubling = self._double(timed=False)
        if not doubling.largest:
            return self._unknown()
        size = even_size(self.share, doubling.largest, group=self.group)
        return FoundSize(size, f"{size}, by a doubling search on {device}{self._fitting(doubling, size)}")

    def fastest(self) -> FoundSize:
        """Return the smallest of the fastest sizes that fit.

        Raises:
            BatchSizeError: not even one sample fits.
        """
        doubling = self._double(timed=True)
        if not doubling.largest:
            return self._unknown()
        self._line = fit_seconds(doubling.seconds)
        sizes = sizes_to_time(self.share, doubling.largest, doubling.seconds, group=self.group)
        steps = self._time(sizes, doubling) or {
            size: doubling.steps[size] for size in doubling.steps if size <= doubling.largest
        }
        size = smallest_of_the_fastest(steps)
        # A coarse clock may measure zero seconds.
        rates = {tried: self.num_in_batch / max(seconds, 1e-9) for tried, seconds in steps.items()}
        return FoundSize(
            size, f"{size}, {_compared(size, steps, rates)}{self._fitting(doubling, max(steps))}", rates[size]
        )

    def _double(self, *, timed: bool) -> _Doubling:
        """Double the size until it does not fit, reaches the share, or time is up; a plan allows larger increases."""
        doubling = _Doubling()
        size = min(max(2, self.group), self._upper)  # not 1: BatchNorm refuses a single sample in train mode
        below = seed = 0
        if self._planned is not None:  # try the smallest of the sizes to time, a quarter of the largest, directly
            seed = ceil_div(self._upper, 4 * self.group) * self.group if timed else self._upper
        while True:
            trial = self._try(size, 2)
            if trial.outcome == "ran":
                doubling.fits(size, trial)
            elif trial.outcome == "out_of_memory":
                doubling.too_large = size
                if size != seed or 2 * below >= size:
                    break
                size, seed = below, 0  # the plan was too large
            if size == self._upper or (doubling.too_large is not None and 2 * size >= doubling.too_large):
                break
            if timed and doubling.largest and self._is_late(doubling):
                doubling.ended = f"larger sizes were not tried for lack of time ({self._elapsed:.0f} s used)"
                break
            if not trial.may_double:
                doubling.ended = "larger sizes were not tried, because the free memory may not suffice"
                break
            below = size
            size = seed if 2 * size < seed and self._soon(seed, doubling, timed=timed) else min(2 * size, self._upper)
        if doubling.too_large is not None:
            self._settle_largest(doubling)
        return doubling

    def _soon(self, size: int, doubling: _Doubling, *, timed: bool) -> bool:
        """Return whether there is time for this size, estimated from the largest one that has run."""
        if not timed or not doubling.largest:
            return not timed
        # Two micro-batches, with time proportional to their size.
        expected = 2 * doubling.seconds[doubling.largest] * size / doubling.largest
        return self._elapsed + expected <= self.auto.most_seconds / 2

    def _is_late(self, doubling: _Doubling) -> bool:
        """Return whether doubling again would exceed half of the time limit; the other half is for the comparison.

        While doubling still makes samples faster, the limit is ignored: a slow model needs a good size most.
        """
        *_, size = doubling.seconds
        after = self._elapsed + 4 * doubling.seconds[size]  # two micro-batches, each at most twice as long
        before = doubling.seconds.get(size // 2)
        pays = before is None or 2 * before > _PAYS * doubling.seconds[size]
        return after > self.auto.most_seconds / 2 and not pays

    def _settle_largest(self, doubling: _Doubling) -> None:
        """Determine the largest size that fits, after memory ran out.

        Raises:
            BatchSizeError: not even one sample, or one group, fits.
        """
        least = min(self.group, self.share)
        if not doubling.largest and (doubling.too_large or 0) > least:
            trial = self._try(least, 2)
            if trial.outcome == "ran":
                doubling.fits(least, trial)
        if not doubling.largest and not self._error:
            what = "1 sample" if least == 1 else f"one group of {least} samples"
            message = (
                f"micro_batch_size='auto': not even {what} fits into the device's memory. Use a smaller model, "
                "precision='bf16' or activation checkpointing."
            )
            raise BatchSizeError(message, micro_batch_size=least)
        # Adam allocates two tensors per parameter in its first step, which trial runs do not include.
        if self.optimizer_is_new:
            doubling.largest = max(min(least, doubling.largest), doubling.largest // 2)

    def _time(self, sizes: tuple[int, ...], doubling: _Doubling) -> dict[int, float]:
        """Return the shortest time of a rank share for each size; empty if time did not suffice for all of them."""
        found: dict[int, float] = {}
        left = list(sizes)
        for number in range(NUM_ROUNDS + 1):  # the first round warms up sizes that have not run yet
            # Interleaved, so that a temporary disturbance does not affect one size only.
            for size in sizes:
                if size not in left or (number == 0 and size in doubling.seconds):
                    continue
                expected = doubling.seconds.get(size) or (self._line.seconds(size) if self._line else 0.0)
                most = max(2, math.ceil(_SHORTEST_SECONDS / expected)) if expected else 2
                if self._elapsed + min(most, ceil_div(self.share, size)) * expected > self.auto.most_seconds:
                    # Times are comparable only if every size has one; otherwise the doubling's times are used.
                    return found if found.keys() == set(left) else {}
                trial = self._try(size, most)
                if trial.outcome != "ran":
                    left.remove(size)
                    found.pop(size, None)
                elif number:
                    found[size] = min(trial.step_seconds, found.get(size, math.inf))
        return found

    def _try(self, size: int, most: int) -> _AgreedResult:
        """Run at most `most` micro-batches on every rank, and agree on the result."""
        run = self.runs.run(size, most)
        self._error = run.error or self._error
        seconds, step = self._seconds_of_share(run, size)
        elapsed = self.runs.clock() - self._begun
        may_double = self.room is None or self.room.may_double()
        # Larger is worse for each number, so one maximum over ranks is right for all of them.
        numbers = [float(_CODES.index(run.outcome)), seconds, step, elapsed, float(not may_double)]
        worst = [max(column) for column in zip(*self.world.gather_numbers(numbers), strict=True)]
        self._elapsed = worst[3]
        return _AgreedResult(_CODES[int(worst[0])], worst[1], worst[2], not worst[4])

    def _seconds_of_share(self, run: TrialResult, size: int) -> tuple[float, float]:
        """Return the seconds of one full micro-batch, and of this rank's whole share."""
        share = self.runs.num_samples
        if not run.seconds:
            return 0.0, 0.0
        if len(run.seconds) == ceil_div(share, size):
            return max(run.seconds[-2:]), sum(run.seconds)  # the last one may be smaller
        mean = sum(run.seconds) / len(run.seconds)
        return run.seconds[-1], step_seconds(share, size, mean, self._line)

    def _fitting(self, doubling: _Doubling, largest_tried: int) -> str:
        """Return the results for larger sizes, as the end of a sentence."""
        clauses = []
        if self._planned is not None and doubling.largest == self._planned < self.share:
            clauses.append(f"{doubling.largest} fits, as planned")
        elif doubling.largest > largest_tried:
            clauses.append(f"{doubling.largest} fits")
        if doubling.too_large is not None:
            clauses.append(f"{doubling.too_large} does not fit")
        if doubling.ended:
            clauses.append(doubling.ended)
        if self._unplanned:
            clauses.append(f"sizes were doubled, because there is no plan ({self._unplanned})")
        return "".join(f"; {clause}" for clause in clauses)

    def _unknown(self) -> FoundSize:
        """Return the whole rank share, after every trial run failed; the step itself raises the error."""
        return FoundSize(None, f"the whole rank share, because trial runs failed ({self._error})")


def _compared(chosen: int, steps: Mapping[int, float], rates: Mapping[int, float]) -> str:
    """Return how a size compares with the others: `the fastest of 8, 16 and 32 (120, 140 and 130 samples/s)`."""
    if len(steps) == 1:
        return f"the only size tried ({rates[chosen]:,.0f} samples/s)"
    sizes = sorted(steps)
    best = min(steps, key=lambda size: steps[size])
    how = "the fastest of" if chosen == best else "the smallest within 3% of the fastest of"
    return (
        f"{how} {_listed(str(size) for size in sizes)} ({_listed(f'{rates[size]:,.0f}' for size in sizes)} samples/s)"
    )


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"
