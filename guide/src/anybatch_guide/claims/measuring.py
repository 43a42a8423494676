"""Shared parts of the measurements of claims: flat gradients, steps in plain PyTorch, interleaved timing."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

import anybatch as ab
from anybatch.diagnostics.memory_report import record_memory
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.mistakes.windows import items
from anybatch_guide.tasks.task import MicroBatches, PlaygroundTask, cross_entropy

Pair = tuple[Tensor, Tensor]
T = TypeVar("T")
Key = TypeVar("Key")


def new_model(task: PlaygroundTask, seed: int = 0) -> nn.Module:
    """Return a new network of a task, initialized from `seed`; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return task.model()


def first_batch(task: PlaygroundTask, num_samples: int, seed: int = 0) -> Pair:
    """Return the first effective batch of an epoch."""
    return next(iter(MicroBatches(task.rows, num_samples, seed)))


def cut(pair: Pair, sizes: Sequence[int]) -> list[Pair]:
    """Split a batch into micro-batches of the given sizes."""
    inputs, targets = pair
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def weighted_gradient(model: nn.Module, parts: Sequence[Pair], weights: Sequence[float]) -> Float[Tensor, " number"]:
    """Return the weighted sum of the gradients of the parts' mean losses, as one vector."""
    model.zero_grad()
    for (inputs, targets), weight in zip(parts, weights, strict=True):
        (cross_entropy(model(inputs), targets) * weight).backward()
    return flat_gradients(model)


def flat_gradients(model: nn.Module) -> Float[Tensor, " number"]:
    """Return the gradients of all parameters as one vector; zeros for a parameter without a gradient."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def weights_by_items(parts: Sequence[Pair]) -> list[float]:
    """Return each part's share of all items: the correct weights."""
    counts = [items(targets) for _, targets in parts]
    return [count / sum(counts) for count in counts]


def equal_weights(parts: Sequence[Pair]) -> list[float]:
    """Return 1 / N for each of N parts: the usual weights."""
    return [1 / len(parts)] * len(parts)


def relative(actual: Float[Tensor, " number"], expected: Float[Tensor, " number"]) -> float:
    """Return |actual - expected| / |expected|."""
    return float((actual - expected).norm() / expected.norm())


@dataclass(frozen=True, slots=True)
class BatchCut:
    """The split of one optimizer step: a number of equal micro-batches."""

    size: int
    number: int


def measure_cases(emit: Emit, cases: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Return the result of each case, and emit the progress."""
    results = {}
    for done, (name, measure) in enumerate(cases.items()):
        emit_progress(emit, done, len(cases), name)
        results[name] = measure()
    return results


def step_seconds(
    task: PlaygroundTask, cuts: Sequence[BatchCut], emit: Emit, *, rounds: int
) -> dict[BatchCut, list[float]]:
    """Return the CPU time of one optimizer step for each split and round; rounds are interleaved."""
    steps = {split: _stepper(task, split) for split in cuts}
    # Run each step once without timing, because the first step creates the optimizer state.
    for step in steps.values():
        step()
    seconds: dict[BatchCut, list[float]] = {split: [] for split in cuts}
    for number in range(rounds):
        emit_progress(emit, number, rounds, "round of times")
        time_round(steps, seconds)
    return seconds


def time_round(steps: Mapping[Key, Callable[[], object]], seconds: Mapping[Key, list[float]]) -> None:
    """Run each step once, and append its CPU time, which other processes affect less than wall time."""
    for key, step in steps.items():
        begin = time.process_time()
        step()
        seconds[key].append(time.process_time() - begin)


def median_ratio(times: Mapping[BatchCut, Sequence[float]], numerator: BatchCut, denominator: BatchCut) -> float:
    """Return the median ratio over rounds of the times of two splits."""
    return statistics.median(a / b for a, b in zip(times[numerator], times[denominator], strict=True))


def _stepper(task: PlaygroundTask, split: BatchCut) -> Callable[[], None]:
    """Return a function that makes one step on a batch, in plain PyTorch."""
    model = new_model(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = cut(first_batch(task, split.size * split.number), [split.size] * split.number)

    def step() -> None:
        optimizer.zero_grad()
        for inputs, targets in parts:
            (cross_entropy(model(inputs), targets) / len(parts)).backward()
        optimizer.step()

    return step


def step_memory(
    task: PlaygroundTask, *, micro_batch_size: int, effective_batch_size: int
) -> Mapping[str, Mapping[str, int]]:
    """Return the memory of the engine's third step by category: at its peak, and at the peak of a forward."""
    model = new_model(task)
    engine = ab.Engine(model, torch.optim.AdamW(model.parameters()), task.loss, micro_batch_size=micro_batch_size)
    data = ab.batches(task.rows, effective_batch_size=effective_batch_size, steps=3)
    first, second, third = data
    with engine:
        # The first step creates the optimizer state, and the first two steps check the loss.
        engine.step(first)
        engine.step(second)
        with record_memory(engine) as recording:
            engine.step(third)
    timeline = recording.report.timeline
    totals = cast("list[int]", timeline.totals.tolist())
    forward = max((at for at, phase in enumerate(timeline.phases) if phase == "forward"), key=totals.__getitem__)
    return {"peak": timeline.at(timeline.peak_moment), "forward": timeline.at(forward)}
