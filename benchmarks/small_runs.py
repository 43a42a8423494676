"""Small training runs, shared by the studies of the learning rate: many runs of small versions of two recipes.

A run sees a fixed number of samples in one global order at any batch size, so that two runs of a seed differ only in
the number of samples per step and in the optimizer's treatment of them. Runs are stored in a file, one line of JSON
each, so that a study can be stopped and resumed.

Both recipes are smaller, so that thousands of runs take minutes on one core: `digits` has two convolutions of 8 and 16
channels and images without shifts, `text` has one block of width 32 and windows of 32 bytes. Nothing is clipped, since
clipping would hide a learning rate that is too high.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.core.schedules import Cosine, WarmUp, attach_schedule, join_schedules, steps_of_samples
from anybatch.data.indexed import sample_order
from anybatch.errors import NonFiniteError
from anybatch.recipes import digits, text

MICRO_BATCH_SIZE = 128
WARM_UP = 0.1
"""Fraction of the samples for the warm-up, followed by a cosine to a tenth."""
NUM_POINTS = 16
"""Points of a curve of losses."""

Rows = dict[str, Tensor]
OptimizerName = Literal["SGD", "AdamW"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A learning task.

    Attributes:
        model: function () -> a new model.
        loss: the declared loss.
        train: all samples to train on, one row each.
        held_out: samples for the evaluation.
        num_samples: samples that a run sees.
        batch_sizes: batch sizes of the study.
        rates: grid of learning rates, by optimizer.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    train: Rows = field(repr=False)
    held_out: Rows = field(repr=False)
    num_samples: int
    batch_sizes: tuple[int, ...]
    rates: Mapping[OptimizerName, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run: the settings that a rule can change, and the seed.

    Attributes:
        task: "digits" or "text".
        optimizer: its class.
        batch_size: samples of one step.
        learning_rate: maximum learning rate of the run.
        betas: momentum of SGD, or the pair of AdamW.
        eps: epsilon of AdamW; 0 for SGD.
        seed: seed of the initial parameters and of the order.
    """

    task: str
    optimizer: OptimizerName
    batch_size: int
    learning_rate: float
    betas: tuple[float, ...]
    eps: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run; infinite if it diverged.

    Attributes:
        held_out: mean loss over the held-out samples at the end.
        accuracy: fraction of them with the right label (next byte).
        curve: mean training loss over each of 16 equal parts of the samples.
    """

    held_out: float
    accuracy: float
    curve: tuple[float, ...]


class SmallNetwork(nn.Sequential):
    """The network of `digits` with two of its convolutions and a quarter of its channels: 1,946 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.GroupNorm(4, 8), nn.GELU()),
            *(nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.GroupNorm(4, 16), nn.GELU()),
            *(nn.Flatten(), nn.Linear(16 * 2 * 2, 10)),
        )


@cache
def task_of(name: str) -> Task:
    """Return a task by its name; its data are read once. The suffix "x 4" multiplies the samples by four."""
    name, _, times = name.partition(" x ")
    task = {"digits": _digits, "text": _text}[name]()
    return dataclasses.replace(task, num_samples=task.num_samples * int(times or 1))


def _digits() -> Task:
    train, held_out = digits.Digits("train"), digits.Digits("held_out")
    return Task(
        model=SmallNetwork,
        loss=ab.mean_over_samples(digits.loss),
        train={"image": train.images, "label": train.labels},
        held_out={"image": held_out.images, "label": held_out.labels},
        num_samples=8 * len(train),
        batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
        rates={
            "SGD": tuple(0.005 * 2.0**k for k in range(8)),
            "AdamW": tuple(0.001 * 2.0**k for k in range(8)),
        },
    )


def _text() -> Task:
    job = text.text(width=32, num_layers=1, num_heads=2, context=32)
    assert job.evaluate is not None
    train, held_out = job.dataset(), job.evaluate.dataset()
    num_samples = 3072
    return Task(
        model=job.model,  # type: ignore[arg-type]  # one module, and no dict of them
        loss=job.loss,  # type: ignore[arg-type]  # it is declared
        train=_rows(train, range(0, len(train), len(train) // num_samples), num_samples),
        held_out=_rows(held_out, range(0, len(held_out), max(1, len(held_out) // 512)), 512),
        num_samples=num_samples,
        batch_sizes=(8, 16, 32, 64, 128, 256),
        rates={
            "SGD": tuple(0.025 * 2.0**k for k in range(4)),
            "AdamW": tuple(0.002 * 2.0**k for k in range(4)),
        },
    )


def _rows(dataset: Any, ids: Iterable[int], most: int) -> Rows:  # noqa: ANN401 (a data set of windows)
    samples = [dataset[index] for index in list(ids)[:most]]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def taken(rows: Rows, ids: Tensor) -> Rows:
    """Return the samples with these ids."""
    return {name: value[ids] for name, value in rows.items()}


def batches_of(setting: Setting) -> Iterator[Tensor]:
    """Yield the sample ids of each step, like `ab.batches` except for batches that cross epochs."""
    task = task_of(setting.task)
    size = len(next(iter(task.train.values())))
    order = torch.cat(
        [
            sample_order(size, seed=setting.seed, epoch=epoch, shuffle=True)
            for epoch in range(-(-task.num_samples // size))
        ]
    )
    yield from order[: task.num_samples].split(setting.batch_size)


def engine_of(setting: Setting, model: nn.Module, **options: Any) -> ab.Engine:  # noqa: ANN401 (the engine's own)
    """Return the engine of a run."""
    task = task_of(setting.task)
    if setting.optimizer == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=setting.learning_rate, momentum=setting.betas[0]
        )
    else:
        betas = (setting.betas[0], setting.betas[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, betas=betas, eps=setting.eps)
    warm_up = steps_of_samples(round(WARM_UP * task.num_samples), effective_batch_size=setting.batch_size)
    whole = steps_of_samples(task.num_samples, effective_batch_size=setting.batch_size)
    schedule = join_schedules(
        WarmUp(num_steps=warm_up, start_factor=1 / (warm_up + 1)), Cosine(num_steps=whole - warm_up, floor=0.1)
    )
    return ab.Engine(
        model,
        optimizer,
        task.loss,
        micro_batch_size=MICRO_BATCH_SIZE,
        scheduler=lambda optimizer: attach_schedule(optimizer, schedule),
        check_loss=False,
        **{"measure_gradient_norm": False, **options},
    )


def new_model(setting: Setting) -> nn.Module:
    """Return the initial model of a run, by its seed."""
    torch.manual_seed(setting.seed)
    return task_of(setting.task).model()


def train(setting: Setting) -> tuple[nn.Module, Outcome]:
    """Train with a setting, and return the model and the outcome."""
    task, model = task_of(setting.task), new_model(setting)
    losses = list[tuple[int, float]]()
    with engine_of(setting, model) as engine:
        try:
            for ids in batches_of(setting):
                loss = engine.step(taken(task.train, ids)).loss
                losses.append((len(ids), loss))
        except NonFiniteError:
            return model, Outcome(held_out=math.inf, accuracy=0.0, curve=())
    held_out, accuracy = judged(model, task)
    return model, Outcome(held_out=held_out, accuracy=accuracy, curve=_curve(losses, task.num_samples))


@torch.no_grad()
def judged(model: nn.Module, task: Task) -> tuple[float, float]:
    """Return loss and accuracy over the held-out samples."""
    inputs, targets = task.held_out.values()
    outputs = model(inputs)
    found = (outputs.argmax(-1) == targets).float().mean()
    loss = float(task.loss.function(model, task.held_out))
    return (loss if math.isfinite(loss) else math.inf), float(found)


def _curve(losses: list[tuple[int, float]], num_samples: int) -> tuple[float, ...]:
    """Return the mean loss over each part of the samples; a step counts in each part that it overlaps."""
    sums, counts = [0.0] * NUM_POINTS, [0.0] * NUM_POINTS
    done = 0
    for size, loss in losses:
        first, last = done * NUM_POINTS / num_samples, (done + size) * NUM_POINTS / num_samples
        for part in range(int(first), min(NUM_POINTS, math.ceil(last))):
            share = min(last, part + 1) - max(first, part)
            sums[part] += share * loss
            counts[part] += share
        done += size
    return tuple(total / count for total, count in zip(sums, counts, strict=True))


class Runs:
    """Stored runs in a file; missing ones are run.

    Args:
        path: one line of JSON for each run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[Setting, Outcome] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                row["setting"]["betas"] = tuple(row["setting"]["betas"])
                row["outcome"]["curve"] = tuple(row["outcome"]["curve"])
                self._known[Setting(**row["setting"])] = Outcome(**row["outcome"])

    def __call__(self, setting: Setting) -> Outcome:
        """Return the outcome of a run, which is made if it is not stored."""
        if setting not in self._known:
            _, outcome = train(setting)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"setting": asdict(setting), "outcome": asdict(outcome)}) + "\n")
            self._known[setting] = outcome
        return self._known[setting]
