"""Forecasts against steps measured on hosts with several link rates and latencies, and against published tables.

Two hosts, and in some settings three, which are network namespaces of this machine (`tests/hosts.py`; root, iproute2),
run the same engine with one rank each, under `all_reduce`. Steps of a single rank alternate with steps of all, in the
same processes, so that other programs slow both equally. The forecast uses the single rank's times, the gradient's
bytes and the link: as configured, and with the measured latency of a message and its answer. It uses the formula for
gloo's all-reduce in segments around a ring (`gloo_all_reduce` of core/collectives.py).

    python benchmarks/forecast_error.py [--rounds 7] [--out benchmarks/results/NAME.md]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import report
import torch
from all_reduce_against_ddp import InMemory, loss
from published_scaling import published_lines
from several_hosts import environment, round_trip
from torch import nn

import anybatch as ab
from anybatch.core.collectives import Link
from anybatch.core.geometry import SecondsFit
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.world import World
from anybatch.planner.forecast import forecast
from anybatch.planner.forecast_report import Cluster, Workload

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError, hosts

RATES = (100, 250, 1000)  # Mbit/s
LATENCIES = (0.001, 0.005, 0.020)
STEPS = (1, 4)
SIZE, WIDTH, LAYERS, BUCKET_BYTES = 192, 512, 8, 2 * 2**20
WARM_UP_ROUNDS = 2
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Measured:
    """Medians of one setting, and the spread of the single rank's steps."""

    alone: dict[int, float]
    together: dict[int, float]
    variation: float
    gradient_bytes: int
    num_parameters: int


def model() -> nn.Module:
    """Return 8 layers of one width, so that gradients arrive at a constant rate: 8.4 MB in buckets of two layers."""
    layers: list[nn.Module] = [nn.Linear(16, WIDTH)]
    for _ in range(LAYERS):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 10))


def engine(world: World) -> ab.Engine:
    """Return an engine for one rank, or for all."""
    torch.manual_seed(0)
    made = model()
    return ab.Engine(
        made,
        torch.optim.SGD(made.parameters(), lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=SIZE,
        strategy=AllReduce(bucket_bytes=BUCKET_BYTES) if world.size > 1 else "single",
        world=world,
        measure_gradient_norm=False,
    )


def batch(num_samples: int) -> InMemory:
    """Return a batch of random samples."""
    torch.manual_seed(1)
    return InMemory({"x": torch.randn(num_samples, 16), "y": torch.randint(0, 10, (num_samples,))})


def measure(rounds: int, out: Path) -> None:
    """Run on every rank: alternate single steps and steps of all ranks, and write the seconds of both."""
    torch.set_num_threads(1)
    with World.from_environment() as world:
        both, single = engine(world), engine(World())
        alone: dict[int, list[float]] = {steps: [] for steps in STEPS}
        together: dict[int, list[float]] = {steps: [] for steps in STEPS}
        for number in range(rounds + WARM_UP_ROUNDS):
            for steps in STEPS:
                for made, share, into in ((single, 1, alone), (both, world.size, together)):
                    given = batch(share * steps * SIZE)
                    # All ranks begin together, otherwise the wait for a late rank would be counted twice.
                    world.gather_numbers([0.0])
                    begun = time.perf_counter()
                    made.step(given)
                    taken = time.perf_counter() - begun
                    if number >= WARM_UP_ROUNDS:
                        into[steps].append(taken)
        parameters = list(model().parameters())
        found = {
            "alone": alone,
            "together": together,
            "gradient_bytes": sum(4 * one.numel() for one in parameters),
            "num_parameters": len(parameters),
        }
        everyone = world.gather_objects(json.dumps(found))
        if world.is_first:
            out.write_text(json.dumps([json.loads(one) for one in everyone]))


def measured(num_hosts: int, rate: int, latency: float, rounds: int) -> Measured:
    """Run one setting on hosts, and return its medians."""
    with tempfile.TemporaryDirectory() as folder, hosts(num_hosts, rate=f"{rate}mbit", latency=latency) as made:
        out = Path(folder, "found.json")
        common = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": str(len(made))}
        command = [sys.executable, __file__, "--rounds", str(rounds), "--rank-writes", str(out)]
        ranks = [
            host.start(command, env=environment(**common, RANK=str(rank)), out=subprocess.DEVNULL)
            for rank, host in enumerate(made)
        ]
        for one in ranks:
            if one.wait(TIMEOUT_SECONDS):
                message = f"a rank ended with status {one.returncode}"
                raise RuntimeError(message)
        by_rank = json.loads(out.read_text())
    # A step ends with the slower rank; for single steps, each rank's median is used, averaged over ranks.
    together = {
        steps: statistics.median(map(max, zip(*(one["together"][str(steps)] for one in by_rank), strict=True)))
        for steps in STEPS
    }
    alone = {steps: statistics.fmean(statistics.median(one["alone"][str(steps)]) for one in by_rank) for steps in STEPS}
    quartiles = [statistics.quantiles(one["alone"][str(STEPS[-1])], n=4) for one in by_rank]
    # The interquartile range of a normal distribution is 1.35 standard deviations.
    variation = statistics.fmean((high - low) / 1.35 / middle for low, middle, high in quartiles)
    return Measured(alone, together, variation, by_rank[0]["gradient_bytes"], by_rank[0]["num_parameters"])


def forecast_seconds(found: Measured, num_ranks: int, steps: int, link: Link) -> float:
    """Return the forecast of a step."""
    more, fewer = STEPS[-1], STEPS[0]
    one = (found.alone[more] - found.alone[fewer]) / (more - fewer)
    workload = Workload(
        micro_batch=SecondsFit(0.0, one / SIZE),
        micro_batch_size=SIZE,
        gradient_bytes=found.gradient_bytes,
        accumulation_steps=steps,
        update_seconds=max(0.0, found.alone[fewer] - fewer * one),
        bucket_bytes=BUCKET_BYTES,
        variation=found.variation,
        num_parameters=found.num_parameters,
    )
    return (
        forecast(workload, Cluster(link=link, algorithm="gloo", control_link=link), world_size=num_ranks)
        .rows[-1]
        .step_seconds
    )


def main() -> None:
    """Run all settings, and print both tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-writes", type=Path, help="of a rank that this program has started")
    given = parser.parse_args()
    if given.rank_writes is not None:
        measure(given.rounds, given.rank_writes)
        return
    lines = [
        "| hosts | Mbit/s | latency | seen | steps | one rank | all | forecast | error | with seen | error |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    errors: dict[str, list[float]] = {"configured": [], "seen": []}
    for latency in LATENCIES:
        seen = round_trip(latency=latency) / 2000
        for num_hosts, rate in [*((2, rate) for rate in RATES), (3, RATES[1])]:
            found = measured(num_hosts, rate, latency, given.rounds)
            for steps in STEPS:
                real = found.together[steps]
                said = [forecast_seconds(found, num_hosts, steps, Link(one, rate * 1e6 / 8)) for one in (latency, seen)]
                off = [one / real - 1 for one in said]
                errors["configured"].append(abs(off[0]))
                errors["seen"].append(abs(off[1]))
                lines.append(
                    f"| {num_hosts} | {rate} | {1000 * latency:g} ms | {1000 * seen:.2f} ms | {steps} | "
                    f"{1000 * found.alone[steps]:.0f} ms | {1000 * real:.0f} ms | {1000 * said[0]:.0f} ms | "
                    f"{off[0]:+.1%} | {1000 * said[1]:.0f} ms | {off[1]:+.1%} |"
                )
                print(lines[-1], flush=True)
    for name, values in errors.items():
        lines += [
            "",
            f"Error with the latency {name}: median {statistics.median(values):.1%}, worst {max(values):.1%}, ",
        ]
        lines[-1] += f"{len(values)} settings."
    report.publish(
        [*lines, "", *published_lines()],
        title="Forecasts against measured steps and published tables",
        command=f"python benchmarks/forecast_error.py --rounds {given.rounds}",
        setting=f"{os.cpu_count()} cores that others used too, network namespaces, 1 thread per rank, gloo",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
