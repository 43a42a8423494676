"""Losses and gradients of a loop with each mistake, compared with the full batch in one pass."""

import inspect
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DistributedSampler

from anybatch.diagnostics.loop_check.judged_loop import ROLES
from anybatch.recipes.digits import Network
from anybatch.testing import RankPool
from anybatch_guide.claims.devices import EVEN, UNEVEN
from anybatch_guide.claims.measuring import Pair, cut, flat_gradients, measure_cases, new_model, relative
from anybatch_guide.exercises import no_sync_always, no_sync_backward, with_ranks
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.experiments.ddp_timeline import WatchedDDP
from anybatch_guide.mistakes.mistake import loop_of
from anybatch_guide.tasks.task import IGNORED, LabelledSamples, MicroBatches, PlaygroundTask, cross_entropy, load

BATCH, EPOCHS, RATE = 64, 2, 0.1
GAMMA, VIEW_NOISE, TEMPERATURE, ROUNDING = 0.9, 0.1, 0.1, 1e-9
Criterion = Callable[[Tensor, Tensor], Tensor]
EXAMPLE = """\
def train(model, loader, optimizer, criterion, accumulation_steps):
    model.train()
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


class RecordingOptimizer(torch.optim.SGD):
    """SGD that records the gradient, rate, samples and loss (the value passed to `backward`) of each step."""

    def __init__(self, model: nn.Module, rate: float, criterion: Criterion, *, clears: bool) -> None:
        super().__init__(model.parameters(), lr=rate)
        self._model, self._criterion, self._clears = model, criterion, clears
        self.gradients: list[Tensor] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.num_samples = self.sent = 0
        self._loss, self._count = 0.0, 0  # of the next step

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch, and record its value times the factor that the loop gives it."""
        loss, count = self._criterion(outputs, targets), len(targets)
        value = loss.item()  # a hook with the loss itself would keep its graph alive

        def record(factor: Tensor) -> None:
            self._loss, self._count = self._loss + value * factor.item(), self._count + count

        loss.register_hook(record)
        return loss

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 (as torch has it)
        """Record the step, and update the parameters."""
        self.gradients.append(flat_gradients(self._model))
        self.rates.append(float(self.param_groups[0]["lr"]))
        self.losses.append(self._loss)
        self.num_samples += self._count
        self._loss, self._count = 0.0, 0
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 (as torch has it)
        """Clear the gradients, unless the mistake is that gradients are never cleared."""
        if self._clears:
            super().zero_grad(set_to_none)


@dataclass(frozen=True)
class Runs:
    """A loop with a mistake, the correct loop over the unsplit batches, and the setting on which the error depends."""

    at: str
    wrong: RecordingOptimizer
    right: RecordingOptimizer


def gradient_error(runs: Runs) -> float:
    """Return the relative gradient error of the first step with an error above rounding."""
    errors = [relative(*pair) for pair in zip(runs.wrong.gradients, runs.right.gradients, strict=False)]
    return next((error for error in errors if not error < ROUNDING), max(errors))


def record(
    task: PlaygroundTask,
    loop: Callable[..., None],
    loader: Iterable[Pair],
    accumulation_steps: int,
    *,
    epochs: int = EPOCHS,
    rate: float = RATE,
    gamma: float = 1.0,
    max_norm: float = math.inf,
    criterion: Criterion = cross_entropy,
    clears: bool = True,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> RecordingOptimizer:
    """Run a loop for some epochs, and return its optimizer."""
    model = new_model(task).double()
    optimizer = RecordingOptimizer(model, rate, criterion, clears=clears)
    arguments = {
        "optimizer": optimizer,
        "scheduler": ExponentialLR(optimizer, gamma),
        "criterion": optimizer.criterion,
        "accumulation_steps": accumulation_steps,
        "max_norm": max_norm,
    }
    accepted = inspect.signature(loop).parameters
    wrapped = wrap(model) if wrap else model
    for _ in range(epochs):
        loop(wrapped, loader, **{name: value for name, value in arguments.items() if name in accepted})
    return optimizer


def split(
    loop: str,
    size: int = 16,
    steps: int = 4,
    *,
    at: str = "",
    task: PlaygroundTask | None = None,
    wrong: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,  # noqa: ANN401 (of `record`)
) -> Runs:
    """Run a loop with micro-batches (with extra settings `wrong`), and the correct loop over the unsplit batches."""
    task = task or load("digits")
    rows = _in_float64(task.rows)
    return Runs(
        at or f"{steps} micro-batches of {size}",
        record(task, loop_of(loop), MicroBatches(rows, size, seed=0), steps, **{**settings, **wrong}),
        record(task, loop_of("right"), MicroBatches(rows, size * steps, seed=0), 1, **settings),
    )


def summary(runs: Sequence[Runs], amount: Callable[[Runs], float] = gradient_error) -> dict[str, Any]:
    """Return the effect (`amount`) of the mistake in each setting, and the losses in the first setting."""
    losses = {"with": runs[0].wrong.losses, "without": runs[0].right.losses}
    return {
        "amounts": [{"at": each.at, "amount": amount(each)} for each in runs],
        "losses": {name: [float(f"{loss:.7g}") for loss in values] for name, values in losses.items()},
    }


def run(emit: Emit) -> Data:
    """Run each loop with a mistake, and the correct loop; return losses, errors, and the judge's output."""
    mistakes = measure_cases(emit, on_one_rank())
    emit_progress(emit, 0, 1, "two ranks")
    with RankPool(2) as pool:
        mistakes |= pool.run(on_two_ranks)[0]
    return {
        "mistakes": mistakes,
        "example": {"source": EXAMPLE, "output": judged(EXAMPLE)},
        "roles": dict(ROLES),
    }


def judged(source: str) -> str:
    """Return the output of `anybatch check --loop` for the function `train` of a file `train.py`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "anybatch", "check", "--loop", "train.py:train"]
        return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout  # noqa: S603 (ours)


def on_one_rank() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a measurement for each mistake."""
    digits, text, shapes = load("digits"), first_rows(load("text"), 10 * BATCH), load("shapes", norm="batch")
    pairs, short = _pairs_of_views(first_rows(digits, 22 * BATCH)), first_rows(digits, 3 * BATCH + 53)
    empty = _with_empty_micro_batch(text, 4, 32)
    tail = "{} of 64 samples in the last step"
    return {
        "undivided": lambda: summary([split("no_division"), split("no_division", 32, 2)]),
        "ragged": lambda: summary(
            [split("mean_of_means", task=task, at=tail.format(len(task.rows) % BATCH)) for task in (digits, short)]
        ),
        "masked": lambda: summary(
            [split("mean_of_means", size, BATCH // size, task=text, rate=3 * RATE) for size in (4, 1)]
        ),
        "empty": lambda: summary(
            [
                split("mean_of_means", 4, 16, at=at, task=empty, rate=3 * RATE, criterion=criterion)
                for at, criterion in (("a mean of your own", masked_mean), ("F.cross_entropy", cross_entropy))
            ],
            lambda runs: relative(runs.wrong.gradients[2], runs.right.gradients[2]),
        ),
        "zero_each": lambda: summary([split("zero_each"), split("zero_each", 32, 2)]),
        "zero_missing": lambda: summary([split("right", at="step 2", wrong={"clears": False})]),
        "clip_each": lambda: summary(
            [split("clip_each", at=f"a maximum norm of {norm}", max_norm=norm) for norm in (0.1, 0.5)]
        ),
        "schedule_each": lambda: summary(
            [split("schedule_each", at=f"step {step}", gamma=GAMMA) for step in (10, 5)],
            lambda runs: 1 - runs.wrong.rates[int(runs.at[5:]) - 1] / runs.right.rates[int(runs.at[5:]) - 1],
        ),
        "drop_tail": lambda: summary(
            [split("drop_tail"), split("drop_tail", 16, 16)],
            lambda runs: 1 - runs.wrong.num_samples / runs.right.num_samples,
        ),
        "batch_norm": lambda: summary([split("right", size, BATCH // size, task=shapes) for size in (16, 4)]),
        "contrastive": lambda: summary(
            [
                split("mean_of_means", size, BATCH // size, task=pairs, rate=0.3 * RATE, criterion=contrastive)
                for size in (16, 4)
            ]
        ),
        "rate": lambda: summary(
            [split("right", at=f"a batch {n} times as large", wrong={"rate": RATE / n}) for n in (4, 16)],
            lambda runs: runs.wrong.losses[-1] / runs.right.losses[-1],
        ),
    }


def _in_float64(rows: LabelledSamples) -> LabelledSamples:
    return LabelledSamples(rows.inputs.double() if rows.inputs.is_floating_point() else rows.inputs, rows.targets)


def first_rows(task: PlaygroundTask, number: int) -> PlaygroundTask:
    """Return a task with the first samples only."""
    return replace(task, rows=LabelledSamples(task.rows.inputs[:number], task.rows.targets[:number]))


def _with_empty_micro_batch(task: PlaygroundTask, size: int, at: int) -> PlaygroundTask:
    """Return a task that ignores all targets of one micro-batch."""
    numbers, targets = torch.arange(len(task.rows)), task.rows.targets.clone()
    targets[list(MicroBatches(LabelledSamples(numbers, numbers), size, seed=0))[at][0]] = IGNORED
    return replace(task, rows=LabelledSamples(task.rows.inputs, targets))


def _pairs_of_views(task: PlaygroundTask) -> PlaygroundTask:
    inputs = task.rows.inputs
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    views = torch.stack([inputs, inputs + VIEW_NOISE * noise], dim=1)
    rows = LabelledSamples(views, task.rows.targets)
    return replace(task, rows=rows, model=lambda: nn.Sequential(nn.Flatten(0, 1), Network()))


def contrastive(outputs: Tensor, _targets: Tensor) -> Tensor:
    """Return the loss that compares each first view with the second views of all samples."""
    first, second = F.normalize(outputs, dim=1).unflatten(0, (-1, 2)).unbind(1)
    return F.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(first)))


def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over targets that are not ignored, as usually written: NaN if all targets are ignored."""
    mask = targets != IGNORED
    losses = F.cross_entropy(logits.flatten(0, -2), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def on_two_ranks() -> dict[str, dict[str, Any]]:
    """Return the mistakes of loops with DDP. Runs on every rank."""
    rank, rows = dist.get_rank(), _in_float64(load("digits").rows)
    full = list(MicroBatches(rows, BATCH, seed=0))[:-1]

    def shared(module: ModuleType, shares: Sequence[int], steps: int, *, at: str = "", number: int = len(full)) -> Runs:
        sizes = [shares[rank] // steps] * steps
        pieces = [piece for batch in full[:number] for piece in cut(cut(batch, shares)[rank], sizes)]
        return on_ranks(module, pieces, full[:number], steps, at or f"{steps} micro-batches per rank")

    def sampled(number: int) -> Runs:
        samples = LabelledSamples(rows.inputs[:number], rows.targets[:number])

        def batches(size: int, replicas: int) -> list[Pair]:
            sampler: DistributedSampler[Any] = DistributedSampler(
                samples, num_replicas=replicas, rank=rank % replicas, seed=0
            )
            return [(samples.inputs[ids], samples.targets[ids]) for ids in torch.tensor(list(sampler)).split(size)]

        return on_ranks(
            no_sync_backward, batches(16, 2), batches(BATCH, 1), 2, f"{number % BATCH} samples in the last step"
        )

    def bytes_sent(runs: Runs) -> float:
        return runs.wrong.sent / shared(with_ranks, EVEN, int(runs.at.split()[0]), number=len(full)).wrong.sent

    right = shared(with_ranks, EVEN, 2, number=1)
    uneven = [
        shared(no_sync_backward, shares, 2, at=f"shares of {shares[0]} and {shares[1]}")
        for shares in (UNEVEN, (36, 28))
    ]
    return {
        "shares": summary(uneven),
        "sampler": summary([sampled(number) for number in (len(rows), BATCH + 3)]),
        "no_sync_always": summary([shared(no_sync_always, EVEN, 2)]),
        "no_sync_backward": summary([shared(no_sync_backward, EVEN, steps) for steps in (2, 4)], bytes_sent),
        "right": summary([right]),
    }


def on_ranks(module: ModuleType, pieces: list[Pair], batches: list[Pair], steps: int, at: str) -> Runs:
    """Run an epoch of a loop with DDP, and of the correct loop over unsplit batches; losses are means over ranks."""
    sent: list[int] = []
    watched = WatchedDDP(lambda _, size, event: sent.extend([size] * (event == "begin")))
    digits = load("digits")
    wrong = record(digits, module.train, pieces, steps, epochs=1, wrap=watched)
    losses = torch.tensor(wrong.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    wrong.losses, wrong.sent = (losses / dist.get_world_size()).tolist(), sum(sent)
    return Runs(at, wrong, record(digits, loop_of("right"), batches, 1, epochs=1))


EXPERIMENT = Experiment(
    name="wrong_losses",
    question="What does each mistake of a loop do to the loss and to the gradient of a step?",
    run=run,
    seconds=90,
    runs_here=False,
    tolerance=1e-6,
    noisy=("right",),
)
