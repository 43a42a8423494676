"""Two ranks on samples of different lengths: how even their work is, and how long a step takes.

The data and the model of `variable_length.py`, log-normal lengths, two ranks (gloo). Three ways to split alternate:

- arrival order, micro-batches of 8 samples, equally many samples for each rank;
- a separate token budget for each rank's half: equally many samples, hardly any padding, uneven work;
- `ab.token_budget` unchanged, which balances the cost of ranks.

The spread is the slowest rank's cost over the mean of both, by the cost model, over 1,000 batches on 2, 8 and 64 ranks.
The last table is the time to find the split: the median of seven effective batches of each size.

    python benchmarks/length_balance.py [--rounds 0] [--out benchmarks/results/NAME.md]
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import report
import torch
import variable_length

import anybatch as ab
from anybatch.core import batch as cutting
from anybatch.core.splitting import BatchPlan, SplitOptions, Unit, plan_of
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.data import Padded
from anybatch.testing import RankPool

NUM_RANKS, ROUNDS, FIXED = 2, 24, 30.0
SIZE = 2 * variable_length.SIZE


def by_halves(lengths: SampleLengths, world_size: int, cut: SplitOptions, budget: TokenBudget) -> BatchPlan:
    """Give each rank an equal number of samples, in order, and split them into micro-batches by length."""
    total, order, shares, start = len(lengths.tokens), [], [], 0
    for rank in range(world_size):
        places = range(total * rank // world_size, total * (rank + 1) // world_size)
        own = replace(lengths, tokens=[lengths.tokens[place] for place in places])
        plan = plan_by_length(own, 1, cut, budget)
        share = []
        for unit in plan.units:
            order += [places[position] for position in plan.positions(unit)]
            share.append(Unit(sum(map(len, shares)) + len(share), start, start + unit.num_samples))
            start += unit.num_samples
        shares.append(tuple(share))
    return plan_of(total, tuple(shares), cut, tuple(order))


def spread(plan: Callable[..., BatchPlan], world_size: int) -> float:
    """Return the median of the slowest rank's cost over the mean."""
    draw, found = random.Random(0), []  # noqa: S311 (lengths)
    budget = ab.token_budget(variable_length.CAP, fixed_tokens=FIXED)
    for _ in range(max(20, 1_000 // world_size)):
        tokens = [min(512, max(2, variable_length.log_normal(draw))) for _ in range(64 * world_size)]
        made = plan(SampleLengths(tokens=tokens), world_size, SplitOptions(), budget)
        costs = [
            sum(
                FIXED + unit.num_samples * max(tokens[place] for place in made.positions(unit))
                for unit in share
                if unit.weight
            )
            for share in made.shares
        ]
        found.append(max(costs) / statistics.mean(costs))
    return statistics.median(found)


def seconds_of_cut(num_samples: int, num_ranks: int, *, packed: bool) -> float:
    """Return the median time of planning an effective batch of this many samples."""
    budget, draw, seconds = ab.token_budget(variable_length.CAP, fixed_tokens=FIXED), random.Random(0), []  # noqa: S311
    for _ in range(7):
        tokens = [min(512, max(2, variable_length.log_normal(draw))) for _ in range(num_samples)]
        begun = time.perf_counter()
        plan_by_length(SampleLengths(tokens=tokens, packed=packed), num_ranks, SplitOptions(), budget)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def seconds_of_steps(rounds: int) -> dict[str, list[float]]:
    """Run on every rank: return the seconds of each way's steps."""
    torch.set_num_threads(1)
    world = ab.World.from_environment()
    draw = random.Random(0)  # noqa: S311 (lengths)
    dataset = variable_length.Texts([min(512, max(2, variable_length.log_normal(draw))) for _ in range(6 * SIZE)])
    budget = ab.token_budget(variable_length.CAP, fixed_tokens=FIXED)
    ways = {
        "arrival order, 8 samples": (8, plan_by_length),
        "a budget, equally many samples": (budget, by_halves),
        "a budget, dealt by cost": (budget, plan_by_length),
    }
    steps = {}
    for name, (size, plan) in ways.items():
        model = variable_length.network()
        engine = ab.Engine(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            ab.mean_over_tokens(variable_length.loss, labels="labels"),
            micro_batch_size=size,
            world=world,
            measure_gradient_norm=False,
            check_loss=False,
        )
        data = ab.batches(
            dataset,
            effective_batch_size=SIZE,
            shuffle=False,
            epochs=1_000,
            lengths=dataset.lengths,
            collate=Padded(),
        )
        steps[name] = (engine, iter(data), plan)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            engine, batches, plan = steps[name]
            cutting.plan_by_length = plan  # called by the engine
            world.gather_numbers([0.0])  # both begin together
            begun = time.perf_counter()
            engine.step(next(batches))
            world.gather_numbers([0.0])
            if number:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Measure, and print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    lines, seconds = [], {}
    if given.rounds:
        with RankPool(NUM_RANKS, timeout_seconds=900) as pool:
            seconds = pool.run(seconds_of_steps, given.rounds)[0]
        lines += ["| cut | seconds a step | times dealt by cost | quartiles |", "|---|--:|--:|---|"]
    for name, own in seconds.items():
        best = seconds["a budget, dealt by cost"]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(own, best, strict=True)], n=4)
        lines.append(f"| {name} | {statistics.median(own):.3f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    lines += ["", "| slowest rank over the mean, on ranks | 2 | 8 | 64 |", "|---|--:|--:|--:|"]
    for name, plan in (("equally many samples", by_halves), ("dealt by cost", plan_by_length)):
        cells = " | ".join(f"{spread(plan, ranks):.3f}" for ranks in (2, 8, 64))
        lines.append(f"| {name} | {cells} |")
    lines += ["", "| finding the cut of samples | on 1 rank | on 8 ranks | packed, on 8 ranks |", "|--:|--:|--:|--:|"]
    for num_samples in (256, 1_024, 4_096, 16_384):
        times = [
            seconds_of_cut(num_samples, ranks, packed=packed) for ranks, packed in ((1, False), (8, False), (8, True))
        ]
        lines.append(f"| {num_samples:,} | " + " | ".join(f"{one * 1e3:.2g} ms" for one in times) + " |")
    report.publish(
        lines,
        title="Work of ranks on samples of different lengths",
        command="python benchmarks/length_balance.py",
        setting=f"{NUM_RANKS} ranks on 2 cores, gloo, effective batches of {SIZE}",
        out=given.out,
    )


if __name__ == "__main__":
    main()
