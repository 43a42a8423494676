"""The search for micro_batch_size="auto": of a few sizes that fit, use the smallest that is nearly the fastest.

This is the only file of the engine that reads a clock. The result is stored in the run header and in checkpoints, so
that a resumed run makes the same choice.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import (
    ceil_div,
    even_size,
    sizes_to_time,
    smallest_of_the_fastest,
)
from anybatch.core.loss import factors_of, unit_counts
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.torch_internals import is_compiled
from anybatch.core.tree import Batch
from anybatch.core.units import listed
from anybatch.engine.accumulate import LoopContext, MicroBatch
from anybatch.engine.batch_norm import Execute
from anybatch.engine.loss_check.runs import LossRuns
from anybatch.engine.micro_batches import to_device
from anybatch.engine.user_code import SeededGenerators, without_side_effects
from anybatch.errors import BatchSizeError
from anybatch.memory.device_memory import HostHeadroom
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World

# Not last, because the last micro-batch starts a reduction, and ranks may run different numbers of micro-batches.
_NEITHER = Turn(first=False, last=False)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial run on this rank, with the seconds of each micro-batch."""

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
    optimizer: Optimizer
    loss_runs: Callable[[SeededGenerators], LossRuns]

    @property
    def num_parameters(self) -> int:
        """Number of trained parameter elements."""
        return sum(p.numel() for p in self.context.prepared.parameters.values())

    @property
    def why_not_timed(self) -> str:
        """Why timings must not determine sizes in this run, as a clause; empty if they may."""
        if self.context.loss.kind.encode is not None:
            return "a loss across samples (ab.joint) runs each forward twice if the batch is split"
        if any(map(is_compiled, self.modules.modules())):
            return "torch.compile would recompile the model for each size"
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on, and timings are not deterministic"
        return ""

    @contextmanager
    def restoring_state(self, device: torch.device) -> Iterator[SeededGenerators]:
        """Context that, on exit, restores everything that trial runs have changed."""
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
    # Function (size, max_number) -> the first micro-batches of this rank's share, on the host, at most `max_number`.
    pieces: Callable[[int, int], Iterable[Batch]]
    num_samples: int  # of this rank's share
    _: KW_ONLY
    num_in_batch: int
    device: torch.device
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._marks: list[float] = []
        self._context = dataclasses.replace(
            self.trial.context,
            before=(lambda _: self._mark(),),
            after=(lambda _item, _terms: self._mark(),),
            notifier=None,
        )

    def run(self, size: int, max_number: int) -> TrialResult:
        """Run the first micro-batches of `size` samples, at most `max_number`; none if the share has no samples."""
        self.trial.clear()
        self._context.strategy.place_gradients()
        self._marks.clear()
        outcome: Literal["out_of_memory", "failed"]
        error = ""
        try:
            self._run(size, max_number)
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

    def _run(self, size: int, max_number: int) -> None:
        prepared = []
        pieces = to_device(iter(self.pieces(size, max_number)), self.device)
        # Not strict, because there are at most `max_number` pieces.
        for start, piece in zip(range(0, self.num_samples, size), pieces, strict=False):
            stop = min(start + size, self.num_samples)
            # Divide by the micro-batch's number of items; only an update needs the count of the whole batch.
            counts = unit_counts(self._context.loss, piece, stop - start)
            factors = factors_of(self._context.loss, counts, counts, 1.0)
            if any(counts):
                # The key is arbitrary, because no result depends on it.
                key = BatchKey(0, 0, range(stop))
                prepared.append((MicroBatch(Unit(0, start, stop), factors, _NEITHER, 0, key), piece))
        with self._context.randomness:
            if self._context.loss.kind.encode is None:
                self.trial.execute(self._context, prepared)
            else:
                from anybatch.engine.two_pass import run_trial  # noqa: PLC0415 (few losses need it)

                run_trial(self._context, self.trial.modules, prepared, self.num_in_batch)

    def _mark(self) -> None:
        """Record the time after the device has finished all work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._marks.append(self.clock())


WORTH_TIMING = 1_000_000
"""Sizes are timed if parameters times samples per rank reach this number; below it, a step takes milliseconds."""
NUM_ROUNDS = 3
"""Timings of each size; the shortest is used, since disturbances only make a step longer."""
_MIN_GAIN = 1.1
"""Minimum gain in samples per second for which doubling continues beyond the time limit."""
# From best to worst: the common outcome of all ranks is the worst outcome of any rank.
_CODES = ("ran", "out_of_memory", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """`micro_batch_size=Auto(...)`: "auto" with a planned limit or a time limit.

    ```python
    ab.Engine(model, optimizer, loss, micro_batch_size=Auto(max_seconds=30.0))
    ```

    Args:
        largest: function (batch, num_samples) -> the largest size that is planned to fit, or None if unknown; see
            `anybatch.sizes.planned_largest`. Its arguments are the rank's share of the first effective batch, on the
            host, and the number of samples of the largest share; a `PlanError` is reported in the decision. No larger
            size is tried. None: sizes are doubled until memory runs out or the whole share fits.
        max_seconds: time limit. Doubling continues beyond it only while it gives 10% more samples per second.
        clock: function that returns a monotonic time in seconds.
    """

    largest: Callable[[Batch, int], int | None] | None = None
    max_seconds: float = 10.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class FoundSize:
    """A micro-batch size with texts about the choice; `layout` is the text about padded or packed micro-batches."""

    size: int | None  # None: all samples of a rank in one micro-batch
    description: str
    rate: float | None = None  # samples per second over all ranks
    layout: str = ""


class _AgreedResult(NamedTuple):
    """The result of a trial run on all ranks: the worst outcome, and the time of the slowest rank."""

    outcome: str
    seconds: float  # of one full micro-batch
    step_seconds: float  # of all micro-batches of a rank share
    may_double: bool


@dataclass(slots=True)
class _Doubling:
    """The result of doubling the size: times by size, and the limits found."""

    seconds: dict[int, float] = field(default_factory=dict)  # of one micro-batch
    steps: dict[int, float] = field(default_factory=dict)  # seconds of all micro-batches of a rank
    largest: int = 0
    too_large: int | None = None
    ended: str = ""  # why larger sizes were not tried, as a clause

    def record(self, size: int, trial: _AgreedResult) -> None:
        """Record a size that fits."""
        self.largest, self.seconds[size], self.steps[size] = size, trial.seconds, trial.step_seconds


@dataclass(eq=False, repr=False)
class Search:
    """Finds a micro-batch size by trial runs. All ranks run the same sizes, and return the same result."""

    runs: TrialRuns
    world: World
    _: KW_ONLY
    share: int  # maximum of the ranks' numbers of samples in the first batch
    auto: Auto
    room: HostHeadroom | None = None  # stops doubling on a CPU, which raises no out-of-memory errors
    group: int = 1
    optimizer_is_new: bool = False
    planned: int | None = None  # the largest size that the planner expects to fit
    why_not_planned: str = ""

    def __post_init__(self) -> None:
        # A part of the share has whole groups of samples; only the whole share may end with an incomplete group.
        if self.planned is not None and self.planned < self.share:
            self.planned = max(1, self.planned // self.group) * self.group
        self._upper = self.share if self.planned is None else min(self.share, self.planned)
        self._begun = self.auto.clock()
        self._elapsed = 0.0
        self._error = ""

    def largest(self, device: str) -> FoundSize:
        """Return the largest size that fits, in equal parts, without timing."""
        doubling = self._double(timed=False)
        if not doubling.largest:
            return self._whole_share()
        size = even_size(self.share, doubling.largest, group=self.group)
        return FoundSize(size, f"{size}, by a doubling search on {device}{self._fitting(doubling, size)}")

    def fastest(self) -> FoundSize:
        """Return the smallest of the fastest sizes that fit."""
        doubling = self._double(timed=True)
        if not doubling.largest:
            return self._whole_share()
        sizes = sizes_to_time(self.share, doubling.largest, doubling.seconds, group=self.group)
        steps = self._time(sizes, doubling) or {
            size: doubling.steps[size] for size in doubling.steps if size <= doubling.largest
        }
        size = smallest_of_the_fastest(steps)
        # A coarse clock may measure zero seconds.
        rates = {tried: self.runs.num_in_batch / max(seconds, 1e-9) for tried, seconds in steps.items()}
        return FoundSize(
            size, f"{size}, {_compared(size, steps, rates)}{self._fitting(doubling, max(steps))}", rates[size]
        )

    def _double(self, *, timed: bool) -> _Doubling:
        """Double the size until memory, the samples of a rank, the plan's limit or the time limit do not allow more."""
        doubling = _Doubling()
        size = min(max(2, self.group), self._upper)  # not 1: BatchNorm refuses a single sample in train mode
        while True:
            trial = self._try(size, 2)
            if trial.outcome == "ran":
                doubling.record(size, trial)
            elif trial.outcome == "out_of_memory":
                doubling.too_large = size
                self._settle_largest(doubling)
                break
            if size == self._upper:
                break
            if timed and doubling.largest and self._is_late(doubling):
                doubling.ended = f"larger sizes were not tried for lack of time ({self._elapsed:.0f} s used)"
                break
            if not trial.may_double:
                doubling.ended = "larger sizes were not tried, because the free memory may not suffice"
                break
            size = min(2 * size, self._upper)
        return doubling

    def _is_late(self, doubling: _Doubling) -> bool:
        """Return whether doubling again would exceed half of the time limit; the other half is for timing the sizes.

        While doubling still gives more samples per second, the limit does not apply.
        """
        *_, size = doubling.seconds
        after = self._elapsed + 4 * doubling.seconds[size]  # two micro-batches, each at most twice as long
        before = doubling.seconds.get(size // 2)
        is_worthwhile = before is None or 2 * before > _MIN_GAIN * doubling.seconds[size]
        return after > self.auto.max_seconds / 2 and not is_worthwhile

    def _settle_largest(self, doubling: _Doubling) -> None:
        """Determine the largest size that fits, after memory ran out; raise a `BatchSizeError` if none does."""
        smallest = min(self.group, self.share)
        if not doubling.largest and (doubling.too_large or 0) > smallest:
            trial = self._try(smallest, 2)
            if trial.outcome == "ran":
                doubling.record(smallest, trial)
        if not doubling.largest and not self._error:
            what = "1 sample" if smallest == 1 else f"one group of {smallest} samples"
            message = (
                f"micro_batch_size='auto': not even {what} fits into the device's memory. Use a smaller model, "
                "precision='bf16' or activation checkpointing."
            )
            raise BatchSizeError(message, micro_batch_size=smallest)
        # Halve the size, since an optimizer that has no state yet allocates it in the first step, not in trial runs.
        if self.optimizer_is_new:
            doubling.largest = max(min(smallest, doubling.largest), doubling.largest // 2)

    def _time(self, sizes: tuple[int, ...], doubling: _Doubling) -> dict[int, float]:
        """Return the shortest time of a rank share for each size; empty if there is no time left to time every size."""
        shortest: dict[int, float] = {}
        for number in range(NUM_ROUNDS + 1):  # the first round warms up sizes that have not run yet
            # Interleaved, so that a temporary disturbance affects all sizes.
            for size in sizes:
                if number == 0 and size in doubling.seconds:
                    continue
                expected = doubling.seconds[doubling.largest]
                # Times are comparable only if every size has one; otherwise the times of the doubling are used.
                is_late = self._elapsed + 2 * expected > self.auto.max_seconds
                if is_late or (trial := self._try(size, 2)).outcome != "ran":
                    return shortest if shortest.keys() == set(sizes) else {}
                if number:
                    shortest[size] = min(trial.step_seconds, shortest.get(size, math.inf))
        return shortest

    def _try(self, size: int, max_number: int) -> _AgreedResult:
        """Run at most `max_number` micro-batches of `size` on every rank, and return the common result."""
        run = self.runs.run(size, max_number)
        self._error = run.error or self._error
        seconds, step = self._seconds_of_share(run, size)
        elapsed = self.runs.clock() - self._begun
        may_double = self.room is None or self.room.may_double()
        # Larger is worse for each of these numbers, so the common result is their maximum over ranks.
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
        # Not all micro-batches ran, so the mean time of those that ran is extrapolated to the share.
        return run.seconds[-1], share / size * sum(run.seconds) / len(run.seconds)

    def _fitting(self, doubling: _Doubling, largest_tried: int) -> str:
        """Return the results for larger sizes, as the end of a sentence."""
        clauses = []
        if self.planned is not None and doubling.largest == self.planned < self.share:
            clauses.append(f"{doubling.largest} fits, as planned")
        elif doubling.largest > largest_tried:
            clauses.append(f"{doubling.largest} fits")
        if doubling.too_large is not None:
            clauses.append(f"{doubling.too_large} does not fit")
        if doubling.ended:
            clauses.append(doubling.ended)
        if self.why_not_planned:
            clauses.append(f"sizes were doubled, because there is no plan ({self.why_not_planned})")
        return "".join(f"; {clause}" for clause in clauses)

    def _whole_share(self) -> FoundSize:
        """Return the whole rank share, after every trial run failed; the step itself raises the error."""
        return FoundSize(None, f"the whole rank share, because trial runs failed ({self._error})")


def _compared(chosen: int, steps: Mapping[int, float], rates: Mapping[int, float]) -> str:
    """Compare the chosen size with other sizes: `the fastest of 8, 16 and 32 (120, 140 and 130 samples/s)`."""
    if len(steps) == 1:
        return f"the only size tried ({rates[chosen]:,.0f} samples/s)"
    sizes = sorted(steps)
    best = min(steps, key=lambda size: steps[size])
    how = "the fastest of" if chosen == best else "the smallest within 3% of the fastest of"
    return f"{how} {listed(sizes)} ({listed(f'{rates[size]:,.0f}' for size in sizes)} samples/s)"
