"""Small training runs by batch size, learning rate and seed, for the experiments about batch size.

The experiments are small versions of the studies in `benchmarks/`, which take only minutes. A run makes a fixed number
of epochs, in an order that depends on the seed and not on the batch size. By default, the learning rate warms up
over a tenth of the steps; then it decays along a cosine. Gradients are not clipped, because clipping hides rates that
are too high.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.schedules import Cosine, Schedule, WarmUp, attach_schedule, join_schedules
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.errors import NonFiniteError
from anybatch_guide.claims import measuring
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, load

OptimizerName = Literal["SGD", "AdamW"]
Batch = dict[str, Tensor]
WARM_UP = 0.1
MICRO_BATCH_SIZE = 128
BETAS: dict[OptimizerName, tuple[float, ...]] = {"SGD": (0.9,), "AdamW": (0.9, 0.99)}
"""The momentum of SGD, and the betas of AdamW."""
EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """The settings of a training run."""

    task: Literal["digits", "text"]  # "digits" or "text"
    optimizer: OptimizerName  # name of the optimizer's class
    batch_size: int  # samples of one step
    learning_rate: float  # maximum learning rate of the run
    epochs: int  # passes over the data
    betas: tuple[float, ...]  # momentum of SGD, or the pair of AdamW
    eps: float = EPS  # epsilon of AdamW
    warm_up: float = WARM_UP  # share of the steps in which the learning rate rises; 0 for none
    seed: int = 0  # seed of the parameters and the order


class SmallNetwork(nn.Sequential):
    """A smaller `digits` network, with two convolutions and a quarter of the channels: 1,946 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.GroupNorm(4, 8), nn.GELU()),
            *(nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.GroupNorm(4, 16), nn.GELU()),
            *(nn.Flatten(), nn.Linear(16 * 2 * 2, 10)),
        )


@cache
def task_of(name: str) -> PlaygroundTask:
    """Return a task of the playground; the network of `digits` is the small one."""
    task = load(name)
    return replace(task, model=SmallNetwork) if name == "digits" else task


def new_model(run: StudyRun) -> nn.Module:
    """Return the model of a run, initialized with its seed; the global random state does not change."""
    return measuring.new_model(task_of(run.task), run.seed)


def steps_of(run: StudyRun) -> Iterator[Batch]:
    """Yield the batch of each step, in the order of `ab.batches`; the last batch of an epoch may be smaller."""
    loader = MicroBatches(task_of(run.task).rows, run.batch_size, run.seed)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            yield {"inputs": inputs, "targets": targets}


def num_steps_of(run: StudyRun) -> int:
    """Return the number of steps of a run."""
    return run.epochs * len(MicroBatches(task_of(run.task).rows, run.batch_size, run.seed))


def engine_of(run: StudyRun, model: nn.Module, **options: Any) -> ab.Engine:  # noqa: ANN401 (the engine's own)
    """Return the engine of a run."""
    if run.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=run.learning_rate, momentum=run.betas[0]
        )
    else:
        betas = (run.betas[0], run.betas[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=betas, eps=run.eps)
    return ab.Engine(
        model,
        optimizer,
        task_of(run.task).loss,
        scheduler=partial(attach_schedule, schedule=schedule_of(run)),
        check_loss=False,
        **{"micro_batch_size": MICRO_BATCH_SIZE, "measure_gradient_norm": False, **options},
    )


def schedule_of(run: StudyRun) -> Schedule:
    """Return the factors of the learning rate: a warm-up, then a cosine to a tenth."""
    total_steps = num_steps_of(run)
    num_warm_up_steps = max(1, round(run.warm_up * total_steps)) if run.warm_up else 0
    return join_schedules(
        WarmUp(num_steps=num_warm_up_steps, start_factor=1 / (num_warm_up_steps + 1)),
        Cosine(num_steps=max(1, total_steps - num_warm_up_steps), floor=0.1),
    )


def trained(run: StudyRun) -> tuple[nn.Module, list[float]]:
    """Return the trained model and the losses by step, up to the first loss that is not finite."""
    model, losses = new_model(run), list[float]()
    with engine_of(run, model) as engine:
        try:
            losses.extend(engine.step(batch).loss for batch in steps_of(run))
        except NonFiniteError:
            losses.append(math.inf)
    return model, losses


def held_out_loss(run: StudyRun) -> float:
    """Return the loss on held-out samples after a run; infinite if it diverged."""
    model, losses = trained(run)
    return evaluate_held_out(model, run)[0] if math.isfinite(losses[-1]) else math.inf


@torch.no_grad()
def evaluate_held_out(model: nn.Module, run: StudyRun) -> tuple[float, float]:
    """Return loss and accuracy over the held-out samples."""
    task = task_of(run.task)
    batch = {"inputs": task.held_out.inputs, "targets": task.held_out.targets}
    is_correct = model(batch["inputs"]).argmax(-1) == batch["targets"]
    loss = float(task.loss.function(model, batch))
    return (loss if math.isfinite(loss) else math.inf), float(is_correct.double().mean())


def noise_scale_of(run: StudyRun) -> float:
    """Return the median noise scale, in samples, over the second quarter of a run, as measured by the engine."""
    model, steps = new_model(run), num_steps_of(run)
    scales = list[float]()
    noise = GradientNoise(every=1, decay=0.95)
    with engine_of(run, model, noise=noise, micro_batch_size=max(1, run.batch_size // 4)) as engine:
        for number, batch in zip(range(steps // 2), steps_of(run), strict=False):
            report = engine.step(batch)
            if number >= steps // 4 and report.noise is not None:
                scales.append(report.noise.scale)
    return statistics.median(scales)


def sharpness_inputs(run: StudyRun, model: nn.Module) -> tuple[TrainSpec, Batch, Hardware]:
    """Return the input of `measure_sharpness`, over all training samples of a run."""
    task = task_of(run.task)
    spec = TrainSpec(
        model=model, optimizer=lambda named: torch.optim.SGD(named, lr=0.0), loss=task.loss, measure_gradient_norm=False
    )
    return spec, {"inputs": task.rows.inputs, "targets": task.rows.targets}, Hardware(micro_batch_size=256)
