"""A step on several ranks as a timeline: micro-batches, completed gradients of layers, buckets sent and summed."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.torch_internals import GradBucket
from anybatch.records import MicroBatchRecord, Record, ReductionRecord, SpanEvent
from anybatch.testing import RankPool
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress

WORLDS, NUM_STEPS = (2, 4), 9
"""Numbers of ranks; number of timed steps (the step with the median time is used)."""
WIDTH, NUM_LAYERS, MICRO_BATCH, NUM_MICRO_BATCHES = 384, 6, 32, 4
BUCKET_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
"""Two layers per bucket, so that the network has three buckets."""
Batch = dict[str, Tensor]
Reduced = Literal["last", "each", "each, by mistake"]
OnBucket = Callable[[int, int, SpanEvent], None]
"""Function (bucket number, its bytes, event), called with "begin" when it is sent, and "end" when it is summed."""


class WatchedDDP:
    """Wraps a model in DDP and records its all-reduces, without changing the computation."""

    def __init__(self, on_bucket: OnBucket, *, bucket_bytes: int = 25 * 2**20) -> None:
        self.on_bucket = on_bucket
        self._bucket_bytes = bucket_bytes

    def __call__(self, model: nn.Module) -> DistributedDataParallel:
        """Return the wrapped model."""
        wrapper = DistributedDataParallel(model, bucket_cap_mb=self._bucket_bytes / 2**20)
        wrapper.register_comm_hook(self, _reduce_bucket)
        return wrapper


def _reduce_bucket(watched: WatchedDDP, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    number, flat = bucket.index(), bucket.buffer()
    num_bytes = flat.numel() * flat.itemsize
    watched.on_bucket(number, num_bytes, "begin")
    # Divide first, then sum, like DDP.
    work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
    assert work is not None

    def end(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        watched.on_bucket(number, num_bytes, "end")
        return future.value()[0]

    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return reduced


def run(emit: Emit) -> Data:
    """Time steps with each use of no_sync, and with anybatch's reduction, on two and on four ranks."""
    data: dict[str, Any] = {"num_micro_batches": NUM_MICRO_BATCHES, "worlds": []}
    for done, num_ranks in enumerate(WORLDS):
        emit_progress(emit, done, len(WORLDS), f"{num_ranks} ranks")
        with RankPool(num_ranks) as pool:
            ways = {
                "no_sync until the last micro-batch": median_step(pool.run(run_ddp, "last")),
                "no_sync around the backward only": median_step(pool.run(run_ddp, "each, by mistake")),
                "reduced in every micro-batch": median_step(pool.run(run_ddp, "each")),
                "all_reduce of anybatch": median_step(pool.run(run_engine)),
            }
        data["worlds"].append({"num_ranks": num_ranks, "ways": ways})
    return data


def median_step(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the step with the median time on the slowest rank, for every rank."""
    steps = sorted(zip(*ranks, strict=True), key=lambda step: max(rank["seconds"] for rank in step))
    return list(steps[len(steps) // 2])


def network() -> nn.Sequential:
    """Return a network of equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))


def batch() -> Batch:
    """Return this rank's share of an effective batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {"x": torch.randn(MICRO_BATCH * NUM_MICRO_BATCHES, WIDTH, generator=generator)}


def run_ddp(reduced: Reduced) -> list[dict[str, Any]]:
    """Return the times of steps with torch's DDP, without the first. Runs on every rank."""
    model, watch, times = network(), _StepTimer(), []
    watch.watch_layers(model)
    micro_batches = [{"x": micro_batch_inputs} for micro_batch_inputs in batch()["x"].split(MICRO_BATCH)]

    def steps() -> Any:  # noqa: ANN401 (a generator of micro-batches)
        yield micro_batches  # DDP reorders its buckets after the first backward
        for _ in range(NUM_STEPS):
            dist.barrier()
            watch.begin()
            yield _TimedMicroBatches(micro_batches, watch)
            times.append(watch.end())

    loop(model, steps(), WatchedDDP(watch.bucket, bucket_bytes=BUCKET_BYTES), reduced)
    return times


def loop(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    wrap: Callable[[nn.Module], DistributedDataParallel],
    reduced: Reduced,
) -> None:
    """Train with DDP, and reduce gradients after the last micro-batch or after each.

    "each, by mistake" has `no_sync` only around the backward, but DDP decides in the forward whether to reduce.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapper = wrap(model)
    for micro_batches in steps:
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_reduced = reduced == "each" or number == len(micro_batches)
            with wrapper.no_sync() if reduced == "last" and not is_reduced else nullcontext():
                loss = _loss_share(wrapper, micro_batch) * dist.get_world_size()
                with nullcontext() if is_reduced else wrapper.no_sync():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_engine() -> list[dict[str, Any]]:
    """Return the times of steps with anybatch's reduction, without the first. Runs on every rank."""
    model, watch, times = network(), _StepTimer(), []
    watch.watch_layers(model)
    strategy = AllReduce(bucket_bytes=BUCKET_BYTES)
    loss = ab.sum_over_samples(_loss_share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shares = ab.shares([batch()] * (1 + NUM_STEPS))
    with ab.Engine(
        model, optimizer, loss, micro_batch_size=MICRO_BATCH, strategy=strategy, observer=watch, check_loss=False
    ) as engine:
        for number, share in enumerate(shares):
            if number:
                dist.barrier()
                watch.begin()
            engine.step(share)
            if number:
                times.append(watch.end())
    return times


def _loss_share(model: Any, micro_batch: Batch) -> Tensor:  # noqa: ANN401 (wrapped or not)
    return functional.mse_loss(model(micro_batch["x"]), micro_batch["x"], reduction="sum")


class _StepTimer:
    """Records the times of events in a step, in seconds from its start."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._micro_batches: list[dict[str, float]] = []
        self._layers: dict[int, float] = {}
        self._buckets: dict[tuple[int, int], dict[str, float]] = {}

    def watch_layers(self, model: nn.Sequential) -> None:
        """Record when the gradient of each layer is complete, in the last backward."""
        # Torch warns in every backward, because the input of the first layer needs no gradient.
        warnings.filterwarnings("ignore", message="Full backward hook")
        for number, layer in enumerate(model):
            layer.register_full_backward_hook(lambda *_, number=number: self._layers.update({number: self._now()}))

    def begin(self) -> None:
        """Begin a step."""
        self._micro_batches, self._layers, self._buckets = [], {}, {}
        self._begun = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """End the step, and return the recorded times."""
        return {
            "seconds": self._now(),
            "micro_batches": self._micro_batches,
            "layers": [{"layer": number, "ready": at} for number, at in sorted(self._layers.items(), reverse=True)],
            "buckets": [
                {"micro_batch": key[0], "bucket": key[1], **times} for key, times in sorted(self._buckets.items())
            ],
        }

    def micro_batch(self, event: str) -> None:
        """Record the start or the end of a micro-batch."""
        if self._begun is not None and event == "begin":
            self._micro_batches.append({"begin": self._now()})
        elif self._micro_batches:
            self._micro_batches[-1]["end"] = self._now()

    def bucket(self, number: int, num_bytes: int, event: SpanEvent) -> None:
        """Record that a bucket was sent or summed."""
        if self._begun is None:
            return
        key = (len(self._micro_batches) - 1, number)
        self._buckets.setdefault(key, {"bytes": num_bytes})["sent" if event == "begin" else "done"] = self._now()

    def observe(self, record: Record) -> None:
        """Record the engine's micro-batches and gradient buckets."""
        if isinstance(record, MicroBatchRecord):
            self.micro_batch(record.event)
        elif isinstance(record, ReductionRecord) and record.payload == "gradients":
            self.bucket(record.bucket, record.num_bytes, record.event)

    def _now(self) -> float:
        return 0.0 if self._begun is None else time.perf_counter() - self._begun


class _TimedMicroBatches(list[Batch]):
    """Micro-batches that record when each is requested."""

    def __init__(self, micro_batches: list[Batch], watch: _StepTimer) -> None:
        super().__init__(micro_batches)
        self._watch = watch

    def __iter__(self) -> Any:  # noqa: ANN401 (an iterator)
        for micro_batch_inputs in list.__iter__(self):
            self._watch.micro_batch("begin")
            yield micro_batch_inputs
            self._watch.micro_batch("end")


EXPERIMENT = Experiment(
    name="ddp_timeline",
    question="When are gradients final, sent and summed in a step on several ranks, with no_sync and without?",
    run=run,
    seconds=20,
    runs_here=False,
    noisy=("seconds", "begin", "end", "ready", "sent", "done"),
)
