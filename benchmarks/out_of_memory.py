"""Out of memory at every allocation of a step: is the result the run planned with the smaller size?

A small model with convolution, BatchNorm, dropout and an extra buffer, AdamW, three steps. In the second step the
k-th allocation fails, for every k up to the clipping; of two ranks, it fails on the second one. "exact" counts the runs
whose parameters and buffers equal those of the run planned with that size, bit for bit and on every rank.

For comparison: a plain loop that repeats only the failed micro-batch and keeps the gradients, and the state after a
failure inside the optimizer's step.

    python benchmarks/out_of_memory.py [--out benchmarks/results/NAME.md]
"""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import report
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the model and the runs come from the tests

import anybatch as ab
from anybatch.testing import RankPool, out_of_memory_at
from tests.engine.out_of_memory_cases import LARGE, End, Fault, Run, same, train

HALF, QUARTER = {"micro_batch_size": LARGE // 2}, {"micro_batch_size": LARGE // 4}
RUNS: Mapping[str, tuple[int, Run, int]] = {
    "1 rank": (1, Run(num_samples=2 * LARGE), 1),
    "1 rank, twice in the step": (1, Run(num_samples=2 * LARGE), 2),
    "1 rank, rng=None": (1, Run(num_samples=2 * LARGE, options={"rng": None}), 1),
    "1 rank, rng='per_sample'": (1, Run(num_samples=2 * LARGE, options={"rng": "per_sample"}), 1),
    "1 rank, norms='exact'": (1, Run(num_samples=2 * LARGE, options={"norms": "exact"}), 1),
    "1 rank, across samples": (1, Run(num_samples=2 * LARGE, loss="joint"), 1),
    "2 ranks, all_reduce": (2, Run(strategy="all_reduce", num_samples=2 * LARGE), 1),
    "2 ranks, all_reduce, twice": (2, Run(strategy="all_reduce", num_samples=2 * LARGE), 2),
    "2 ranks, all_reduce, Ghost(2)": (
        2,
        Run(strategy="all_reduce", num_samples=2 * LARGE, options={"norms": "ghost"}),
        1,
    ),
    "2 ranks, all_reduce, across samples": (2, Run(strategy="all_reduce", num_samples=2 * LARGE, loss="joint"), 1),
    "2 ranks, ddp, before its reduction": (2, Run(strategy="ddp", num_samples=2 * LARGE), 1),
}


def planned(run: Run, times: int) -> Run:
    """Return the run that starts with the micro-batch size with which `run` ends."""
    sizes = HALF if times == 1 else QUARTER
    return Run(strategy=run.strategy, loss=run.loss, num_samples=run.num_samples, sizes=sizes, options=run.options)


def every_point(run: Run, times: int) -> list[tuple[str, bool]]:
    """Run on every rank: fail at each point on the last rank; return (phase, exact on this rank) for each."""
    world = ab.World.from_environment(device="cpu")
    gc.freeze()
    torch.set_num_threads(1)
    expected = train(planned(run, times))
    whole = train(run)
    last = world.gather_objects(last_point(run, whole))[-1]
    found = []
    for at in range(1 if times == 1 else 2, last + 1):
        end = train(
            run, Fault(at=tuple(at if rank == world.size - 1 else 0 for rank in range(world.size)), times=times)
        )
        phases = world.gather_objects(phase_of(end))
        if len(end.too_large) == times:  # otherwise the second attempt has fewer allocations
            found.append((phases[-1], same(end.weights, expected.weights)))
    return found


def last_point(run: Run, whole: End) -> int:
    """Return the last allocation to fail: the last of all, or the one before DDP's reduction is prepared."""
    if run.strategy != "ddp":
        return whole.num_allocations
    return whole.num_allocations // 2  # the first of two micro-batches


def phase_of(end: End) -> str:
    """Return the phase of the first failure."""
    return end.events[0][0] if end.events else ""


def small() -> nn.Module:
    """Return a small network of convolutions for the plain loop."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)).double()


def naive() -> list[str]:
    """Return rows about a plain loop that repeats only the failed micro-batch, in halves."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 10, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (16,), generator=generator)

    def backward(model: nn.Module, start: int, stop: int) -> None:
        (functional.cross_entropy(model(x[start:stop]), y[start:stop], reduction="sum") / 16).backward()

    def gradient(at: int) -> tuple[list[torch.Tensor], str, int]:
        model = small()
        backward(model, 0, 8)
        with out_of_memory_at(at) as fault:
            try:
                backward(model, 8, 16)
            except torch.OutOfMemoryError:
                backward(model, 8, 12)
                backward(model, 12, 16)
        phase = fault.failed[0][1] if fault.failed else ""
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], phase, fault.num_allocations

    exact, _, number = gradient(0)
    points, wrong = Counter[str](), Counter[str]()
    for at in range(1, number + 1):
        found, phase, _ = gradient(at)
        points[phase] += 1
        error = max(float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
        wrong[phase] += error > 1e-9
    return [
        f"| plain loop, only the failed micro-batch again | {p} | {points[p]} | {points[p] - wrong[p]} |"
        for p in points
    ]


def half_updated() -> str:
    """Return a row about failures inside AdamW's step."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    number = changed = 0
    while True:
        number += 1
        other_model = copy.deepcopy(model)
        other = torch.optim.AdamW(other_model.parameters(), lr=1e-2, foreach=True)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for parameter in other_model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with out_of_memory_at(number, phase="update"):
            try:
                other.step()
            except torch.OutOfMemoryError:
                weights = zip(model.parameters(), other_model.parameters(), strict=True)
                states = zip(optimizer.state.values(), other.state.values(), strict=True)
                changed += any(not torch.equal(a, b) for a, b in weights) or any(
                    not torch.equal(one[key], two[key]) for one, two in states for key in one
                )
            else:
                return f"| AdamW's step, tried again by nobody | update | {number - 1} | {number - 1 - changed} |"


def rows() -> list[str]:
    """Run everything and return the table's rows."""
    table = ["| run | phase of the failure | points | exact |", "|---|---|--:|--:|"]
    for size in (1, 2):
        with RankPool(size) as pool:
            for name, (world_size, run, times) in RUNS.items():
                if world_size != size:
                    continue
                ranks = pool.run(every_point, run, times)
                points, exact = Counter[str](), Counter[str]()
                for outcomes in zip(*ranks, strict=True):
                    points[outcomes[0][0]] += 1
                    exact[outcomes[0][0]] += all(is_exact for _, is_exact in outcomes)
                table += [f"| {name} | {phase} | {points[phase]} | {exact[phase]} |" for phase in sorted(points)]
                print(table[-1], flush=True)
    return [*table, *naive(), half_updated()]


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    torch.set_num_threads(1)
    report.publish(
        rows(),
        title="Out of memory at every allocation of a step",
        command="python benchmarks/out_of_memory.py",
        setting="float64, 1 thread per rank; the last rank fails",
        out=out,
    )


if __name__ == "__main__":
    main()
