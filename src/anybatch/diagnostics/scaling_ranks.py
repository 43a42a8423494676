"""Measurements on every rank: interleaved steps of several kinds, steps with data loading, and single messages."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.splitting import Cut
from anybatch.diagnostics.repeated_steps import CachedBatch, spec_for_repeated_steps, without_reduction
from anybatch.diagnostics.step_times import PhaseClock, RankSeconds
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP, Compression
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.strategy import Strategy, trainable
from anybatch.parallel.world import World

MEBIBYTE = 2**20
USUAL_SIZES = tuple(size * MEBIBYTE for size in (1, 5, 25, 50, 100))
_SHARES = (1, 2, 4, 8)
"""Numbers of nearly equal parts of a model's gradients, as further candidates."""


@dataclass(frozen=True, slots=True)
class BucketCut:
    """Bucket sizes that cut the gradients of a model into the same buckets."""

    num_buckets: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """Return the number of buckets, in words."""
        return f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"


def bucket_cuts(
    gradient_sizes: Sequence[int], asked: Sequence[int] | None, current: int, *, least: int = 1
) -> tuple[BucketCut, ...]:
    """Return the candidate bucket sizes, from the smallest to the largest; `current` is always among them."""
    total = sum(gradient_sizes)
    own = [max(1, ceil_div(total, parts)) for parts in _SHARES]
    tried = asked if asked is not None else (*USUAL_SIZES, *own)
    sizes = sorted({current, *(size for size in tried if size >= least)})
    cuts: dict[tuple[int, ...], list[int]] = {}
    for size in sizes:
        cuts.setdefault(buckets_of(gradient_sizes, size), []).append(size)
    return tuple(BucketCut(len(buckets), tuple(same)) for buckets, same in cuts.items())


def buckets_of(gradient_sizes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each bucket: parameters from the last to the first, closed once it holds `bucket_bytes`."""
    closed, held = [], 0
    for size in reversed(gradient_sizes):
        held += size
        if held >= bucket_bytes:
            closed.append(held)
            held = 0
    return (*closed, held) if held else tuple(closed)


LOADING_STEPS = 6
"""Steps with loading that are timed in each repeat."""
WARM_UP_STEPS = 2
NUM_REPEATS = 2
LEAST_ROUNDS, MOST_ROUNDS = 6, 15
_NUM_MESSAGES = 7
CURRENT, UNREDUCED, LARGER, COMPRESSED, ALONE = "current", "unreduced", "larger", "compressed", "alone"
ReplicaStrategy = Literal["all_reduce", "ddp"]


class DataFunction(Protocol):
    """Makes the first effective batches of a job, such as `MeasuredJob.data`; can be pickled."""

    def __call__(self, *, steps: int) -> Callable[[int], Iterable[EffectiveBatch]]:
        """Return a function num_workers -> effective batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that do not change the training."""

    strategy: ReplicaStrategy = "all_reduce"
    micro_batch_size: int | None = None
    bucket_bytes: int = 25 * MEBIBYTE
    compression: Compression = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        checked_int("bucket_bytes", self.bucket_bytes)
        checked_int("num_workers", self.num_workers, least=0)
        if self.micro_batch_size is not None:
            checked_int("micro_batch_size", self.micro_batch_size)
        self.make_strategy()  # refuses options of another strategy

    def make_strategy(self) -> Strategy:
        """Return a new strategy with these settings."""
        if self.strategy == "ddp":
            return DDP(bucket_bytes=self.bucket_bytes, compression=self.compression)
        return AllReduce(bucket_bytes=self.bucket_bytes, compression=self.compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Measurements to run on every rank; can be pickled."""

    train: Callable[[], TrainSpec]
    data: DataFunction
    settings: RunSettings
    bucket_sizes: tuple[int, ...] | None = None
    most_seconds: float = 20.0
    device: str | None = None
    tell: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Measurements of one rank."""

    rank: int
    steps: Mapping[str, tuple[RankSeconds, ...]]  # kind -> time of each round, the same on all ranks
    loading: tuple[RankSeconds, ...]  # steps that load their samples
    loading_alone: tuple[RankSeconds, ...]  # on rank 0, of the whole batch while others wait
    load_seconds: float  # of this rank's share, in its own process
    load_processor_seconds: float
    messages: tuple[tuple[int, float], ...]  # bytes and seconds of a separate all-reduce
    cuts: tuple[BucketCut, ...]  # the cuts of `steps["buckets N"]`, with N from 0
    micro_batch_size: int
    num_samples: int
    share: int  # samples of this rank
    gradient_bytes: int  # of one copy
    device: str


def measure_ranks(request: ScaleRequest) -> list[RankTimes]:
    """Measure on every rank of the default group, or on one; return the results of all ranks on each of them."""
    with World.from_environment(device=request.device) as world:
        found: list[RankTimes] = world.gather_objects(_RankMeasurement(request, world).times())
    return found


def compare_settings(
    request: ScaleRequest, before: RunSettings, after: RunSettings
) -> list[tuple[list[RankSeconds], list[RankSeconds]]]:
    """Run interleaved steps with data loading under two settings; return both times of every rank."""
    found: tuple[list[RankSeconds], list[RankSeconds]] = ([], [])
    with World.from_environment(device=request.device) as world:
        measurement = _RankMeasurement(dataclasses.replace(request, settings=before), world)
        for number in range(2 * NUM_REPEATS):
            # Each goes first as often as last.
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].extend(measurement.loading_steps((before, after)[which]))
        gathered: list[tuple[list[RankSeconds], list[RankSeconds]]] = world.gather_objects(found)
    return gathered


class _RankMeasurement:
    """The measurement on one rank."""

    def __init__(self, request: ScaleRequest, world: World) -> None:
        self._request = request
        self._world = world
        batches = iter(request.data(steps=WARM_UP_STEPS)(0))
        self._batches = [next(batches) for _ in range(WARM_UP_STEPS)]
        self._settings = request.settings
        if self._settings.micro_batch_size is None:
            self._settings = dataclasses.replace(self._settings, micro_batch_size=self._fastest_size())

    def times(self) -> RankTimes:
        """Measure everything, at the same time as the other ranks."""
        self._tell("loading a share")
        share = self._placement.plan(len(self._batches[0].sample_ids)).shares[self._world.rank]
        load_seconds, load_processor_seconds = self._load()
        spec = self._request.train()
        modules = spec.model if isinstance(spec.model, torch.nn.Module) else torch.nn.ModuleDict(spec.model)
        parameters = list(trainable(modules).values())
        # DDP compresses float32 gradients alone, and cannot accumulate bf16 and fp16 ones.
        compresses = all(one.dtype == torch.float32 for one in parameters) and self._settings.compression is None
        sizes = [gradient_bytes([one]) for one in parameters]
        # torch takes buckets of DDP in MiB.
        least = MEBIBYTE if self._settings.strategy == "ddp" else 1
        cuts = bucket_cuts(sizes, self._request.bucket_sizes, self._settings.bucket_bytes, least=least)
        largest = max((unit.num_samples for unit in share), default=0)
        steps = self._in_turns(self._kinds(cuts, largest, compresses=compresses))
        loading: list[RankSeconds] = []
        loading_alone: list[RankSeconds] = []
        for number in range(NUM_REPEATS):
            self._tell(f"steps that load their samples, {number + 1} of {NUM_REPEATS} times")
            loading += self.loading_steps(self._settings)
            if self._world.rank == 0 and self._world.size > 1:
                loading_alone += self.loading_steps(self._settings, alone=True)
            self._barrier()
        assert self._settings.micro_batch_size is not None
        return RankTimes(
            rank=self._world.rank,
            steps=steps,
            loading=tuple(loading),
            loading_alone=tuple(loading_alone),
            load_seconds=load_seconds,
            load_processor_seconds=load_processor_seconds,
            messages=self._messages(sum(sizes)),
            cuts=cuts,
            micro_batch_size=self._settings.micro_batch_size,
            num_samples=len(self._batches[0].sample_ids),
            share=sum(unit.num_samples for unit in share),
            gradient_bytes=sum(sizes),
            device=str(self._world.device),
        )

    def loading_steps(self, settings: RunSettings, *, alone: bool = False) -> list[RankSeconds]:
        """Return the times of consecutive steps that load, after some to warm up; without other ranks if `alone`."""
        if not alone:
            self._barrier()
        clock = PhaseClock(self._world.device, waits=False)
        num_steps = WARM_UP_STEPS + LOADING_STEPS
        run: Any = iter(self._request.data(steps=num_steps)(settings.num_workers))
        found = []
        try:
            with self._engine(settings, clock, ALONE if alone else CURRENT) as engine:
                for _ in range(num_steps):
                    begun = time.perf_counter()
                    batch = next(run)
                    # A stream reads a batch when it is reached.
                    reached = time.perf_counter() - begun
                    taken = clock.timed(lambda batch=batch: engine.step(batch))  # type: ignore[misc]
                    found.append(dataclasses.replace(taken, load=taken.load + reached, whole=taken.whole + reached))
        finally:
            run.close()
        return found[WARM_UP_STEPS:]

    @property
    def _placement(self) -> Placement:
        return Placement(Cut(micro_batch_size=self._settings.micro_batch_size), self._world.size, self._world.rank)

    def _kinds(self, cuts: Sequence[BucketCut], largest_unit: int, *, compresses: bool) -> dict[str, RunSettings]:
        """Return the kinds of step to interleave."""
        settings = self._settings
        kinds = {CURRENT: settings}
        if self._world.size == 1:
            return kinds
        kinds |= {UNREDUCED: settings, ALONE: settings}
        share = ceil_div(len(self._batches[0].sample_ids), self._world.size)
        if share > largest_unit:
            kinds[LARGER] = dataclasses.replace(settings, micro_batch_size=share)
        if compresses:
            kinds[COMPRESSED] = dataclasses.replace(settings, strategy="ddp", compression="bf16")
        for number, cut in enumerate(cuts):
            if settings.bucket_bytes not in cut.sizes:
                kinds[f"buckets {number}"] = dataclasses.replace(settings, bucket_bytes=cut.sizes[0])
        return kinds

    def _engine(self, settings: RunSettings, observer: PhaseClock, kind: str) -> Engine:
        train = spec_for_repeated_steps(self._request.train())
        size: int | Literal["auto"] = settings.micro_batch_size or "auto"
        if kind == ALONE or self._world.size == 1:
            hardware = Hardware(micro_batch_size=size, strategy="single", world=World(device=self._world.device))
        elif kind == UNREDUCED:
            hardware = without_reduction(size, self._world)
        else:
            hardware = Hardware(micro_batch_size=size, strategy=settings.make_strategy(), world=self._world)
        return Engine.from_spec(train, hardware, observer=observer)

    def _in_turns(self, kinds: Mapping[str, RunSettings]) -> dict[str, tuple[RankSeconds, ...]]:
        """Run every kind of step once in each round, on loaded samples."""
        device = self._world.device
        clocks = {kind: PhaseClock(device, waits=kind in (UNREDUCED, ALONE)) for kind in kinds}
        engines = {
            kind: self._engine(settings, clocks[kind], kind)
            for kind, settings in kinds.items()
            if kind != ALONE or self._world.rank == 0
        }
        cached: dict[int | None, CachedBatch] = {}
        found: dict[str, list[RankSeconds]] = {kind: [] for kind in kinds}
        rounds, number = WARM_UP_STEPS + LEAST_ROUNDS, 0
        while number < rounds:
            self._tell(f"interleaved steps of {len(kinds)} kinds, round {number + 1} of {rounds}")
            begun = time.perf_counter()
            # Each goes first as often as last: a step that follows a longer one finds other caches and clock rates.
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                self._barrier()
                if kind in engines:
                    # One batch for each cut, so that it is loaded once.
                    size = -1 if kind == ALONE else kinds[kind].micro_batch_size
                    batch = cached.setdefault(size, CachedBatch(self._batches[0]))
                    taken = clocks[kind].timed(lambda kind=kind, batch=batch: engines[kind].step(batch))  # type: ignore[misc]
                    found[kind].append(taken)
            number += 1
            if number == WARM_UP_STEPS:
                longest = max(row[0] for row in self._world.gather_numbers([time.perf_counter() - begun]))
                rounds += max(0, min(MOST_ROUNDS, int(self._request.most_seconds / longest)) - LEAST_ROUNDS)
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
            # The last one counts: the first one opens files and fills caches.
            taken = (time.perf_counter() - begun, time.process_time() - processor)
        return taken

    def _messages(self, total: int) -> tuple[tuple[int, float], ...]:
        """Return bytes and seconds of all-reduces with nothing else to do."""
        if self._world.size == 1:
            return ()
        found = []
        for num_bytes in sorted({4, max(4, total // 4), max(4, total)}):
            numbers = torch.zeros(num_bytes // 4, device=self._world.device)
            seconds = []
            for _ in range(_NUM_MESSAGES):
                self._barrier()
                begun = time.perf_counter()
                dist.all_reduce(numbers, group=self._world.group)
                if self._world.device.type != "cpu":
                    torch.accelerator.synchronize(self._world.device)
                seconds.append(time.perf_counter() - begun)
            found.append((num_bytes // 4 * 4, statistics.median(seconds[1:])))
        return tuple(found)

    def _fastest_size(self) -> int:
        """Return the micro-batch size that "auto" takes on these ranks."""
        self._tell("trying sizes of micro-batches")
        clock = PhaseClock(self._world.device, waits=False)
        with self._engine(self._settings, clock, CURRENT) as engine:
            size = engine.step(self._batches[0]).plan.cut.micro_batch_size
        return size or len(self._batches[0].sample_ids)

    def _tell(self, words: str) -> None:
        if self._request.tell is not None and self._world.rank == 0:
            ranks = f"{self._world.size} {'rank' if self._world.size == 1 else 'ranks'}"
            self._request.tell(f"{ranks}: {words}")

    def _barrier(self) -> None:
        self._world.gather_numbers([0.0])
