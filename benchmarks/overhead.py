"""The overhead of the engine over the best hand-written loop.

Two models (tiny, about 10 million parameters), 1 to 64 accumulation steps. The hand-written loop divides each loss by
the known count, zeroes gradients to None and steps the optimizer; a second one also measures and clips the gradient
norm, as `clip=` does. Loops alternate step by step within one run, so that a noisy machine disturbs both equally. Times
are medians, and the ratio is the median of the ratios of neighbouring steps.

    python benchmarks/overhead.py [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import report
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab

WARM_UP_ROUNDS = 3
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], object]


def tiny() -> nn.Module:
    """Return a model that computes almost nothing."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))


def mid() -> nn.Module:
    """Return a model of about 10 million parameters in 26 tensors."""
    layers: list[nn.Module] = [nn.Linear(16, 912)]
    for _ in range(12):
        layers += [nn.GELU(), nn.Linear(912, 912)]
    return nn.Sequential(*layers[:-1], nn.Linear(912, 10))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def by_hand(model: nn.Module, micro_batch_size: int, *, clip: float | None) -> Step:
    """Return the leanest exact accumulation step written by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())

    def step(batch: Batch) -> torch.Tensor:
        x, y = batch["x"], batch["y"]
        total = torch.zeros(())
        for start in range(0, len(x), micro_batch_size):
            piece = {"x": x[start : start + micro_batch_size], "y": y[start : start + micro_batch_size]}
            value = loss(model, piece) * (len(piece["x"]) / len(x))
            value.backward()
            total += value.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def by_engine(model: nn.Module, micro_batch_size: int, *, clip: float | None) -> Step:
    """Return the engine's step; without clipping it does not measure the norm, like the hand-written loop."""
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        clip=clip,
        measure_gradient_norm=clip is not None,
    )
    return engine.step


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of two loops for the same steps: medians in seconds, and the median of the rounds' ratios."""

    by_hand: float
    by_engine: float
    ratio: float


def measure(by_hand_step: Step, by_engine_step: Step, batch: Batch, rounds: int) -> Measured:
    """Run both loops alternately, changing which goes first."""
    pair = (by_hand_step, by_engine_step)
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + WARM_UP_ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            begin = time.perf_counter()
            pair[which](batch)
            if number >= WARM_UP_ROUNDS:
                seconds[which].append(time.perf_counter() - begin)
    hand, engine = seconds
    ratio = statistics.median(other / one for one, other in zip(hand, engine, strict=True))
    return Measured(statistics.median(hand), statistics.median(engine), ratio)


def rows() -> list[str]:
    """Run everything and return the table's rows."""
    table = [
        "| model | steps | clip | by hand, ms | engine, ms | ratio | extra us per step | per micro-batch |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for name, make, micro_batch_size, seconds in (("tiny", tiny, 4, 4), ("mid", mid, 4, 24)):
        for num_micro_batches in (1, 4, 16, 64):
            size = micro_batch_size * num_micro_batches
            batch = {"x": torch.randn(size, 16), "y": torch.randint(0, 10, (size,))}
            for clip in (None, 1.0):
                hand = by_hand(make(), micro_batch_size, clip=clip)
                engine = by_engine(make(), micro_batch_size, clip=clip)
                once = measure(hand, engine, batch, 2)
                found = measure(hand, engine, batch, max(9, int(seconds / (once.by_hand + once.by_engine))))
                extra = (found.by_engine - found.by_hand) * 1e6
                times = f"{found.by_hand * 1e3:.3f} | {found.by_engine * 1e3:.3f} | {found.ratio:.3f}"
                extras = f"{extra:.0f} | {extra / num_micro_batches:.1f}"
                table.append(f"| {name} | {num_micro_batches} | {clip or 'none'} | {times} | {extras} |")
    return table


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(1)
    report.publish(
        rows(),
        title="Overhead of the engine over a loop by hand",
        command="python benchmarks/overhead.py",
        setting="1 thread, medians over alternating steps",
        out=out,
    )


if __name__ == "__main__":
    main()
