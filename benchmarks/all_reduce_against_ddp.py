"""The engine's own all-reduce against torch's DistributedDataParallel on two ranks.

Four steps alternate within one run, on the same model and data: a bare DDP loop written by hand (no_sync until the last
micro-batch), the same without the search for unused parameters, the engine with `DDP`, and the engine with `AllReduce`.
Figures are medians over steps of the slower rank's seconds.

    python benchmarks/all_reduce_against_ddp.py [--out benchmarks/results/NAME.md]
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import report
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import anybatch as ab
from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP
from anybatch.testing import RankPool

WARM_UP_ROUNDS = 3
Batch = dict[str, torch.Tensor]


def many_small() -> nn.Module:
    """Return a model of 200 layers of width 64: 400 parameter tensors, 3.3 MB of gradients."""
    layers: list[nn.Module] = [nn.Linear(16, 64)]
    for _ in range(198):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def few_large() -> nn.Module:
    """Return a model of 5 layers of width 1,600: 10 parameter tensors, 31 MB of gradients."""
    layers: list[nn.Module] = [nn.Linear(16, 1600)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(1600, 1600)]
    return nn.Sequential(*layers, nn.Linear(1600, 10))


MODELS = {"many small": many_small, "few large": few_large}


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the cheapest optimizer."""
    return torch.optim.SGD(parameters, lr=1e-3)


class InMemory:
    """An effective batch whose samples are in memory, so that loading costs nothing."""

    seed = 0
    end = Position()

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.sample_ids = range(len(batch["x"]))

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield the batch's slices."""
        del later_units
        for positions in units:
            yield {name: value[list(positions)] for name, value in self.batch.items()}


def bare_ddp(
    model: nn.Module,
    micro_batch_size: int,
    *,
    find_unused_parameters: bool,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> Callable[[InMemory], object]:
    """Return a step of torch's DDP as a hand-written loop."""
    wrapper = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    optimizer = make_optimizer(model.parameters())

    def step(whole: InMemory) -> None:
        num_samples = len(whole.sample_ids) // dist.get_world_size()
        own = dist.get_rank() * num_samples
        batch = {name: value[own : own + num_samples] for name, value in whole.batch.items()}
        for start in range(0, num_samples, micro_batch_size):
            piece = {name: value[start : start + micro_batch_size] for name, value in batch.items()}
            last = start + micro_batch_size >= num_samples
            with nullcontext() if last else wrapper.no_sync():
                value = loss(wrapper, piece) * (len(piece["x"]) / num_samples)
                value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def by_engine(model: nn.Module, micro_batch_size: int, strategy: object) -> Callable[[InMemory], object]:
    """Return the engine's step under a strategy."""
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        measure_gradient_norm=False,
    )
    return engine.step


def compare(model: str, num_micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Run on every rank: return the seconds of each kind of step."""
    size = 4
    make = MODELS[model]
    steps = {
        "bare ddp, unused searched": bare_ddp(make(), size, find_unused_parameters=True),
        "bare ddp": bare_ddp(make(), size, find_unused_parameters=False),
        "engine, ddp": by_engine(make(), size, DDP()),
        "engine, all_reduce": by_engine(make(), size, AllReduce()),
        "engine, all_reduce after": by_engine(make(), size, AllReduce(overlap=False)),
    }
    num_samples = size * num_micro_batches * dist.get_world_size()
    batch = InMemory({"x": torch.randn(num_samples, 16), "y": torch.randint(0, 10, (num_samples,))})
    return alternated(steps, batch, rounds)


def alternated(
    steps: Mapping[str, Callable[[InMemory], object]], batch: InMemory, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each kind of step on this rank; each kind runs once per round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        # Each kind runs first equally often: a step after a longer one finds other caches and clock rates.
        for name, step in list(steps.items())[:: -1 if round_number % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            step(batch)
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    lines = ["| model | accumulation steps | step | median, ms | over bare ddp | over bare ddp that searches |"]
    lines.append("|---|--:|---|--:|--:|--:|")
    with RankPool(2) as pool:
        for model in MODELS:
            for num_micro_batches in (1, 4):
                ranks = pool.run(compare, model, num_micro_batches, arguments.rounds)
                slower = {n: [max(pair) for pair in zip(*(rank[n] for rank in ranks), strict=True)] for n in ranks[0]}
                medians = {name: statistics.median(values) * 1e3 for name, values in slower.items()}
                for name, value in medians.items():
                    over = [f"{value / medians[other]:.3f}" for other in ("bare ddp", "bare ddp, unused searched")]
                    lines.append(f"| {model} | {num_micro_batches} | {name} | {value:.2f} | {' | '.join(over)} |")
    report.publish(
        lines,
        title="all_reduce against DDP",
        command="python benchmarks/all_reduce_against_ddp.py",
        setting="2 ranks over gloo, 1 thread each, medians of alternating steps, the slower rank",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
