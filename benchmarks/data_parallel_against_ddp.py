"""Two replicas in threads of one process (`data_parallel`) and two ranks (`ddp`, `all_reduce`) against one replica.

Steps alternate within one run, on the same models and data, with one thread of torch's per replica: in each round rank
0 runs one replica alone, then two in threads, while rank 1 waits; then both ranks run half of the samples each. Figures
are medians over rounds of the ratio to one replica in the same round, with quartiles, and of rank 0's seconds.

    python benchmarks/data_parallel_against_ddp.py [--out benchmarks/results/NAME.md]
"""

import os
import statistics
import time
from collections.abc import Callable

import report
import torch
import torch.distributed as dist
from all_reduce_against_ddp import WARM_UP_ROUNDS, InMemory, loss, many_small
from torch import nn

import anybatch as ab
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.data_parallel import DataParallel
from anybatch.parallel.ddp import DDP
from anybatch.parallel.single import Single
from anybatch.parallel.torch_internals import replica_of
from anybatch.testing import RankPool

NUM_MICRO_BATCHES = 2
Seconds = dict[str, list[float]]


def few_large() -> nn.Module:
    """Return a model of 4 layers of width 1,024: 8 parameter tensors, 8 MB of gradients."""
    layers = [layer for _ in range(2) for layer in (nn.ReLU(), nn.Linear(1024, 1024))]
    return nn.Sequential(nn.Linear(16, 1024), *layers, nn.ReLU(), nn.Linear(1024, 10))


MODELS = {"200 layers of width 64": (many_small, 32), "4 layers of width 1024": (few_large, 256)}


def by_engine(model: nn.Module, size: int, strategy: object, world: ab.World) -> Callable[[InMemory], object]:
    """Return the engine's step under a strategy."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = ab.Engine(
        model,
        sgd,
        ab.mean_over_samples(loss),
        micro_batch_size=size,
        strategy=strategy,
        world=world,
        measure_gradient_norm=False,
    )
    return engine.step


def compare(name: str, rounds: int) -> tuple[Seconds, float]:
    """Run on every rank: return the seconds of each kind of step, and of making one replica."""
    torch.set_num_threads(1)
    make, size = MODELS[name]
    world, alone = ab.World.from_environment(), ab.World()
    on_rank_0 = {
        "one replica": by_engine(make(), size, Single(), alone),
        "data_parallel, 2 replicas": by_engine(make(), size, DataParallel(replicas=2), alone),
    }
    on_both = {
        "ddp, 2 ranks": by_engine(make(), size // 2, DDP(), world),
        "all_reduce, 2 ranks": by_engine(make(), size // 2, AllReduce(), world),
    }
    num_samples = size * NUM_MICRO_BATCHES
    batch = InMemory({"x": torch.randn(num_samples, 16), "y": torch.randint(0, 10, (num_samples,))})
    seconds: Seconds = {kind: [] for kind in (*on_rank_0, *on_both)}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        for kind, step in {**on_rank_0, **on_both}.items():
            dist.barrier()
            begin = time.perf_counter()
            if kind in on_both or world.rank == 0:
                step(batch)
            if round_number >= WARM_UP_ROUNDS:
                seconds[kind].append(time.perf_counter() - begin)
    return seconds, replicating(make(), rounds)


def replicating(model: nn.Module, rounds: int) -> float:
    """Return the median seconds of creating a replica."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        replica_of(model, {id(own): nn.Parameter(own.detach().clone()) for own in model.parameters()})
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main() -> None:
    """Measure, print the table and write it."""
    options = report.parser(__doc__)
    options.add_argument("--rounds", type=int, default=40)
    chosen = options.parse_args()
    load = os.getloadavg()[0]  # other programs slow two replicas more than one
    lines = ["| model | step | median, ms | over one replica | quartiles |", "|---|---|---|---|---|"]
    made = []
    with RankPool(2, timeout_seconds=600.0) as pool:
        for name in MODELS:
            outcome = pool.outcomes(compare, name, chosen.rounds)[0]
            assert not outcome.error, outcome.error
            seconds, one_replica = outcome.value
            made.append(f"{name}: {1e3 * one_replica:.2f} ms")
            for kind, own in seconds.items():
                ratios = [mine / one for mine, one in zip(own, seconds["one replica"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                lines.append(
                    f"| {name} | {kind} | {1e3 * statistics.median(own):.1f} | {middle:.2f} | {low:.2f} to {high:.2f} |"
                )
    lines += ["", f"To make one replica, in every call: {'; '.join(made)}."]
    report.publish(
        lines,
        title="Replicas in threads of one process against ranks",
        command="python benchmarks/data_parallel_against_ddp.py",
        setting=(
            f"one thread of torch's per replica, {chosen.rounds} rounds of {NUM_MICRO_BATCHES} micro-batches, load "
            f"average {load:.1f} on {os.cpu_count()} cores before the run"
        ),
        out=chosen.out,
    )


if __name__ == "__main__":
    main()
