"""Control messages of a step on 2 to 64 ranks, and their time: around a ring, and in rounds.

Gloo's own sum and gather go around a ring, as the control plane once did; its rounds are the messages of
core/collectives.py. Both alternate in one run. Three tables. Of ranks on this machine: the control group's messages
in a step, with a loss that counts samples and with one whose counts need the data; seconds of a sum, of a gather and of
a step of a tiny model. All ranks share the cores, so these seconds are processor time, in proportion to
all ranks' messages. Of hosts that are network namespaces with 5 ms between them: seconds of both, against the formulas
of core/collectives.py. And the model at 1,000 ranks, each with one core.

    python benchmarks/control_plane.py [--ranks 2 8 32 64] [--hosts 4 8 16] [--out benchmarks/results/NAME.md]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from all_reduce_against_ddp import InMemory, loss
from several_hosts import environment
from torch import nn

import anybatch as ab
from anybatch.core.collectives import Link, bruck_all_gather, doubling_all_reduce, gloo_all_reduce, sum_rounds
from anybatch.parallel.control import ControlGroup, PendingMessage, _sum
from anybatch.parallel.world import World
from anybatch.planner.forecast import ControlMessages
from anybatch.planner.forecast_report import CONTROL_LATENCY_SECONDS
from anybatch.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError, hosts

NUM_STEPS, NUM_TIMES = 16, 40
WARM_UP = 3
NUM_COUNTS, NUM_PARAMETERS = 4, 4
LEAD_SECONDS = 0.06  # longer than it takes to reach all ranks
NUM_ROUNDS, FREE_TAG = 32, 2**30
SIZES = (20, 114, 1000)
FAST = 1e12
NUM_RANKS = 1000
TIMEOUT_SECONDS = 300


def rows_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the samples of a batch, as a count that needs the data."""
    return torch.tensor(float(len(batch["x"])))


def sum_around(group: ControlGroup, numbers: torch.Tensor) -> PendingMessage:
    """Sum like `ControlGroup.start_sum`, around gloo's ring."""
    work: Any = dist.all_reduce(numbers, group=group._resources.group, async_op=True)  # noqa: SLF001 (as the group does)
    return PendingMessage(work, group._resources)  # noqa: SLF001


def gather_around(group: ControlGroup, mine: bytes) -> list[bytearray]:
    """Gather like `ControlGroup.gather`, around gloo's ring."""
    rows = [bytearray(len(mine)) for _ in range(dist.get_world_size())]
    tensors = [torch.frombuffer(row, dtype=torch.uint8) for row in rows]
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    work: Any = dist.all_gather(tensors, own, group=group._resources.group, async_op=True)  # noqa: SLF001 (as the group does)
    PendingMessage(work, group._resources).wait()  # noqa: SLF001
    return rows


WAYS: dict[str, tuple[Any, Any]] = {
    "ring": (sum_around, gather_around),
    "rounds": (ControlGroup.start_sum, ControlGroup.gather),
}


def together() -> None:
    """Return at the same moment on all ranks, which share a clock."""
    moment = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, moment.item() - time.monotonic()))


def in_turns(act: Callable[[], object], num_times: int) -> dict[str, list[float]]:
    """Time both ways interleaved, each first equally often; all ranks begin together."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(num_times + WARM_UP):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            ControlGroup.start_sum, ControlGroup.gather = WAYS[way]  # type: ignore[method-assign]
            together()
            found[way].append(timed(act))
    ControlGroup.start_sum, ControlGroup.gather = WAYS["rounds"]  # type: ignore[method-assign]
    return {way: seconds[WARM_UP:] for way, seconds in found.items()}


def of_slowest(world: World, found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each time."""
    return {way: [max(column) for column in zip(*world.gather_numbers(found[way]), strict=True)] for way in found}


def messages(world: World, num_numbers: int, num_times: int) -> dict[str, dict[str, list[float]]]:
    """Time sums of this many values and gathers of the same size, on the slowest rank."""

    def sums() -> None:
        pending = world.start_sum(torch.zeros(num_numbers, dtype=torch.float64))
        assert pending is not None
        pending.wait()

    return {
        "sum": of_slowest(world, in_turns(sums, num_times)),
        "gather": of_slowest(world, in_turns(lambda: world.gather_numbers([0.0] * NUM_COUNTS), num_times)),
    }


def tiny_step(world: World, *, counts_need_data: bool) -> Callable[[], object]:
    """Return a function that runs a step of a tiny model, with one sample per rank."""
    made = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 10))
    declared = ab.mean_over(loss, rows_of) if counts_need_data else ab.mean_over_samples(loss)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    engine = ab.Engine(made, optimizer, declared, micro_batch_size=1, strategy="all_reduce", world=world)
    batch = InMemory({"x": torch.randn(world.size, 16), "y": torch.randint(0, 10, (world.size,))})
    return lambda: engine.step(batch)


def of_a_rank(*, counts_need_data: bool) -> dict[str, Any]:
    """Run on every rank: return messages of a step, and seconds of a sum, a gather and a step, of both ways."""
    torch.set_num_threads(1)
    with World.from_environment() as world:
        step = tiny_step(world, counts_need_data=counts_need_data)
        steps = of_slowest(world, in_turns(step, NUM_STEPS))
        seen: list[tuple[str, int]] = []
        start_sum, gather = WAYS["rounds"]
        ControlGroup.start_sum = lambda group, numbers: (
            seen.append(("sum", numbers.nbytes)) or start_sum(group, numbers)
        )  # type: ignore[method-assign, func-returns-value]
        ControlGroup.gather = lambda group, mine: seen.append(("gather", len(mine))) or gather(group, mine)  # type: ignore[method-assign, func-returns-value]
        step()
        ControlGroup.start_sum, ControlGroup.gather = WAYS["rounds"]  # type: ignore[method-assign]
        size = next(num_bytes for kind, num_bytes in seen if kind == "sum")
        return {
            "seen": seen,
            "step": steps,
            **messages(world, size // 8, NUM_TIMES),
        }


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def both(found: dict[str, list[float]]) -> str:
    """Return two cells: the median of each way, with quartiles in milliseconds."""
    cells = []
    for way in WAYS:
        lower, median, upper = (1000 * one for one in statistics.quantiles(found[way]))
        cells.append(f"{median:.3g} ({lower:.3g} to {upper:.3g})")
    return " | ".join(cells)


def on_this_machine(sizes: list[int]) -> list[str]:
    """Return the table of ranks on this machine."""
    columns = [f"{what}, {way}" for what in ("sum", "gather", "step") for way in WAYS]
    lines = [
        f"| ranks | counts need data | messages of a rank's step | bytes | of all ranks | {' | '.join(columns)} |",
        f"|--:|---|---|--:|--:|{'--:|' * len(columns)}",
    ]
    for num_ranks in sizes:
        for needs in (False, True):
            with RankPool(num_ranks, timeout_seconds=TIMEOUT_SECONDS) as pool:
                found = pool.run(_with_counts if needs else _without_counts)[0]
            control = ControlMessages.of(NUM_PARAMETERS, counts_need_data=needs)
            lines.append(
                f"| {num_ranks} | {'yes' if needs else 'no'} | {', '.join(kind for kind, _ in found['seen'])} | "
                f"{sum(size for _, size in found['seen'])} | {control.messages(num_ranks)} | {both(found['sum'])} | "
                f"{both(found['gather'])} | {both(found['step'])} |"
            )
            print(lines[-1], flush=True)
    return lines


def _with_counts() -> object:
    return of_a_rank(counts_need_data=True)


def _without_counts() -> object:
    return of_a_rank(counts_need_data=False)


def on_a_host(out: Path) -> None:
    """Run on every host: write the slowest rank's seconds of messages of several sizes."""
    torch.set_num_threads(1)
    with World.from_environment(device="cpu") as world:
        found: dict[Any, Any] = {size: messages(world, size, NUM_STEPS) for size in SIZES}
        for needs in (False, True):
            name = "step, counts need data" if needs else "step"
            found[name] = of_slowest(world, in_turns(tiny_step(world, counts_need_data=needs), NUM_STEPS))
        if world.size == 2:
            found["round"] = a_round(world)
        if world.rank == 0:
            out.write_text(json.dumps(found))
        world.gather_numbers([0.0])


def a_round(world: World) -> list[float]:
    """Return the seconds of one round in a series: its processor and network time."""
    group = world._control._resources.group  # type: ignore[union-attr]  # noqa: SLF001
    rounds, numbers = sum_rounds(world.rank, 2) * NUM_ROUNDS, torch.zeros(SIZES[1])
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    found = []
    for number in range(NUM_TIMES):
        together()
        found.append(timed(lambda tag=number: _sum(group, rounds, numbers, FREE_TAG + tag, limit)) / NUM_ROUNDS)  # type: ignore[misc]
    return found[WARM_UP:]


def of_a_round() -> list[str]:
    """Return the seconds of a round between two hosts without delay."""
    seconds = from_hosts(2, 0.0)["round"]
    lower, median, upper = (1e6 * one for one in statistics.quantiles(seconds))
    said = "A round between two hosts without latency, in a row of many, on two cores"
    return [f"{said}: {median:.0f} us ({lower:.0f} to {upper:.0f})."]


def from_hosts(num_hosts: int, latency: float) -> dict[str, Any]:
    """Run on this many hosts, and return the output of the first."""
    with tempfile.TemporaryDirectory() as folder, hosts(num_hosts, latency=latency) as made:
        out = Path(folder, "found.json")
        common = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": str(num_hosts), "LOCAL_RANK": "0"}
        command = [sys.executable, __file__, "--rank-writes", str(out)]
        ranks = [
            host.start(command, env=environment(**common, RANK=str(rank)), out=subprocess.DEVNULL)
            for rank, host in enumerate(made)
        ]
        for one in ranks:
            one.wait(TIMEOUT_SECONDS)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def on_hosts(numbers: list[int], latency: float) -> list[str]:
    """Return the table of hosts that are far from each other."""
    lines = [
        "| hosts | message | ring | rounds | ring, forecast | rounds, forecast | error | latencies |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    link = Link(latency, FAST)
    for num_hosts in numbers:
        found = from_hosts(num_hosts, latency)
        for size in map(str, SIZES):
            by_kind = found[size]
            rows = {f"sum of {size}": by_kind["sum"]}
            said = {f"sum of {size}": (gloo_all_reduce(8 * int(size), num_hosts, link, item_bytes=8),)}
            said[f"sum of {size}"] += (doubling_all_reduce(8 * int(size), num_hosts, link),)
            if size == str(SIZES[0]):
                rows[f"gather of {NUM_COUNTS}"] = by_kind["gather"]
                said[f"gather of {NUM_COUNTS}"] = (
                    2 * (num_hosts - 1) * latency,
                    bruck_all_gather(8 * NUM_COUNTS * num_hosts, num_hosts, link),
                )
            for name, seconds in rows.items():
                median = statistics.median(seconds["rounds"])
                ring, rounds = said[name]
                lines.append(
                    f"| {num_hosts} | {name} | {both(seconds)} | {1000 * ring:.0f} | {1000 * rounds:.0f} | "
                    f"{rounds / median - 1:+.0%} | {median / max(latency, 1e-6):.1f} |"
                )
                print(lines[-1], flush=True)
        for name in ("step", "step, counts need data"):
            lines.append(f"| {num_hosts} | {name} | {both(found[name])} | | | | |")
            print(lines[-1], flush=True)
    return lines


def of_the_model() -> list[str]:
    """Return the model's prediction for many ranks."""
    link = Link(CONTROL_LATENCY_SECONDS, 1.25e9)
    lines = [
        "| ranks | parameters | sum at the end of a step | gather of counts | both, of 200 ms | sum around a ring |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in (64, 256, NUM_RANKS, 10 * NUM_RANKS):
        for num_parameters in (100, 500):
            control = ControlMessages.of(num_parameters, counts_need_data=True)
            agreed, counted = control.agreement_seconds(num_ranks, link), control.count_seconds(num_ranks, link)
            ring = gloo_all_reduce(control.agreement_bytes, num_ranks, link, item_bytes=8)
            lines.append(
                f"| {num_ranks:,} | {num_parameters} | {1000 * agreed:.2f} ms | {1000 * counted:.2f} ms | "
                f"{(agreed + counted) / 0.2:.2%} | {1000 * ring:.1f} ms |"
            )
    return lines


def main() -> None:
    """Print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 8, 32, 64])
    parser.add_argument("--hosts", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--latency", type=float, default=0.005, help="seconds between hosts")
    parser.add_argument("--rank-writes", type=Path, help="of a rank that this program has started")
    given = parser.parse_args()
    if given.rank_writes is not None:
        on_a_host(given.rank_writes)
        return
    lines = [
        "Milliseconds, medians with quartiles; ring: as gloo sums and gathers; rounds: as the control plane does.",
        "Ranks on this machine, which share its cores; messages of all ranks by rounds:",
        "",
        *on_this_machine(given.ranks),
        "",
        f"Hosts with {1000 * given.latency:g} ms between them, forecast with the latency as configured:",
        "",
        *on_hosts(given.hosts, given.latency),
        "",
        *of_a_round(),
        "",
        f"The model, {1e6 * CONTROL_LATENCY_SECONDS:g} us from rank to rank:",
        "",
        *of_the_model(),
    ]
    report.publish(
        lines,
        title="The control plane: messages, bytes and time of a step, around a ring and in rounds",
        command=f"python benchmarks/control_plane.py --ranks {' '.join(map(str, given.ranks))}",
        setting=f"{os.cpu_count()} cores, 1 thread per rank, gloo",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
