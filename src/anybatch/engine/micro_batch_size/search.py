"""The search behind "auto": of a few micro-batch sizes that fit, the smallest that is as fast as the fastest.

The one place in the engine where a clock is read. What is decided here is written down: in the run's decisions, hence
in the header of its log and in its checkpoints, and a resumed run takes it again.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from anybatch.core.geometry import ceil_div
from anybatch.core.size_choice import (
    KnownSize,
    SecondsFit,
    even_size,
    fit_seconds,
    sizes_worth_timing,
    smallest_of_the_fastest,
    step_seconds,
)
from anybatch.core.tree import Batch
from anybatch.engine.micro_batch_size.trial_run import TrialResult, TrialRuns
from anybatch.errors import BatchSizeError
from anybatch.parallel.world import World

NUM_ROUNDS = 3
"""How often each size is timed; the shortest time counts, since whatever disturbs makes it longer."""
_SHORTEST_SECONDS = 0.005
"""Micro-batches are run in a row until this is over, or the share is: less says more of the clock than of the model."""
_PAYS = 1.1
"""Doubling pays if it makes samples this many times as fast."""
# From good to bad: ranks agree on the largest of their numbers.
_CODES = ("ran", "out_of_memory", "failed")


class Memory(Protocol):
    """A memory of sizes from one process to the next, such as `anybatch.planner.cache.measured_sizes.KnownSizes`."""

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return what was kept under exactly these circumstances; None for nothing.

        Args:
            circumstances: all that the fastest size depends on; names to plain values.
        """
        ...

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Keep a size; return whether that was possible.

        Args:
            circumstances: all that the fastest size depends on; names to plain values.
            size: samples of a micro-batch.
            samples_per_second: of forward and backward over all ranks, at that size.
        """
        ...


class Room(Protocol):
    """The memory that is left, where running out of it ends the process instead of raising: on a CPU."""

    @property
    def available_bytes(self) -> int | None:
        """Bytes that could be allocated at the beginning; None where that is not known."""
        ...

    def may_double(self) -> bool:
        """Return whether twice of what has been taken at most since the beginning would have fitted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """`micro_batch_size=Auto(...)`: "auto" with what is known beforehand.

    ```python
    ab.Engine(model, optimizer, loss, micro_batch_size=Auto(known=KnownSizes()))
    ```

    Args:
        largest: function (batch, num_samples) -> the largest size that is planned to fit, or None if that is not known,
            such as `anybatch.recipes.planning.size_limit.planned_largest` makes. It gets the rank's share of the first
            effective batch, on the host, and the samples of the largest share; a `PlanError` from it becomes part of
            the decision. Nothing larger is tried, and fewer sizes are. None: sizes are doubled until memory runs out or
            the share is used up.
        known: remembers what was found, from one process to the next; None measures in each.
        most_seconds: how long to try. Sizes are doubled for longer only while that makes samples a tenth faster.
        clock: monotonic time in seconds.
    """

    largest: Callable[[Batch, int], int | None] | None = None
    known: Memory | None = None
    most_seconds: float = 10.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class FoundSize:
    """A size, and why.

    Attributes:
        size: samples of one micro-batch; None for the whole rank share, whatever its size.
        words: what was tried, and what came of it.
        rate: samples per second of forward and backward over all ranks; None if nothing was timed.
        layout: whether samples are padded or packed, and why; empty where that was not open.
    """

    size: int | None
    words: str
    rate: float | None = None
    layout: str = ""


@dataclass(frozen=True, slots=True)
class _AgreedResult:
    """The result of a trial run on all ranks: the worst outcome, the slowest rank.

    Attributes:
        outcome: as of a `TrialResult`.
        seconds: of one full micro-batch.
        step_seconds: of all micro-batches of a rank share.
        may_double: whether there is memory for twice as much.
    """

    outcome: str
    seconds: float
    step_seconds: float
    may_double: bool


@dataclass(slots=True, kw_only=True)
class _Doubling:
    """How far sizes were doubled, and what was seen on the way.

    Attributes:
        seconds: size to the seconds of one micro-batch.
        steps: size to the seconds of a rank share.
        largest: the largest size that is known to fit; 0 for none.
        too_large: the smallest that did not fit; None if there was none.
        ended: why larger ones were not tried.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    largest: int = 0
    too_large: int | None = None
    ended: str = ""


class Search:
    """Finds a micro-batch size by running micro-batches. All ranks do the same, and find the same.

    Args:
        runs: runs micro-batches on this rank.
        world: the ranks.
        share: samples of the largest rank share.
        num_in_batch: samples of the effective batch.
        auto: what is known beforehand, and for how long to try.
        room: how much memory is left; None where running out of it is an error that can be caught.
        group: micro-batches hold whole groups of so many samples.
        optimizer_is_new: it has no state yet, so its first step will take more memory than is seen here.
    """

    def __init__(
        self,
        runs: TrialRuns,
        world: World,
        *,
        share: int,
        num_in_batch: int,
        auto: Auto,
        room: Room | None = None,
        group: int = 1,
        optimizer_is_new: bool = False,
    ) -> None:
        self._runs = runs
        self._world = world
        self._share = share
        self._num_in_batch = num_in_batch
        self._auto = auto
        self._room = room
        self._group = group
        self._optimizer_is_new = optimizer_is_new
        self._planned: int | None = None
        self._unplanned = ""
        self._upper = share
        self._begun = auto.clock()
        self._elapsed = 0.0
        self._error = ""
        self._line: SecondsFit | None = None

    def plan(self, planned: int | None, unplanned: str = "") -> None:
        """Try nothing larger than is planned to fit, and fewer sizes; the time begins now.

        Args:
            planned: the largest size that is planned to fit; None for no plan. Rounded down to whole groups, but to
                no less than one.
            unplanned: why there is no plan where one was asked for; empty otherwise.
        """
        # A part of the share holds whole groups; the whole share may end with a part of one.
        if planned is not None and planned < self._share:
            planned = max(1, planned // self._group) * self._group
        self._planned = planned
        self._unplanned = unplanned
        self._upper = self._share if planned is None else min(self._share, planned)
        self._begun = self._auto.clock()

    def fits(self, size: int) -> bool:
        """Return whether two micro-batches of `size` run on every rank."""
        # The second one runs beside the gradients of the first, as all but the first in a step do.
        return self._try(size, 2).outcome == "ran"

    def largest(self, device: str) -> FoundSize:
        """Return the largest size that fits, in equal parts, without a look at the clock.

        Raises:
            BatchSizeError: not even one sample fits.
        """
        doubling = self._double(timed=False)
        if not doubling.largest:
            return self._unknown()
        size = even_size(self._share, doubling.largest, group=self._group)
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
        sizes = sizes_worth_timing(self._share, doubling.largest, doubling.seconds, group=self._group)
        steps = self._time(sizes, doubling) or {
            size: doubling.steps[size] for size in doubling.steps if size <= doubling.largest
        }
        size = smallest_of_the_fastest(steps)
        # A coarse clock may say that no time has passed.
        rates = {tried: self._num_in_batch / max(seconds, 1e-9) for tried, seconds in steps.items()}
        return FoundSize(
            size, f"{size}, {_compared(size, steps, rates)}{self._fitting(doubling, max(steps))}", rates[size]
        )

    def _double(self, *, timed: bool) -> _Doubling:
        """Double the size until it does not fit, or is that of the share, or the time is up; a plan leaves some out."""
        doubling = _Doubling()
        size = min(max(2, self._group), self._upper)  # one sample has no variance: BatchNorm refuses it in train mode
        below, seed = 0, self._seed(timed=timed)
        while True:
            trial = self._try(size, 2)
            if trial.outcome == "ran":
                doubling.largest, doubling.seconds[size], doubling.steps[size] = size, trial.seconds, trial.step_seconds
            elif trial.outcome == "out_of_memory":
                doubling.too_large = size
                if size != seed or 2 * below >= size:
                    break
                size, seed = below, 0  # the plan was wrong
            if size == self._upper or (doubling.too_large is not None and 2 * size >= doubling.too_large):
                break
            if timed and doubling.largest and self._is_late(doubling):
                doubling.ended = f"larger ones were not tried in the {self._elapsed:.0f} s that it took"
                break
            if not trial.may_double:
                doubling.ended = "larger ones were not tried, for there is not enough memory left to be sure"
                break
            below = size
            size = seed if 2 * size < seed and self._soon(seed, doubling, timed=timed) else min(2 * size, self._upper)
        if doubling.too_large is not None:
            self._settle_largest(doubling)
        return doubling

    def _seed(self, *, timed: bool) -> int:
        """Return the size to go to at once where there is a plan: the smallest that will be compared; 0 for none."""
        if self._planned is None:
            return 0
        # A quarter of the largest: that, a half and the largest itself will be timed.
        return ceil_div(self._upper, 4 * self._group) * self._group if timed else self._upper

    def _soon(self, size: int, doubling: _Doubling, *, timed: bool) -> bool:
        """Return whether there is time for so large a size, going by the one that has been run."""
        if not timed or not doubling.largest:
            return not timed
        # Two micro-batches, with time in proportion to their size.
        expected = 2 * doubling.seconds[doubling.largest] * size / doubling.largest
        return self._elapsed + expected <= self._auto.most_seconds / 2

    def _is_late(self, doubling: _Doubling) -> bool:
        """Return whether there is no time for twice the size: half of it is for comparing.

        More is taken while doubling still pays: a model for which time is short is the last one that should be left
        with a size that is too small.
        """
        *_, size = doubling.seconds
        after = self._elapsed + 4 * doubling.seconds[size]  # two micro-batches, each of at most twice the time
        before = doubling.seconds.get(size // 2)
        pays = before is None or 2 * before > _PAYS * doubling.seconds[size]
        return after > self._auto.most_seconds / 2 and not pays

    def _settle_largest(self, doubling: _Doubling) -> None:
        """Settle what fits once memory has run out.

        Raises:
            BatchSizeError: not even one sample fits, or not even one group.
        """
        least = min(self._group, self._share)
        if not doubling.largest and (doubling.too_large or 0) > least:
            trial = self._try(least, 2)
            if trial.outcome == "ran":
                doubling.largest, doubling.seconds[least], doubling.steps[least] = (
                    least,
                    trial.seconds,
                    trial.step_seconds,
                )
        if not doubling.largest and not self._error:
            what = "1 sample" if least == 1 else f"one group of {least} samples"
            message = (
                f"micro_batch_size='auto' found that not even {what} fits into the device's memory. Use a smaller "
                "model, precision='bf16' or activation checkpointing."
            )
            raise BatchSizeError(message, micro_batch_size=least)
        # Adam keeps two tensors per parameter from its first step on, which no trial run has seen.
        if self._optimizer_is_new:
            doubling.largest = max(min(least, doubling.largest), doubling.largest // 2)

    def _time(self, sizes: tuple[int, ...], doubling: _Doubling) -> dict[int, float]:
        """Return the shortest time of a rank share for each size, taken in turns; nothing if one was left out."""
        found: dict[int, float] = {}
        left = list(sizes)
        for number in range(NUM_ROUNDS + 1):  # the first one warms up what has not been run yet
            # In turns, so that what disturbs the machine for a while does not hit one size alone.
            for size in sizes:
                if size not in left or (number == 0 and size in doubling.seconds):
                    continue
                expected = doubling.seconds.get(size) or (self._line.seconds(size) if self._line else 0.0)
                most = max(2, math.ceil(_SHORTEST_SECONDS / expected)) if expected else 2
                if self._elapsed + min(most, ceil_div(self._share, size)) * expected > self._auto.most_seconds:
                    # Comparable only if each size has been timed; otherwise the times of the doubling are compared.
                    return found if found.keys() == set(left) else {}
                trial = self._try(size, most)
                if trial.outcome != "ran":
                    left.remove(size)
                    found.pop(size, None)
                elif number:
                    found[size] = min(trial.step_seconds, found.get(size, math.inf))
        return found

    def _try(self, size: int, most: int) -> _AgreedResult:
        """Run some micro-batches on every rank, and agree on what came of it."""
        run = self._runs.run(size, most)
        self._error = run.error or self._error
        seconds, step = self._of_own_share(run, size)
        elapsed = self._runs.clock() - self._begun
        may_double = self._room is None or self._room.may_double()
        # Of each number larger is worse, so that one maximum over ranks is right for all of them.
        numbers = [float(_CODES.index(run.outcome)), seconds, step, elapsed, float(not may_double)]
        worst = [max(column) for column in zip(*self._world.gather_numbers(numbers), strict=True)]
        self._elapsed = worst[3]
        return _AgreedResult(_CODES[int(worst[0])], worst[1], worst[2], not worst[4])

    def _of_own_share(self, run: TrialResult, size: int) -> tuple[float, float]:
        """Return the seconds of one full micro-batch, and of all of this rank's."""
        share = self._runs.num_samples
        if not run.seconds:
            return 0.0, 0.0
        if len(run.seconds) == ceil_div(share, size):
            return max(run.seconds[-2:]), sum(run.seconds)  # the last one may be smaller
        mean = sum(run.seconds) / len(run.seconds)
        return run.seconds[-1], step_seconds(share, size, mean, self._line)

    def _fitting(self, doubling: _Doubling, largest_tried: int) -> str:
        """Return what is known of larger sizes, as the end of a sentence."""
        said = []
        if self._planned is not None and doubling.largest == self._planned < self._share:
            said.append(f"{doubling.largest} fits, as planned")
        elif doubling.largest > largest_tried:
            said.append(f"{doubling.largest} fits")
        if doubling.too_large is not None:
            said.append(f"{doubling.too_large} does not fit")
        if doubling.ended:
            said.append(doubling.ended)
        if self._unplanned:
            said.append(f"sizes were doubled, for a plan could not be made ({self._unplanned})")
        return "".join(f"; {words}" for words in said)

    def _unknown(self) -> FoundSize:
        """Leave it to the step itself to fail, or to show that it does not."""
        return FoundSize(None, f"the whole rank share, since no part of it could be run by itself ({self._error})")


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
