"""Shared parts of the measurements of claims: gradients in one row, steps by hand, times that can be compared."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

import anybatch as ab
from anybatch.diagnostics.memory.memory_report import record_memory
from anybatch_guide.experiment import Tell
from anybatch_guide.mistakes.windows import items
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy

Pair = tuple[Tensor, Tensor]


def progress(tell: Tell, done: int, of: int, what: str) -> None:
    """Tell how far a measurement is; may raise, to end it."""
    tell({"kind": "guide.progress", "done": done, "of": of, "what": what})


def fresh(task: PlaygroundTask, seed: int = 0) -> nn.Module:
    """Return a new network of a task; the same one for the same seed, and the process's random numbers stay."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return task.model()


def rows_of(task: PlaygroundTask, num_samples: int, seed: int = 0) -> Pair:
    """Return the first effective batch of an epoch."""
    return next(iter(MicroBatches(task.rows, num_samples, seed)))


def cut(pair: Pair, sizes: Sequence[int]) -> list[Pair]:
    """Return a batch as micro-batches of these sizes."""
    inputs, targets = pair
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def weighed(model: nn.Module, parts: Sequence[Pair], weights: Sequence[float]) -> Float[Tensor, " number"]:
    """Return the sum of the gradients of the parts' mean losses, each times its weight, in one row."""
    model.zero_grad()
    for (inputs, targets), weight in zip(parts, weights, strict=True):
        (cross_entropy(model(inputs), targets) * weight).backward()
    return row_of_gradients(model)


def row_of_gradients(model: nn.Module) -> Float[Tensor, " number"]:
    """Return the gradients of all parameters in one row; zeros where there is none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in found]).double()


def by_items(parts: Sequence[Pair]) -> list[float]:
    """Return each part's share of all items: the weights that are right."""
    counts = [items(targets) for _, targets in parts]
    return [count / sum(counts) for count in counts]


def by_parts(parts: Sequence[Pair]) -> list[float]:
    """Return one over N for each part: the weights that are usual."""
    return [1 / len(parts)] * len(parts)


def relative(found: Float[Tensor, " number"], expected: Float[Tensor, " number"]) -> float:
    """Return |found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True)
class BatchCut:
    """How one optimizer step is cut: so many micro-batches of one size."""

    size: int
    number: int


def step_seconds(
    task: PlaygroundTask, cuts: Sequence[BatchCut], tell: Tell, *, rounds: int
) -> dict[BatchCut, list[float]]:
    """Return the processor's time of one optimizer step by each cut, of each round; rounds are interleaved.

    Processor time on one thread, so that another process on the machine takes less part in it.
    """
    steps = {one: _stepper(task, one) for one in cuts}
    # Once without a clock: the first step makes the optimizer's state.
    for step in steps.values():
        step()
    found: dict[BatchCut, list[float]] = {one: [] for one in cuts}
    for number in range(rounds):
        progress(tell, number, rounds, "round of times")
        for one, step in steps.items():
            begun = time.process_time()
            step()
            found[one].append(time.process_time() - begun)
    return found


def median_ratio(times: Mapping[BatchCut, Sequence[float]], one: BatchCut, other: BatchCut) -> float:
    """Return the median, over rounds, of the time by one cut as a multiple of that by another."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def _stepper(task: PlaygroundTask, one: BatchCut) -> Callable[[], None]:
    """Return a function that makes one step on a batch, in plain PyTorch."""
    model = fresh(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = cut(rows_of(task, one.size * one.number), [one.size] * one.number)

    def step() -> None:
        optimizer.zero_grad()
        for inputs, targets in parts:
            (cross_entropy(model(inputs), targets) / len(parts)).backward()
        optimizer.step()

    return step


def step_memory(
    task: PlaygroundTask, *, micro_batch_size: int, effective_batch_size: int
) -> Mapping[str, Mapping[str, int]]:
    """Return what the engine's second step holds, by category: at its peak, and at the highest moment of a forward."""
    model = fresh(task)
    engine = ab.Engine(model, torch.optim.AdamW(model.parameters()), task.loss, micro_batch_size=micro_batch_size)
    data = ab.batches(task.rows, effective_batch_size=effective_batch_size, steps=2)
    first, second = data
    with engine:
        # The first step makes the optimizer's state and checks the loss; the second one is like all later ones.
        engine.step(first)
        with record_memory(engine) as recording:
            engine.step(second)
    course = recording.report.timeline
    totals = cast("list[int]", course.totals.tolist())
    forward = max((at for at, phase in enumerate(course.phases) if phase == "forward"), key=totals.__getitem__)
    return {"peak": course.at(course.peak_moment), "forward": course.at(forward)}


def is_rising(values: Sequence[float], factor: float) -> bool:
    """Whether each value is at least `factor` times the one before."""
    return all(later >= factor * earlier for earlier, later in pairwise(values))
