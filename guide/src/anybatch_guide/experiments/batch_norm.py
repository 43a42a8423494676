"""BatchNorm under accumulation: one effective batch cut ever finer, with and without a cure, over several seeds."""

import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import anybatch as ab
from anybatch.norms import Exact, Ghost
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.tasks.shapes import network, shapes
from anybatch_guide.tasks.task import LabelledSamples, Norm, cross_entropy

EFFECTIVE_BATCH_SIZE: Final = 64
SIZES: Final = (64, 16, 4)
ERROR_SIZES: Final = (64, 16, 4, 2)
NUM_STEPS: Final = 100
NUM_HELD_OUT: Final = 1_000
NUM_LAST: Final = 20
"""Steps at the end over which the training loss is averaged."""
SEEDS: Final = (0, 1, 2)
LEARNING_RATE: Final = 3e-3
GROUP_SIZE: Final = 4
ERROR_STEPS: Final = 10
"""Steps of the native batch after which gradients are compared, so that running statistics and weights have moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormWay:
    """A way to train a network with norms in micro-batches.

    Attributes:
        name: in the data.
        norm: the layers of the network.
        policy: what the engine does about BatchNorm; None for a loop in plain PyTorch.
        sizes: the micro-batch sizes it is run at.
    """

    name: str
    norm: Norm
    policy: Any
    sizes: tuple[int, ...] = SIZES


WAYS: Final = (
    BatchNormWay(name="plain", norm="batch", policy=None),
    BatchNormWay(name="keep", norm="batch", policy="keep"),
    BatchNormWay(name="ghost", norm="batch", policy=Ghost(GROUP_SIZE), sizes=(64, 4)),
    BatchNormWay(name="exact", norm="batch", policy=Exact(offload=False), sizes=(64, 4)),
    BatchNormWay(name="group_norm", norm="group", policy="keep", sizes=(64, 4)),
)


def run(tell: Tell) -> Data:
    """Train every way at every size from every seed, and compare gradients at one point of one run."""
    rows: list[dict[str, Any]] = []
    of = sum(len(way.sizes) for way in WAYS) * len(SEEDS)
    done = 0
    for way in WAYS:
        for size in way.sizes:
            outcomes = []
            for seed in SEEDS:
                tell({"kind": "guide.progress", "done": done, "of": of, "what": f"{way.name}, micro-batches of {size}"})
                outcomes.append(outcome(way, size, seed, tell))
                done += 1
            rows.append({"way": way.name, "micro_batch_size": size, **summary(outcomes)})
    return {
        "effective_batch_size": EFFECTIVE_BATCH_SIZE,
        "num_steps": NUM_STEPS,
        "num_last": NUM_LAST,
        "num_seeds": len(SEEDS),
        "learning_rate": LEARNING_RATE,
        "group_size": GROUP_SIZE,
        "num_held_out": NUM_HELD_OUT,
        "error_steps": ERROR_STEPS,
        "gradient_errors": gradient_errors(),
        "rows": rows,
    }


def summary(outcomes: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return mean, least and most over seeds of every number."""
    names = outcomes[0]
    return {name: _spread([one[name] for one in outcomes]) for name in names}


def outcome(way: BatchNormWay, size: int, seed: int, tell: Tell) -> dict[str, float]:
    """Train once; return the training loss, and what is read on held-out pictures before and after recalibration."""
    rows, held_out = pictures()
    torch.manual_seed(seed)
    model = network(way.norm)
    step = stepper(way, size, model)
    losses = []
    for batch in batches(rows, seed, NUM_STEPS):
        losses.append(step(batch))
        tell({"kind": "guide.progress"})
    found = {"train_loss": statistics.fmean(losses[-NUM_LAST:]), **_read("", model, held_out)}
    if way.norm == "batch":
        recalibrate(model, rows)
        found |= _read("recalibrated_", model, held_out)
    return found


def stepper(way: BatchNormWay, size: int, model: nn.Module) -> Callable[[dict[str, Tensor]], float]:
    """Return a function that steps one effective batch and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if way.policy is None:
        return lambda batch: plain_step(model, optimizer, batch, size)
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(_loss), micro_batch_size=size, norms=way.policy)
    return lambda batch: float(engine.step(batch).loss)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], size: int) -> float:
    """Step as a loop in plain PyTorch does: BatchNorm takes every micro-batch for a batch."""
    model.train()
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in zip(batch["inputs"].split(size), batch["targets"].split(size), strict=True):
        loss = cross_entropy(model(inputs), targets) * (len(targets) / len(batch["targets"]))
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@functools.cache
def pictures() -> tuple[LabelledSamples, LabelledSamples]:
    """Return pictures for one epoch, so that none is seen twice, and pictures that are held out."""
    num_seen = NUM_STEPS * EFFECTIVE_BATCH_SIZE
    images, labels = shapes(num_seen + NUM_HELD_OUT, seed=0)
    return LabelledSamples(images[:num_seen], labels[:num_seen]), LabelledSamples(images[num_seen:], labels[num_seen:])


def batches(rows: LabelledSamples, seed: int, num_steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield effective batches of one order, the same for every way."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(rows), generator=random)[: num_steps * EFFECTIVE_BATCH_SIZE]
    for some in ids.split(EFFECTIVE_BATCH_SIZE):
        yield {"inputs": rows.inputs[some], "targets": rows.targets[some]}


@torch.no_grad()
def recalibrate(model: nn.Module, rows: LabelledSamples) -> None:
    """Compute the running statistics again, from all training pictures at once; weights stay."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain average over what comes
    model.train()
    model(rows.inputs)
    model.eval()


@torch.no_grad()
def _read(prefix: str, model: nn.Module, rows: LabelledSamples) -> dict[str, float]:
    model.eval()
    logits = model(rows.inputs)
    return {
        f"{prefix}held_out_loss": float(F.cross_entropy(logits, rows.targets)),
        f"{prefix}held_out_accuracy": float((logits.argmax(dim=1) == rows.targets).double().mean()),
    }


def gradient_errors() -> list[dict[str, Any]]:
    """Return how far each way's gradient is from that of the whole batch, in float64, in the middle of a run."""
    return [
        {"way": way.name, "micro_batch_size": size, "relative_error": gradient_error(way, size)}
        for way in WAYS
        if way.name != "ghost"  # another function, which has no whole batch to be compared with
        for size in (ERROR_SIZES if way.sizes == SIZES else way.sizes)
    ]


def gradient_error(way: BatchNormWay, size: int) -> float:
    """Return |gradient in micro-batches - gradient at once| / |gradient at once|."""
    rows, _ = pictures()
    torch.manual_seed(SEEDS[0])
    model = network(way.norm).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    *before, last = (
        {"inputs": batch["inputs"].double(), "targets": batch["targets"]}
        for batch in batches(rows, SEEDS[0], ERROR_STEPS + 1)
    )
    for batch in before:
        plain_step(model, optimizer, batch, EFFECTIVE_BATCH_SIZE)
    at_once = step_taken(BatchNormWay(name="", norm=way.norm, policy=None), EFFECTIVE_BATCH_SIZE, model, last)
    in_parts = step_taken(way, size, model, last)
    return float((in_parts - at_once).norm() / at_once.norm())


def step_taken(way: BatchNormWay, size: int, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, " number"]:
    """Return the gradient of a batch: what a step of SGD at learning rate 1 takes away from a copy of the weights."""
    moved = copy.deepcopy(model)
    optimizer = torch.optim.SGD(moved.parameters(), lr=1.0)
    if way.policy is None:
        plain_step(moved, optimizer, batch, size)
    else:
        ab.Engine(moved, optimizer, ab.mean_over_samples(_loss), micro_batch_size=size, norms=way.policy).step(batch)
    before, after = (nn.utils.parameters_to_vector(one.parameters()).detach() for one in (model, moved))
    return before - after


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(numbers), "least": min(numbers), "most": max(numbers)}


EXPERIMENT = Experiment(
    name="batch_norm",
    question="What does cutting a batch do to BatchNorm, and which cure helps?",
    run=run,
    seconds=300.0,
    runs_here=False,
    tolerance=1e-2,  # rounding grows over the steps of a run, and accuracies are counts of pictures
    noisy=("relative_error",),
)
