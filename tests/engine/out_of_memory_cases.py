"""Runs that run out of memory on purpose, and runs planned with the cut that these end with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.core.loss import Loss
from anybatch.core.records import MicroBatchRecord, OutOfMemoryRecord, PhaseRecord, Record
from anybatch.engine.micro_batches import RankShare
from anybatch.norms import Ghost
from anybatch.testing import out_of_memory_at
from tests.engine.cases import STRATEGIES, Batch, InMemory, cut, share_bounds

LARGE, FEW = 8, 2
"""A size that does not fit, and samples per rank in the first step: few enough for the same cut in all runs."""

Weights = dict[str, torch.Tensor]


def network() -> nn.Module:
    """Return a small model with all the state that a retry must restore: BatchNorm, dropout, a separate buffer.

    BatchNorm sees several values per sample, so that single samples can be normalised.
    """
    torch.default_generator.manual_seed(3)
    return nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), Counting(), nn.Linear(12, 4)
    ).double()


class Counting(nn.Module):
    """Scales by a buffer that each forward in train mode changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Count samples, in a new tensor."""
        if self.training:
            self.seen = self.seen + 0.01 * len(values)
        return values * self.seen.detach()


def samples(step: int, number: int) -> Batch:
    """Return the effective batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "x": torch.randn(number, 2, 5, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 4, (number,), generator=generator),
    }


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def encode(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and labels."""
    return model(batch["x"]), batch["y"]


def spread(model: nn.Module, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a loss that looks across samples."""
    del model
    return F.cross_entropy(outputs[0], outputs[1]) + outputs[0].mean(0).square().sum()


def late(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return a loss that comes with its count."""
    value = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return ab.LossSum(value, len(batch["y"]))


LOSSES: Mapping[str, Callable[[], Loss | Callable[..., Any]]] = {
    "plain": lambda: ab.mean_over_samples(classify),
    "joint": lambda: ab.joint(encode, spread),
    "late": lambda: late,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of three steps.

    Attributes:
        strategy: its name.
        loss: name of the loss.
        num_samples: samples of an effective batch, per rank.
        sizes: the engine's size options.
        options: other options of the engine; `ghost` means groups of two.
        brought: ranks bring shares of uneven sizes.
    """

    strategy: str = "single"
    loss: str = "plain"
    num_samples: int = LARGE
    sizes: Mapping[str, int | str] = field(default_factory=lambda: {"micro_batch_size": LARGE})
    options: Mapping[str, Any] = field(default_factory=dict)
    brought: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which allocations of the second step fail: `at[rank]` (0: none), `times` times, each counted from the last."""

    at: tuple[int, ...]
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The results of a run on one rank.

    Attributes:
        weights: parameters and buffers.
        too_large: `too_large` in the second report.
        plans: the cuts of all steps, as text.
        units: micro-batches of the second step since its last restart: (start id, number).
        events: (phase, before, after) of each out-of-memory event.
        num_allocations: of the second step, before clipping.
        decision: on the micro-batch size.
    """

    weights: Weights
    too_large: tuple[int, ...]
    plans: tuple[str, ...]
    units: tuple[tuple[int, int], ...]
    events: tuple[tuple[Any, ...], ...]
    num_allocations: int
    decision: str


class Listening:
    """An observer that keeps records, and counts allocations up to the clipping."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.count: Callable[[], int] = lambda: 0
        self.num_allocations = 0

    def observe(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)
        if isinstance(record, PhaseRecord) and record.name == "clip" and record.event == "begin":
            self.num_allocations = self.count()


def engine_of(run: Run, world: ab.World, observer: Any) -> tuple[nn.Module, ab.Engine]:
    """Return a model and its engine."""
    model = network()
    options = {"norms": "keep", **run.options}
    if options.get("norms") == "ghost":
        options["norms"] = Ghost(group_size=2)
    engine = ab.Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        LOSSES[run.loss](),
        strategy=STRATEGIES[run.strategy](),
        check_loss=False,
        measure_gradient_norm=False,
        observer=observer,
        world=world,
        **{**run.sizes, **options},
    )
    return model, engine


def batch_of(run: Run, step: int, world: ab.World) -> InMemory | RankShare:
    """Return the effective batch of a step as this rank's engine gets it."""
    total = world.size * (run.num_samples if step else FEW)
    batch = samples(step, total)
    if not run.brought:
        found = InMemory(batch, end=Position(0, total))
        found.sample_ids = range(1000 * step, 1000 * step + total)
        return found
    start, stop = share_bounds(total, [rank + 1 for rank in range(world.size)])[world.rank]
    return RankShare(cut(batch, start, stop))


def train(run: Run, fault: Fault | None = None) -> End:
    """Run on every rank: train for three steps, with failing allocations in the second."""
    world = ab.World.from_environment(device="cpu")
    listening = Listening()
    model, engine = engine_of(run, world, listening)
    with engine:
        torch.default_generator.manual_seed(11)
        reports = [engine.step(batch_of(run, 0, world))]
        second = batch_of(run, 1, world)
        at = fault.at[world.rank] if fault is not None else 0
        with out_of_memory_at(at, times=fault.times if fault is not None else 1) as injected:
            listening.count = lambda: injected.num_allocations
            reports.append(engine.step(second))
            num_allocations = listening.num_allocations
        reports.append(engine.step(batch_of(run, 2, world)))
    assert [report.step for report in reports] == [0, 1, 2]
    return End(
        weights={name: value.clone() for name, value in model.state_dict().items()},
        too_large=reports[1].too_large,
        plans=tuple(str(report.plan) for report in reports),
        units=units_of(listening.records, 1),
        events=tuple(
            (record.phase, record.micro_batch_size_before, record.micro_batch_size_after)
            for record in listening.records
            if isinstance(record, OutOfMemoryRecord)
        ),
        num_allocations=num_allocations,
        decision=engine.decisions.get("micro_batch_size", ""),
    )


def sweep(run: Run, rank: int, every: int, first: int = 1, times: int = 1) -> list[tuple[int, End]]:
    """Run on every rank: fail every `every`-th allocation of a step on one rank, in one run each."""
    world = ab.World.from_environment(device="cpu")
    counts = world.gather_objects(train(run).num_allocations)
    found = []
    for at in range(first, counts[rank] + 1, every):
        fault = Fault(at=tuple(at if one == rank else 0 for one in range(world.size)), times=times)
        found.append((at, train(run, fault)))
    return found


def units_of(records: list[Record], step: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches of a step that finished since its last restart."""
    last = max((n for n, r in enumerate(records) if isinstance(r, OutOfMemoryRecord) and r.step == step), default=-1)
    return tuple(
        (record.first_sample_id or 0, record.num_samples)
        for record in records[last + 1 :]
        if isinstance(record, MicroBatchRecord) and record.step == step and record.event == "end" and record.weight
    )


def same(one: Weights, other: Weights) -> bool:
    """Whether all values are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
