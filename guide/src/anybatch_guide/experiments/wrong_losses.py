"""The error of a step for each mistake of a loop, compared with the full batch in one pass."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from anybatch.diagnostics.loop_check.check_loop import check_loop
from anybatch.testing import RankPool
from anybatch_guide.claims.devices import EVEN, UNEVEN
from anybatch_guide.claims.measuring import Pair, cut, first_batch, flat_gradients, measure_cases, new_model, relative
from anybatch_guide.exercises import no_sync_always, no_sync_backward, with_ranks
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.experiments.ddp_timeline import WatchedDDP
from anybatch_guide.mistakes.mistake import MISTAKES, loop_of, wrong_lines
from anybatch_guide.mistakes.windows import windows
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy, load

FULL, RAGGED, SENTENCES = [16] * 4, [16, 16, 16, 5], [4] * 16
MAX_NORM, RATE, GAMMA, WINDOWS = 0.1, 0.1, 0.9, 10
VIEW_NOISE, TEMPERATURE = 0.1, 0.1
Loop = Callable[..., None]


def run(emit: Emit) -> Data:
    """Run every loop with a mistake, and the correct loop over the unsplit batch; return the errors."""
    digits = load("digits")
    cases: dict[str, Callable[[], float]] = {
        "no_division": partial(gradient_error, "no_division", digits, FULL),
        "ragged_tail": partial(gradient_error, "mean_of_means", digits, RAGGED),
        "masked_tokens": partial(gradient_error, "mean_of_means", load("text"), SENTENCES),
        "zero_each": partial(gradient_error, "zero_each", digits, FULL),
        "zero_missing": zero_missing_error,
        "clip_each": partial(gradient_error, "clip_each", digits, FULL, max_norm=MAX_NORM),
        "schedule_each": rate_error,
        "drop_tail": dropped_fraction,
        "batch_norm": partial(gradient_error, "right", load("shapes", norm="batch"), FULL),
        "contrastive": contrastive_error,
        "sampler": sampler_error,
    }
    errors = measure_cases(emit, cases)
    emit_progress(emit, 0, 1, "two ranks")
    with RankPool(2) as pool:
        on_ranks = pool.run(on_two_ranks)[0]
    return {
        "errors": {**errors, **on_ranks["errors"]},
        "sent_bytes": on_ranks["sent_bytes"],
        "loops": list(checked_loops()),
    }


@dataclass(eq=False)
class _RecordingOptimizer(torch.optim.SGD):
    """An optimizer that records gradients and rates in each step, without updates."""

    model: nn.Module
    gradients: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.model.parameters(), lr=RATE)

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401, ARG002 (as torch has it)
        """Record gradients and rates without changing parameters."""
        self.gradients.append(flat_gradients(self.model))
        self.rates.append(float(self.param_groups[0]["lr"]))


def _run(
    name: str,
    model: nn.Module,
    loader: Iterable[Pair],
    accumulation_steps: int,
    *,
    max_norm: float = math.inf,
    gamma: float = 1.0,
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> _RecordingOptimizer:
    optimizer = _RecordingOptimizer(model)
    scheduler: LRScheduler = ExponentialLR(optimizer, gamma)
    loop_of(name)(
        model,
        loader,
        optimizer=optimizer,
        scheduler=scheduler,
        criterion=criterion,
        accumulation_steps=accumulation_steps,
        max_norm=max_norm,
    )
    return optimizer


def gradient_error(name: str, task: PlaygroundTask, sizes: list[int], *, max_norm: float = math.inf) -> float:
    """Return the gradient error of a loop, compared with the correct loop over the unsplit samples."""
    model, batch = new_model(task).double(), _in_float64(first_batch(task, sum(sizes)))
    split = _run(name, model, cut(batch, sizes), len(sizes), max_norm=max_norm)
    unsplit = _run("right", model, [batch], 1, max_norm=max_norm)
    return relative(split.gradients[0], unsplit.gradients[0])


def _in_float64(pair: Pair) -> Pair:
    inputs, targets = pair
    return (inputs.double() if inputs.is_floating_point() else inputs), targets


def zero_missing_error() -> float:
    """Return the gradient error of the second step if the first gradient is not cleared."""
    task = load("digits")
    model = new_model(task).double()
    first, second = [_in_float64(pair) for pair in cut(first_batch(task, 128), [64, 64])]
    expected = _run("right", model, [second], 1).gradients[0]
    model.zero_grad()
    for inputs, targets in (first, second):
        cross_entropy(model(inputs), targets).backward()
    return relative(flat_gradients(model), expected)


def rate_error() -> float:
    """Return the relative error of the learning rate after `WINDOWS` steps with a wrong schedule."""
    task = load("digits")
    pieces = cut(first_batch(task, 16 * 4 * WINDOWS), [16] * 4 * WINDOWS)
    wrong, right = (
        _run(name, new_model(task), pieces, 4, gamma=GAMMA).rates[-1] for name in ("schedule_each", "right")
    )
    return abs(wrong - right) / right


def dropped_fraction() -> float:
    """Return the fraction of an epoch's samples that no step uses."""
    task, seen = load("digits"), []

    def counting(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(targets))
        return cross_entropy(logits, targets)

    loader = list(MicroBatches(task.rows, 16, seed=0))
    steps = len(_run("drop_tail", new_model(task), loader, 4, criterion=counting).rates)
    stepped = sum(len(targets) for window in list(windows(loader, 4))[:steps] for _, targets in window)
    return 1 - stepped / len(task.rows)


def contrastive_error() -> float:
    """Return the relative error of the mean of micro-batch gradients for a contrastive loss."""
    task = load("digits")
    model, (inputs, _) = new_model(task).double(), _in_float64(first_batch(task, sum(FULL)))
    noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype)
    views = inputs, inputs + VIEW_NOISE * noise

    def add_gradient(first: Tensor, second: Tensor, weight: float) -> None:
        left, right = (F.normalize(model(view), dim=1) for view in (first, second))
        (F.cross_entropy(left @ right.T / TEMPERATURE, torch.arange(len(first))) * weight).backward()

    gradients = []
    for sizes in (FULL, [sum(FULL)]):
        model.zero_grad()
        for first, second in zip(views[0].split(sizes), views[1].split(sizes), strict=True):
            add_gradient(first, second, 1 / len(sizes))
        gradients.append(flat_gradients(model))
    return relative(*gradients)


def sampler_error() -> float:
    """Return the error of an epoch's last step on two ranks, whose sampler repeats the first sample."""
    task = load("digits")
    order: list[int] = list(torch.utils.data.DistributedSampler(task.rows, num_replicas=1, rank=0, seed=0))
    last = order[len(order) // 64 * 64 :]
    model = new_model(task).double()
    gradients = []
    for ids in ([*last, *order[: len(last) % 2]], last):
        # Equal sample counts, so that the mean over ranks is the mean over all samples.
        inputs, targets = _in_float64((task.rows.inputs[ids], task.rows.targets[ids]))
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        gradients.append(flat_gradients(model))
    return relative(*gradients)


def on_two_ranks() -> dict[str, dict[str, float]]:
    """Return gradient errors, and the bytes that a step reduces. Runs on every rank."""
    errors, sent = {}, {}
    for name, loop, shares in (
        ("unequal_shares", no_sync_backward, UNEVEN),
        ("no_sync_always", no_sync_always, EVEN),
        ("no_sync_backward", no_sync_backward, EVEN),
        ("right", with_ranks, EVEN),
    ):
        task = load("digits")
        model, batch = new_model(task).double(), _in_float64(first_batch(task, sum(shares)))
        expected = _run("right", model, [batch], 1).gradients[0]
        begin = sum(shares[: dist.get_rank()])
        share = [part[begin : begin + shares[dist.get_rank()]] for part in batch]
        gradient, sent[name] = _on_ranks(loop, model, cut((share[0], share[1]), [len(share[0]) // 2] * 2))
        errors[name] = relative(gradient, expected)
    return {"errors": errors, "sent_bytes": sent}


def _on_ranks(module: ModuleType, model: nn.Module, pieces: list[Pair]) -> tuple[Tensor, float]:
    """Return the gradient of the first step of a loop with DDP, and the bytes that the step reduces."""
    sent: list[int] = []
    model.zero_grad()
    wrapper: DistributedDataParallel = WatchedDDP(lambda _, size, event: sent.extend([size] * (event == "begin")))(
        model
    )
    optimizer = _RecordingOptimizer(model)
    module.train(wrapper, pieces, optimizer=optimizer, criterion=cross_entropy, accumulation_steps=len(pieces))
    return optimizer.gradients[0], float(sum(sent))


def checked_loops() -> Iterable[dict[str, Any]]:
    """Yield the wrong lines of each loop, and the findings of `anybatch check --loop`."""
    for name in MISTAKES:
        yield _described(name, loop_of(name), wrong_lines(name), f"mistakes/{name}")
    for module, wrong in ((with_ranks, "optimizer.step()"), (no_sync_backward, "no_sync"), (no_sync_always, "no_sync")):
        lines = inspect.getsource(module.train).splitlines()
        numbers = [number for number, line in enumerate(lines, start=1) if wrong in line]
        name = module.__name__.rpartition(".")[2]
        yield _described(name, module.train, numbers, f"exercises/{name}")


def _described(name: str, loop: Loop, wrong: list[int], path: str) -> dict[str, Any]:
    lines = inspect.getsource(loop).splitlines()
    return {
        "name": name,
        "lines": [lines[number - 1].strip() for number in wrong],
        "findings": [
            {"code": finding.code, "found": finding.found, "expected": finding.expected}
            for finding in check_loop(loop).findings
        ],
        "command": f"anybatch check --loop guide/src/anybatch_guide/{path}.py:train",
    }


EXPERIMENT = Experiment(
    name="wrong_losses",
    question="How large is the error of a step for each mistake of a loop?",
    run=run,
    seconds=40,
    runs_here=False,
    tolerance=1e-6,
    noisy=("right", "no_sync_backward"),
)
