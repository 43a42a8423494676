"""Measurements on every rank: interleaved steps of several kinds, steps with data loading, and single messages."""

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.splitting import SplitOptions
from anybatch.diagnostics.repeated_steps import CachedBatch, spec_for_repeated_steps, without_reduction
from anybatch.diagnostics.step_times import PhaseClock, RankSeconds, time_after_work
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP
from anybatch.parallel.gradient_buckets import bucket_members, gradient_bytes
from anybatch.parallel.strategy import Strategy, trainable
from anybatch.parallel.world import World

MEBIBYTE = 2**20
DEFAULT_BUCKET_SIZES = tuple(size * MEBIBYTE for size in (1, 5, 25, 50, 100))
_NUM_PARTS = (1, 2, 4, 8)
"""More bucket sizes to try: those that divide the model's gradients into this many nearly equal buckets."""


@dataclass(frozen=True, slots=True)
class BucketCut:
    """Bucket sizes that divide the gradients of a model into the same buckets."""

    num_buckets: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """Return the number of buckets, as text."""
        return f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"


def bucket_cuts(
    parameters: Sequence[torch.Tensor], requested: Sequence[int] | None, current: int, *, minimum: int = 1
) -> tuple[BucketCut, ...]:
    """Return the candidate bucket sizes in bytes, in ascending order; `current` is always among them."""
    of_model = [max(1, ceil_div(gradient_bytes(parameters), parts)) for parts in _NUM_PARTS]
    candidates = requested if requested is not None else (*DEFAULT_BUCKET_SIZES, *of_model)
    cuts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for size in sorted({current, *(size for size in candidates if size >= minimum)}):
        cuts.setdefault(tuple(bucket_members(parameters, size)), []).append(size)
    return tuple(BucketCut(len(buckets), tuple(same)) for buckets, same in cuts.items())


LOADING_STEPS = 6
"""Steps with loading that are timed in each repeat."""
WARM_UP_STEPS = 2
NUM_REPEATS = 2
MIN_ROUNDS, MAX_ROUNDS = 6, 15
_NUM_MESSAGES = 7
CURRENT, UNREDUCED, ALONE = "current", "unreduced", "alone"
DataFunction = Callable[..., Callable[[int], Iterable[EffectiveBatch]]]
"""Takes a number of steps; returns a function of `num_workers` that returns this many effective batches of a job."""
ReplicaStrategy = Literal["all_reduce", "ddp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that do not change the training."""

    strategy: ReplicaStrategy = "all_reduce"
    micro_batch_size: int | None = None
    bucket_bytes: int = 25 * MEBIBYTE
    num_workers: int = 0

    def __post_init__(self) -> None:
        checked_int("bucket_bytes", self.bucket_bytes)
        checked_int("num_workers", self.num_workers, minimum=0)
        if self.micro_batch_size is not None:
            checked_int("micro_batch_size", self.micro_batch_size)

    def make_strategy(self) -> Strategy:
        """Return a new strategy with these settings."""
        if self.strategy == "ddp":
            return DDP(bucket_bytes=self.bucket_bytes)
        return AllReduce(bucket_bytes=self.bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Measurements of one rank."""

    steps: Mapping[str, tuple[RankSeconds, ...]]  # kind -> step time in each round; all ranks have the same kinds
    loading: tuple[RankSeconds, ...]  # steps that load their samples
    loading_alone: tuple[RankSeconds, ...]  # steps of rank 0 with the whole batch, while other ranks wait
    load_seconds: float  # to load this rank's share in this process
    load_processor_seconds: float
    messages: tuple[tuple[int, float], ...]  # bytes and seconds of a separate all-reduce
    cuts: tuple[BucketCut, ...]  # the cuts of `steps["buckets N"]`, with N from 0
    micro_batch_size: int
    num_samples: int
    gradient_bytes: int  # of all gradients on one rank
    device: str


class RankMeasurement:
    """The measurements on one rank, run by all ranks simultaneously; `measure_scaling` describes the arguments."""

    def __init__(
        self,
        world: World,
        train: Callable[[], TrainSpec],
        data: DataFunction,
        settings: RunSettings,
        *,
        bucket_sizes: Sequence[int] | None,
        max_seconds: float,
        on_progress: Callable[[str], None] | None,
    ) -> None:
        self._world, self._train, self._data, self._on_progress = world, train, data, on_progress
        self._bucket_sizes, self._max_seconds = bucket_sizes, max_seconds
        batches = iter(data(steps=WARM_UP_STEPS)(0))
        self._batches = [next(batches) for _ in range(WARM_UP_STEPS)]
        self._settings = settings
        if settings.micro_batch_size is None:
            self._settings = dataclasses.replace(settings, micro_batch_size=self._fastest_size())

    def times(self) -> RankTimes:
        """Run all measurements and return their results."""
        self._report("loading the samples of a rank")
        load_seconds, load_processor_seconds = self._load()
        spec = self._train()
        modules = spec.model if isinstance(spec.model, torch.nn.Module) else torch.nn.ModuleDict(spec.model)
        parameters = list(trainable(modules).values())
        # DDP's bucket size is in MiB.
        minimum = MEBIBYTE if self._settings.strategy == "ddp" else 1
        cuts = bucket_cuts(parameters, self._bucket_sizes, self._settings.bucket_bytes, minimum=minimum)
        steps = self._interleaved_steps(self._kinds(cuts))
        loading: list[RankSeconds] = []
        loading_alone: list[RankSeconds] = []
        for number in range(NUM_REPEATS):
            self._report(f"steps that load their samples, {number + 1} of {NUM_REPEATS} times")
            loading += self._loading_steps()
            if self._world.rank == 0 and self._world.size > 1:
                loading_alone += self._loading_steps(alone=True)
            self._barrier()
        assert self._settings.micro_batch_size is not None
        return RankTimes(
            steps=steps,
            loading=tuple(loading),
            loading_alone=tuple(loading_alone),
            load_seconds=load_seconds,
            load_processor_seconds=load_processor_seconds,
            messages=self._messages(gradient_bytes(parameters)),
            cuts=cuts,
            micro_batch_size=self._settings.micro_batch_size,
            num_samples=len(self._batches[0].sample_ids),
            gradient_bytes=gradient_bytes(parameters),
            device=str(self._world.device),
        )

    def _loading_steps(self, *, alone: bool = False) -> list[RankSeconds]:
        """Return the times of consecutive steps that load their samples, after warm-up steps; `alone`: on one rank."""
        if not alone:
            self._barrier()
        clock = PhaseClock(self._world.device, waits=False)
        num_steps = WARM_UP_STEPS + LOADING_STEPS
        run: Any = iter(self._data(steps=num_steps)(self._settings.num_workers))
        found = []
        try:
            with self._engine(self._settings, clock, ALONE if alone else CURRENT) as engine:
                for _ in range(num_steps):
                    begun = time.perf_counter()
                    batch = next(run)
                    # A stream loads its samples in `next`, not in the step.
                    wait = time.perf_counter() - begun
                    step = clock.timed(lambda batch=batch: engine.step(batch))  # type: ignore[misc]
                    found.append(dataclasses.replace(step, load=step.load + wait, whole=step.whole + wait))
        finally:
            run.close()
        return found[WARM_UP_STEPS:]

    @property
    def _placement(self) -> Placement:
        split = SplitOptions(micro_batch_size=self._settings.micro_batch_size)
        return Placement(split, self._world.size, self._world.rank)

    def _kinds(self, cuts: Sequence[BucketCut]) -> dict[str, RunSettings]:
        """Return the kinds of step to interleave, with their settings."""
        settings = self._settings
        kinds = {CURRENT: settings}
        if self._world.size == 1:
            return kinds
        kinds |= {UNREDUCED: settings, ALONE: settings}
        for number, cut in enumerate(cuts):
            if settings.bucket_bytes not in cut.sizes:
                kinds[f"buckets {number}"] = dataclasses.replace(settings, bucket_bytes=cut.sizes[0])
        return kinds

    def _engine(self, settings: RunSettings, observer: PhaseClock, kind: str) -> Engine:
        train = spec_for_repeated_steps(self._train())
        size: int | Literal["auto"] = settings.micro_batch_size or "auto"
        if kind == ALONE or self._world.size == 1:
            hardware = Hardware(micro_batch_size=size, strategy="single", world=World(device=self._world.device))
        elif kind == UNREDUCED:
            hardware = without_reduction(size, self._world)
        else:
            hardware = Hardware(micro_batch_size=size, strategy=settings.make_strategy(), world=self._world)
        return Engine.from_spec(train, hardware, observer=observer)

    def _interleaved_steps(self, kinds: Mapping[str, RunSettings]) -> dict[str, tuple[RankSeconds, ...]]:
        """Run every kind of step once in each round, on samples loaded beforehand."""
        device = self._world.device
        clocks = {kind: PhaseClock(device, waits=kind in (UNREDUCED, ALONE)) for kind in kinds}
        engines = {
            kind: self._engine(settings, clocks[kind], kind)
            for kind, settings in kinds.items()
            if kind != ALONE or self._world.rank == 0
        }
        cached = {kind: CachedBatch(self._batches[0]) for kind in (ALONE, CURRENT)}
        found: dict[str, list[RankSeconds]] = {kind: [] for kind in kinds}
        rounds, number = WARM_UP_STEPS + MIN_ROUNDS, 0
        while number < rounds:
            self._report(f"interleaved steps of {len(kinds)} kinds, round {number + 1} of {rounds}")
            begun = time.perf_counter()
            # The order alternates, because caches and clock rates depend on the step before.
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                self._barrier()
                if kind in engines:
                    batch = cached.get(kind, cached[CURRENT])
                    step = clocks[kind].timed(lambda kind=kind, batch=batch: engines[kind].step(batch))  # type: ignore[misc]
                    found[kind].append(step)
            number += 1
            if number == WARM_UP_STEPS:
                longest = max(row[0] for row in self._world.gather_numbers([time.perf_counter() - begun]))
                rounds += max(0, min(MAX_ROUNDS, int(self._max_seconds / longest)) - MIN_ROUNDS)
        for engine in engines.values():
            engine.close()
        return {kind: tuple(times[WARM_UP_STEPS:]) for kind, times in found.items() if times}

    def _load(self) -> tuple[float, float]:
        """Return the seconds and the processor seconds of loading this rank's share."""
        taken = (0.0, 0.0)
        for batch in self._batches:
            begun, processor = time.perf_counter(), time.process_time()
            for _ in self._placement.micro_batches(batch):
                pass
            # The last batch counts, because the first one opens files and fills caches.
            taken = (time.perf_counter() - begun, time.process_time() - processor)
        return taken

    def _messages(self, total: int) -> tuple[tuple[int, float], ...]:
        """Return (bytes, seconds) of separate all-reduces of three sizes."""
        if self._world.size == 1:
            return ()
        sizes = sorted({1, max(1, total // 16), max(1, total // 4)})
        numbers = {size: torch.zeros(size, device=self._world.device) for size in sizes}
        seconds = defaultdict[int, list[float]](list)
        for size in sizes * _NUM_MESSAGES:  # interleaved
            self._barrier()
            begun = time.perf_counter()
            dist.all_reduce(numbers[size])
            seconds[size].append(time_after_work(self._world.device) - begun)
        return tuple((4 * size, statistics.median(seconds[size][1:])) for size in sizes)

    def _fastest_size(self) -> int:
        """Return the micro-batch size that "auto" chooses on these ranks."""
        self._report("trying sizes of micro-batches")
        clock = PhaseClock(self._world.device, waits=False)
        with self._engine(self._settings, clock, CURRENT) as engine:
            size = engine.step(self._batches[0]).plan.split.micro_batch_size
        return size or len(self._batches[0].sample_ids)

    def _report(self, words: str) -> None:
        if self._on_progress is not None and self._world.rank == 0:
            self._on_progress(f"{self._world.size} rank{'s' * (self._world.size > 1)}: {words}")

    def _barrier(self) -> None:
        self._world.gather_numbers([0.0])
