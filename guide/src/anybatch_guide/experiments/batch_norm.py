"""BatchNorm with accumulation: one effective batch in several micro-batch sizes, with each BatchNorm policy."""

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
from anybatch_guide.claims.measuring import relative
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.tasks.shapes import draw_images, network
from anybatch_guide.tasks.task import LabelledSamples, Norm, cross_entropy

EFFECTIVE_BATCH_SIZE: Final = 64
SIZES: Final = (64, 16, 4)
ERROR_SIZES: Final = (64, 16, 4, 2)
NUM_STEPS: Final = 100
NUM_HELD_OUT: Final = 1_000
NUM_LAST: Final = 20
"""Number of last steps over which the training loss is averaged."""
SEEDS: Final = (0, 1, 2)
LEARNING_RATE: Final = 3e-3
GROUP_SIZE: Final = 4
ERROR_STEPS: Final = 10
"""Number of unsplit steps before gradients are compared, so that running statistics are not the initial ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A network with normalization layers, and its training configuration."""

    name: str  # its name in the recorded data
    norm: Norm  # the kind of normalization layers
    policy: Any  # the engine's BatchNorm policy; None for a loop in plain PyTorch
    sizes: tuple[int, ...] = SIZES  # the micro-batch sizes to train with


CONFIGS: Final = (
    NormConfig(name="plain", norm="batch", policy=None),
    NormConfig(name="keep", norm="batch", policy="keep"),
    NormConfig(name="ghost", norm="batch", policy=Ghost(GROUP_SIZE), sizes=(64, 4)),
    NormConfig(name="exact", norm="batch", policy=Exact(offload=False), sizes=(64, 4)),
    NormConfig(name="group_norm", norm="group", policy="keep", sizes=(64, 4)),
)


def run(emit: Emit) -> Data:
    """Train every configuration with every micro-batch size and seed, and compare gradients after a few steps."""
    results: list[dict[str, Any]] = []
    num_runs = sum(len(config.sizes) for config in CONFIGS) * len(SEEDS)
    done = 0
    for config in CONFIGS:
        for size in config.sizes:
            outcomes = []
            for seed in SEEDS:
                what = f"{config.name}, micro-batches of {size}"
                emit_progress(emit, done, num_runs, what)
                outcomes.append(train_and_evaluate(config, size, seed, emit))
                done += 1
            results.append({"way": config.name, "micro_batch_size": size, **summary(outcomes)})
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
        "rows": results,
    }


def summary(outcomes: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean, minimum and maximum of every metric over the seeds."""
    names = outcomes[0]
    return {name: _spread([outcome[name] for outcome in outcomes]) for name in names}


def train_and_evaluate(config: NormConfig, size: int, seed: int, emit: Emit) -> dict[str, float]:
    """Train once; return the training loss, and held-out loss and accuracy before and after recalibration."""
    train_set, held_out = train_and_held_out_images()
    torch.manual_seed(seed)
    model = network(config.norm)
    step = make_step(config, size, model)
    losses = []
    for batch in batches(train_set, seed, NUM_STEPS):
        losses.append(step(batch))
        emit({"kind": "guide.progress"})
    metrics = {"train_loss": statistics.fmean(losses[-NUM_LAST:]), **_evaluate("", model, held_out)}
    if config.norm == "batch":
        recalibrate(model, train_set)
        metrics |= _evaluate("recalibrated_", model, held_out)
    return metrics


def make_step(config: NormConfig, size: int, model: nn.Module) -> Callable[[dict[str, Tensor]], float]:
    """Return a function that makes one optimizer step on an effective batch and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if config.policy is None:
        return lambda batch: plain_step(model, optimizer, batch, size)
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(_loss), micro_batch_size=size, norms=config.policy)
    return lambda batch: float(engine.step(batch).loss)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], size: int) -> float:
    """Make one optimizer step in plain PyTorch, where BatchNorm uses the statistics of each micro-batch."""
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
def train_and_held_out_images() -> tuple[LabelledSamples, LabelledSamples]:
    """Return enough training images for all steps, so that no image is repeated, and held-out images."""
    num_seen = NUM_STEPS * EFFECTIVE_BATCH_SIZE
    images, labels = draw_images(num_seen + NUM_HELD_OUT, seed=0)
    return LabelledSamples(images[:num_seen], labels[:num_seen]), LabelledSamples(images[num_seen:], labels[num_seen:])


def batches(samples: LabelledSamples, seed: int, num_steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield effective batches in an order that depends on the seed alone."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(len(samples), generator=random)[: num_steps * EFFECTIVE_BATCH_SIZE]
    for batch_ids in ids.split(EFFECTIVE_BATCH_SIZE):
        yield {"inputs": samples.inputs[batch_ids], "targets": samples.targets[batch_ids]}


@torch.no_grad()
def recalibrate(model: nn.Module, samples: LabelledSamples) -> None:
    """Recompute the running statistics from all training images in one batch, with unchanged weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative average
    model.train()
    model(samples.inputs)
    model.eval()


@torch.no_grad()
def _evaluate(prefix: str, model: nn.Module, samples: LabelledSamples) -> dict[str, float]:
    model.eval()
    logits = model(samples.inputs)
    return {
        f"{prefix}held_out_loss": float(F.cross_entropy(logits, samples.targets)),
        f"{prefix}held_out_accuracy": float((logits.argmax(dim=1) == samples.targets).double().mean()),
    }


def gradient_errors() -> list[dict[str, Any]]:
    """Return the relative error of each configuration's gradient in float64, after `ERROR_STEPS` steps."""
    return [
        {"way": config.name, "micro_batch_size": size, "relative_error": gradient_error(config, size)}
        for config in CONFIGS
        if config.name != "ghost"  # "ghost" normalizes groups by definition, so no whole-batch gradient exists
        for size in (ERROR_SIZES if config.sizes == SIZES else config.sizes)
    ]


def gradient_error(config: NormConfig, size: int) -> float:
    """Return |gradient in micro-batches - gradient of the whole batch| / |gradient of the whole batch|."""
    train_set, _ = train_and_held_out_images()
    torch.manual_seed(SEEDS[0])
    model = network(config.norm).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    *before, last = (
        {"inputs": batch["inputs"].double(), "targets": batch["targets"]}
        for batch in batches(train_set, SEEDS[0], ERROR_STEPS + 1)
    )
    for batch in before:
        plain_step(model, optimizer, batch, EFFECTIVE_BATCH_SIZE)
    expected = gradient_of_step(NormConfig(name="", norm=config.norm, policy=None), EFFECTIVE_BATCH_SIZE, model, last)
    gradient = gradient_of_step(config, size, model, last)
    return relative(gradient, expected)


def gradient_of_step(
    config: NormConfig, size: int, model: nn.Module, batch: dict[str, Tensor]
) -> Float[Tensor, " number"]:
    """Return the gradient of a batch: the change of a copy of the weights in an SGD step with learning rate 1."""
    updated = copy.deepcopy(model)
    optimizer = torch.optim.SGD(updated.parameters(), lr=1.0)
    if config.policy is None:
        plain_step(updated, optimizer, batch, size)
    else:
        loss = ab.mean_over_samples(_loss)
        ab.Engine(updated, optimizer, loss, micro_batch_size=size, norms=config.policy).step(batch)
    before, after = (nn.utils.parameters_to_vector(module.parameters()).detach() for module in (model, updated))
    return before - after


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(numbers), "least": min(numbers), "most": max(numbers)}


EXPERIMENT = Experiment(
    name="batch_norm",
    question="How does splitting a batch affect BatchNorm, and which fix helps?",
    run=run,
    seconds=300.0,
    runs_here=False,
    tolerance=1e-2,  # rounding grows over the steps of a run, and accuracies are counts of images
    noisy=("relative_error",),
)
