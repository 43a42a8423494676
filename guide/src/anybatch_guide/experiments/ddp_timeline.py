"""A step on several ranks as a timeline: micro-batches, completed gradients of layers, buckets sent and summed."""

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import anybatch as ab
from anybatch.diagnostics.compared_ranks import WatchedDDP
from anybatch.diagnostics.compared_ways import (
    LossShare,
    OptimizerFunction,
    Steps,
    Wrap,
    ddp_accumulated,
    ddp_without_no_sync,
)
from anybatch.parallel.all_reduce import AllReduce
from anybatch.records import MicroBatchRecord, Record, ReductionRecord, SpanEvent
from anybatch.testing import RankPool
from anybatch_guide.experiment import Data, Emit, Experiment

WORLDS, NUM_STEPS = (2, 4), 9
"""Numbers of ranks; number of observed steps, of which the median is used."""
WIDTH, NUM_LAYERS, MICRO_BATCH, NUM_MICRO_BATCHES = 384, 6, 32, 4
BUCKET_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
"""Two layers per bucket, so that the network has three buckets."""
Batch = dict[str, Tensor]


def run(emit: Emit) -> Data:
    """Run a step with and without no_sync, and one by our own reduction, on two and on four ranks."""
    data: dict[str, Any] = {"num_micro_batches": NUM_MICRO_BATCHES, "num_layers": NUM_LAYERS, "worlds": []}
    for done, num_ranks in enumerate(WORLDS):
        emit({"kind": "guide.progress", "done": done, "of": len(WORLDS), "what": f"{num_ranks} ranks"})
        with RankPool(num_ranks) as pool:
            ways = {
                "no_sync until the last micro-batch": middle(pool.run(by_hand, "last")),
                "no_sync around the backward only": middle(pool.run(by_hand, "each, as it turns out")),
                "reduced in every micro-batch": middle(pool.run(by_hand, "each")),
                "all_reduce of anybatch": middle(pool.run(by_engine)),
            }
        data["worlds"].append({"num_ranks": num_ranks, "ways": ways})
    return data


def middle(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the step with the median time on the slowest rank, for every rank."""
    steps = sorted(zip(*ranks, strict=True), key=lambda step: max(rank["seconds"] for rank in step))
    return list(steps[len(steps) // 2])


def network() -> nn.Sequential:
    """Return a tower of equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))


def batch() -> Batch:
    """Return this rank's share of an effective batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {"x": torch.randn(MICRO_BATCH * NUM_MICRO_BATCHES, WIDTH, generator=generator)}


def by_hand(reduced: Literal["last", "each", "each, as it turns out"]) -> list[dict[str, Any]]:
    """Run on every rank: steps with torch's DDP, observed from the second one on."""
    model, watch, times = network(), _Watch(), []
    watch.layers(model)
    pieces = [{"x": piece} for piece in batch()["x"].split(MICRO_BATCH)]

    def steps() -> Any:  # noqa: ANN401 (a generator of micro-batches)
        yield pieces  # DDP reorders its buckets after the first backward
        for _ in range(NUM_STEPS):
            dist.barrier()
            watch.begin()
            yield _Pieces(pieces, watch)
            times.append(watch.end())

    loop = {
        "last": ddp_accumulated,
        "each": ddp_without_no_sync,
        "each, as it turns out": around_the_backward_only,
    }[reduced]
    loop(
        model,
        partial(torch.optim.SGD, lr=0.0),
        _loss_share,
        steps(),
        WatchedDDP(watch.bucket, bucket_bytes=BUCKET_BYTES),
    )
    return times


def around_the_backward_only(
    model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps, wrap: Wrap
) -> None:
    """Train with `no_sync` around the backward only; DDP has already decided in the forward to reduce."""
    optimizer = make_optimizer(model.parameters())
    wrapper = wrap(model)
    for micro_batches in steps:
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss = loss_share(wrapper, micro_batch) * dist.get_world_size()
            with nullcontext() if number == len(micro_batches) else wrapper.no_sync():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_engine() -> list[dict[str, Any]]:
    """Run on every rank: steps with anybatch's reduction, observed from the second one on."""
    model, watch, times = network(), _Watch(), []
    watch.layers(model)
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


class _Watch:
    """Records the times of events in a step, in seconds from its start."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._micro_batches: list[dict[str, float]] = []
        self._layers: dict[int, float] = {}
        self._buckets: dict[tuple[int, int], dict[str, float]] = {}

    def layers(self, model: nn.Sequential) -> None:
        """Record when the gradient of each layer is complete, in the last backward."""
        # The input of the first layer needs no gradient, and torch warns about that in every backward.
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
                {"micro_batch": place[0], "bucket": place[1], **times} for place, times in sorted(self._buckets.items())
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
        place = (len(self._micro_batches) - 1, number)
        self._buckets.setdefault(place, {"bytes": num_bytes})["sent" if event == "begin" else "done"] = self._now()

    def observe(self, record: Record) -> None:
        """Follow the engine."""
        if isinstance(record, MicroBatchRecord):
            self.micro_batch(record.event)
        elif isinstance(record, ReductionRecord) and record.payload == "gradients":
            self.bucket(record.bucket, record.num_bytes, record.event)

    def _now(self) -> float:
        return 0.0 if self._begun is None else time.perf_counter() - self._begun


class _Pieces(list[Batch]):
    """Micro-batches that record when each is requested."""

    def __init__(self, pieces: list[Batch], watch: _Watch) -> None:
        super().__init__(pieces)
        self._watch = watch

    def __iter__(self) -> Any:  # noqa: ANN401 (an iterator)
        for piece in list.__iter__(self):
            self._watch.micro_batch("begin")
            yield piece
            self._watch.micro_batch("end")


EXPERIMENT = Experiment(
    name="ddp_timeline",
    question="When are gradients final, sent and summed in a step on several ranks, with no_sync and without?",
    run=run,
    seconds=20,
    runs_here=False,
    noisy=("seconds", "begin", "end", "ready", "sent", "done"),
)
