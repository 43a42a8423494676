"""Measures ways of using devices on one rank: facts of each way once, then interleaved whole steps."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.loss import declared, factors_of, scaled, unit_counts
from anybatch.core.records import Record, ReductionRecord, SpanEvent
from anybatch.core.splitting import Cut
from anybatch.core.tensors import Gradients, relative_error
from anybatch.core.tree import Batch, copied, count_samples, map_tensors
from anybatch.diagnostics.compared_ways import Way, Wrap, ddp_without_no_sync
from anybatch.diagnostics.gradient_runs import copied_runs
from anybatch.diagnostics.memory_report import record_memory
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps, without_reduction
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.engine.user_code import collect_modules
from anybatch.errors import AnyBatchError, MemoryExhaustedError
from anybatch.memory.device_memory import begin_peak, driver_bytes, memory_in_use
from anybatch.memory.ledger import MemoryLedger
from anybatch.parallel.local_parts import is_dtensor
from anybatch.parallel.strategy import trainable
from anybatch.parallel.torch_internals import GradBucket
from anybatch.parallel.world import World

OnBucket = Callable[[int, int, SpanEvent], None]
"""Told (number of the bucket, its bytes, "begin") when it is sent, and (..., "end") when it has been summed."""


class WatchedDDP:
    """Wraps a model in DDP and records its all-reduces, without changing the computation."""

    def __init__(self, on_bucket: OnBucket, *, bucket_bytes: int = 25 * 2**20) -> None:
        self.on_bucket = on_bucket
        self._bucket_bytes = bucket_bytes

    def __call__(self, model: nn.Module) -> DistributedDataParallel:
        """Return the wrapped model."""
        wrapper = DistributedDataParallel(model, bucket_cap_mb=self._bucket_bytes / 2**20)
        wrapper.register_comm_hook(self, _reduced)
        return wrapper


def _reduced(watched: WatchedDDP, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    number, flat = bucket.index(), bucket.buffer()
    num_bytes = flat.numel() * flat.itemsize
    watched.on_bucket(number, num_bytes, "begin")
    # As DDP itself does: divided first, then summed.
    work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
    assert work is not None

    def end(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        watched.on_bucket(number, num_bytes, "end")
        return future.value()[0]

    found: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return found


NUM_BATCHES = 4
"""Effective batches for the variance of gradients."""
_MOST_PARTS = 64
_WARM_STEPS, _TIMED_STEPS = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedJob:
    """The job of a comparison; sent to ranks."""

    train: Callable[[], TrainSpec]
    data: Callable[[], Iterable[EffectiveBatch]]
    ways: Sequence[Way]
    device_type: str
    num_rounds: int
    most_seconds: float
    tell: Callable[[str], None] | None = None


@dataclass(slots=True, kw_only=True)
class RankFigures:
    """The measurements of one way on one rank."""

    step_seconds: list[float] = field(default_factory=list)
    alone_seconds: list[float] = field(default_factory=list)  # own share, on all ranks at once, unreduced
    peak_bytes: int = 0  # of the allocator on CUDA, else of this rank's tensors
    total_peak_bytes: int = 0  # over all devices of this rank
    reserved_bytes: int | None = None  # None on a CPU
    driver_bytes: int | None = None  # None on a CPU
    gradient_bytes: int = 0  # passed to collectives per step
    gradient_error: float | None = None  # against plain PyTorch; None except on rank 0
    gradient_variance: float | None = None  # see `variance_of`
    reason: str = ""  # why it failed; empty on success


def measure_on_rank(job: ComparedJob) -> dict[str, RankFigures]:
    """Run every way on this rank, together with the other ranks; return its figures by name."""
    device = torch.device(job.device_type, torch.distributed.get_rank()) if job.device_type == "cuda" else None
    with World.from_environment(device=device or job.device_type) as world:
        return _Runs(job, world).run()


class _Runs:
    """All ways on one rank."""

    def __init__(self, job: ComparedJob, world: World) -> None:
        self._job = job
        self._world = world
        self._alone = World(device=world.device)
        self._batches = [CachedBatch(batch) for batch in islice(job.data(), NUM_BATCHES)]
        self._random_modules: Sequence[str] = ()
        self._native: Gradients = {}
        self._gradient_bytes = 0

    def run(self) -> dict[str, RankFigures]:
        """Return the figures of every way that ran, and the reasons of the others."""
        found = {way.name: RankFigures(reason=way.unmeasured) for way in self._job.ways}
        ways = [way for way in self._job.ways if not way.unmeasured]
        self._tell("the un-split batch")
        self._run_native_batch()
        for number, way in enumerate(ways):
            self._tell(f"memory and gradient of {way.name}, {number + 1} of {len(ways)} ways")
            self._try(way, found[way.name], self._facts)
        begun = time.perf_counter()
        for number in range(self._job.num_rounds):
            left = max(0.0, self._job.most_seconds - (time.perf_counter() - begun))
            for way in ways:
                self._tell(f"steps of {way.name}, round {number + 1}; the last round begins within {math.ceil(left)} s")
                # Ways are interleaved, so that a machine that slows down affects all of them.
                if not found[way.name].reason:
                    self._try(way, found[way.name], self._timed)
            # Rank 0 decides, because clocks differ.
            if self._world.gather_numbers([time.perf_counter() - begun])[0][0] > self._job.most_seconds:
                break
        return found

    def _tell(self, words: str) -> None:
        if self._job.tell is not None and self._world.rank == 0:
            self._job.tell(words)

    def _try(self, way: Way, figures: RankFigures, measure: Callable[[Way, RankFigures], None]) -> None:
        """Measure on the ranks of a way; the others wait. A failure on one rank skips the way on all."""
        if self._world.rank < way.num_ranks:
            try:
                measure(way, figures)
            except (torch.OutOfMemoryError, MemoryExhaustedError):
                figures.reason = "it does not fit into memory"
            except (AnyBatchError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                figures.reason = str(error).strip().splitlines()[0] or type(error).__name__
        reasons = [reason for reason in self._world.gather_objects(figures.reason) if reason]
        figures.reason = reasons[0] if reasons else ""

    def _run_native_batch(self) -> None:
        """Compute the native gradient by plain PyTorch, and find modules whose random numbers depend on the split."""
        found: Sequence[str] = ()
        train = self._job.train()
        modules = collect_modules(train.model, declared(train.loss))
        self._gradient_bytes = sum(p.numel() * p.itemsize for p in trainable(modules).values())
        if self._world.rank == 0:
            batch = next(Placement(Cut(), 1, 0).micro_batches(self._batches[0]))
            runs = copied_runs(train.model, declared(train.loss), batch, None, seed=0, norms=train.norms)
            found = runs.forward_traits().random_modules
            runs.in_evaluation = {module for name, module in runs.modules.named_modules() if name in found}
            self._native = runs.whole()
        self._random_modules = self._world.gather_objects(tuple(found))[0]

    def _facts(self, way: Way, figures: RankFigures) -> None:
        """Measure what does not depend on the clock: memory, traffic, gradients."""
        if way.strategy is None:
            self._facts_by_hand(way, figures)
            return
        self._measure_memory(way, figures)
        counter = _GradientBytes()
        with self._engine(way, observer=counter) as engine:
            batch = self._batch(way)
            engine.step(batch)
            counter.num_bytes = 0
            engine.step(batch)
        figures.gradient_bytes = counter.num_bytes
        with self._engine(way, without_randomness=True) as engine:
            found = whole_tensors(engine.gradients(self._batch(way)))
            if way.num_samples < len(self._batches[0].sample_ids) or way.name == "native":
                parts = islice((part for whole in self._batches for part in _parts(whole, way)), _MOST_PARTS)
                figures.gradient_variance = variance_of([whole_tensors(engine.gradients(part)) for part in parts])
        if self._world.rank == 0 and way.num_samples == len(self._batches[0].sample_ids):
            figures.gradient_error = relative_error(found, self._native)

    def _timed(self, way: Way, figures: RankFigures) -> None:
        """Make some steps, each after a barrier, and equally many without reduction."""
        if way.strategy is None:
            seconds: list[float] = []
            self._by_hand(way, _WARM_STEPS + _TIMED_STEPS, seconds)
            figures.step_seconds += seconds[_WARM_STEPS:]
        else:
            figures.step_seconds += self._seconds(way, self._engine(way))
        if way.num_ranks > 1:
            hardware = without_reduction(way.micro_batch_size, self._world)
            figures.alone_seconds += self._seconds(way, Engine.from_spec(self._trained(), hardware))

    def _seconds(self, way: Way, engine: Engine) -> list[float]:
        """Return the seconds of some steps, after a warm-up step."""
        found, batch = [], self._batch(way)
        with engine:
            for _ in range(_WARM_STEPS + _TIMED_STEPS):
                self._meet(way)
                begun = self._now()
                engine.step(batch)
                found.append(self._now() - begun)
        return found[_WARM_STEPS:]

    def _meet(self, way: Way) -> None:
        if way.num_ranks > 1:
            self._world.gather_numbers([0.0])

    def _now(self) -> float:
        # Kernels run asynchronously: without waiting, a step would seem to end when it is only launched.
        if self._world.device.type != "cpu":
            torch.accelerator.synchronize(self._world.device)
        return time.perf_counter()

    def _engine(self, way: Way, *, without_randomness: bool = False, observer: Any = None) -> Engine:  # noqa: ANN401 (an observer, or None)
        """Return a new engine for a way; on request with modules that draw random numbers in evaluation mode."""
        train = self._trained(without_randomness=without_randomness)
        assert way.strategy is not None
        where = self._world if way.num_ranks > 1 else self._alone
        hardware = Hardware(micro_batch_size=way.micro_batch_size, strategy=way.strategy, world=where)
        return Engine.from_spec(train, hardware, observer=observer)

    def _trained(self, *, without_randomness: bool = False) -> TrainSpec:
        made = self._job.train()
        modules = made.model if isinstance(made.model, nn.Module) else nn.ModuleDict(cast("Any", made.model))
        for name, module in modules.named_modules() if without_randomness else ():
            if name in self._random_modules:
                module.training = False
        modules.to(self._world.device)
        return spec_for_repeated_steps(made)

    def _batch(self, way: Way) -> EffectiveBatch:
        return next(_parts(self._batches[0], way))

    def _measure_memory(self, way: Way, figures: RankFigures) -> None:
        self._begin_peak()
        with self._engine(way) as engine:
            batch = self._batch(way)
            engine.step(batch)
            recording = record_memory(engine)
            with recording:
                engine.step(batch)
            # DDP's own code allocates its buckets, invisible to operations.
            buckets = self._gradient_bytes if way.strategy == "ddp" else 0
            self._set_peak(figures, recording.report.timeline.peak_bytes + buckets)

    def _begin_peak(self) -> None:
        for device in self._devices():
            begin_peak(device)

    def _set_peak(self, figures: RankFigures, of_tensors: int) -> None:
        used = [one for one in map(memory_in_use, self._devices()) if one is not None]
        figures.peak_bytes = max((one.peak_bytes for one in used), default=of_tensors)
        figures.total_peak_bytes = sum(one.peak_bytes for one in used) if used else of_tensors
        figures.reserved_bytes = max((one.reserved_bytes or 0 for one in used), default=None)
        figures.driver_bytes = driver_bytes(self._world.device)

    def _devices(self) -> list[torch.device]:
        """Return the CUDA devices that this process may use: all if it is the only one; none on a CPU."""
        own = self._world.device
        if own.type != "cuda":
            return []
        # `DataParallel` uses them all from one process, while the other ranks wait.
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]

    def _facts_by_hand(self, way: Way, figures: RankFigures) -> None:
        counter = _GradientBytes()
        gradients: dict[str, Tensor | None] = {}
        self._by_hand(way, 2, [], wrap=WatchedDDP(counter.on_bucket), read=gradients.update)
        figures.gradient_bytes = counter.num_bytes // 2
        if self._world.rank == 0:
            figures.gradient_error = relative_error(gradients, self._native)
        self._begin_peak()
        with MemoryLedger() as ledger:
            made = self._trained()
            ledger.hold("weights", cast("nn.Module", made.model).parameters())
            self._by_hand(way, 2, [], made=made)
        ledger.forget()
        self._set_peak(figures, ledger.peak_bytes + self._gradient_bytes)

    def _by_hand(
        self,
        way: Way,
        num_steps: int,
        seconds: list[float],
        *,
        wrap: Wrap | None = None,
        read: Callable[[Mapping[str, Tensor]], None] | None = None,
        made: TrainSpec | None = None,
    ) -> None:
        """Run the loop by hand on this rank's share; `read` receives the first step's gradient instead of an update."""
        train = made or self._trained(without_randomness=read is not None)
        loss = declared(train.loss)
        model = train.model
        if not isinstance(model, nn.Module) or loss.kind.encode is not None or loss.kind.brings_count:
            message = "the loop by hand does not support its loss or model"
            raise ValueError(message)
        cut = Cut(micro_batch_size=way.micro_batch_size)
        whole = self._batches[0]
        units = Placement(cut, way.num_ranks, self._world.rank).units(len(whole.sample_ids))
        share = CachedBatch(BatchSubset(whole, [position for unit in units for position in unit]))
        micro_batches = list(Placement(cut, 1, 0).micro_batches(share))
        own = [unit_counts(loss, one, count_samples(one)) for one in micro_batches]
        totals = [sum(column) for column in zip(*own, strict=True)]
        divisors = [sum(column) for column in zip(*self._world.gather_numbers(totals), strict=True)]
        device = self._world.device
        autocast = torch.autocast(device.type, torch.bfloat16) if train.precision == "bf16" else nullcontext()

        def loss_share(wrapped: Any, batch: Batch) -> Tensor:  # noqa: ANN401 (the wrapped model)
            counts = unit_counts(loss, batch, count_samples(batch))
            with autocast:
                terms = scaled(loss, loss.function(wrapped, batch), factors_of(loss, counts, divisors, 1.0))
            return torch.stack(terms).sum()

        def steps() -> Iterator[Sequence[Batch]]:
            for _ in range(num_steps):
                placed = [map_tensors(copied(one), lambda tensor: tensor.to(device)) for one in micro_batches]
                self._meet(way)
                begun = self._now()
                yield placed
                seconds.append(self._now() - begun)

        optimizer = cast("Any", train.optimizer)(model.named_parameters())
        used = optimizer if read is None else _Reading(model, read)
        ddp_without_no_sync(model, lambda _: used, loss_share, steps(), *(() if wrap is None else (wrap,)))


class _GradientBytes:
    """Adds up gradient bytes passed to collectives: by the engine, as its observer, or by DDP."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def observe(self, record: Record) -> None:
        """Add a collective."""
        if isinstance(record, ReductionRecord) and record.event == "begin" and record.payload == "gradients":
            self.num_bytes += record.num_bytes

    def on_bucket(self, _number: int, num_bytes: int, event: SpanEvent) -> None:
        """Add a bucket."""
        self.num_bytes += num_bytes * (event == "begin")


class _Reading(torch.optim.Optimizer):
    """Reads gradients where an optimizer would make its update."""

    def __init__(self, model: nn.Module, read: Callable[[Mapping[str, Tensor]], None]) -> None:
        super().__init__(model.parameters(), {})
        self._named = dict(model.named_parameters())
        self._read = read

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401, ARG002 (torch's signature)
        """Read."""
        self._read({name: p.grad.clone() for name, p in self._named.items() if p.grad is not None})


def _parts(whole: CachedBatch, way: Way) -> Iterator[EffectiveBatch]:
    """Yield the batches of one update each that a batch consists of."""
    number = len(whole.sample_ids)
    if way.num_samples >= number:
        yield whole
        return
    for start in range(0, number - way.num_samples + 1, way.num_samples):
        yield CachedBatch(BatchSubset(whole, range(start, start + way.num_samples)))


def whole_tensors(gradients: Gradients) -> dict[str, Tensor | None]:
    """Return gradients, with sharded ones gathered; all ranks call it."""
    return {
        name: cast("Any", value).full_tensor() if value is not None and is_dtensor(value) else value
        for name, value in gradients.items()
    }


def variance_of(gradients: Sequence[Gradients]) -> float | None:
    """Return the mean squared distance of gradients from their mean, over the square of that mean's norm.

    `sum |g_i - m|^2 / (n - 1) / |m|^2`, with n gradients and their mean m; None for fewer than two.
    """
    number = len(gradients)
    if number < 2:  # noqa: PLR2004 (one differs from nothing)
        return None
    distance = size = 0.0
    for name in gradients[0]:
        values = [one[name] for one in gradients]
        found = [value.detach().cpu().to_dense().double() for value in values if value is not None]
        if not found:
            continue
        mean = cast("Tensor", sum(found)) / number
        size += float(mean.square().sum())
        distance += sum(float((value - mean).square().sum()) for value in found)
    return distance / (number - 1) / size if size else math.inf
