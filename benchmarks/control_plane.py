"""Control messages of a step on 2 to 64 ranks, and their time: by a ring, and in log2 N rounds.

Gloo's own gather uses a ring; the control plane uses the rounds of core/collectives.py. Both alternate in one run.
Table 1, ranks on this machine: messages of the control group in a step, for a loss that counts samples and for a loss
whose counts need the data; seconds of a gather, and of a step of a tiny model. All ranks share the cores, so these
seconds are processor time, in proportion to the messages of all ranks. Table 2, hosts (network namespaces) with 5 ms
between them: seconds of both, and the formulas of core/collectives.py. Table 3: these formulas for up to 1,000 ranks,
each with a core.

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
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from all_reduce_against_ddp import InMemory, loss
from several_hosts import environment
from torch import nn

import anybatch as ab
from anybatch.core.collectives import Link, bruck_all_gather, gather_rounds, ring_all_gather
from anybatch.parallel.control import ControlGroup
from anybatch.parallel.world import World
from anybatch.planner.forecast import control_bytes, control_seconds
from anybatch.planner.forecast_report import CONTROL_LATENCY_SECONDS
from anybatch.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError, hosts

NUM_STEPS, NUM_TIMES = 16, 40
WARM_UP = 3
NUM_COUNTS, NUM_PARAMETERS = 4, 4
LEAD_SECONDS = 0.06  # longer than it takes to reach all ranks
SIZES = (32, 160, 1000)
FAST = 1e12
NUM_RANKS = 1000
TIMEOUT_SECONDS = 300


def rows_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the samples of a batch, as a count that needs the data."""
    return torch.tensor(float(len(batch["x"])))


class RingMessage:
    """A gather around gloo's ring, in place of `anybatch.parallel.control.Message`."""

    def __init__(self, group: ControlGroup, row: bytes) -> None:
        self._rows = [bytearray(len(row)) for _ in range(dist.get_world_size())]
        tensors = [torch.frombuffer(row, dtype=torch.uint8) for row in self._rows]
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        self._work: Any = dist.all_gather(tensors, own, group=group._resources.group, async_op=True)  # noqa: SLF001
        self.wait, self.is_completed = self._work.wait, self._work.is_completed

    @property
    def rows(self) -> list[bytes]:
        """The rows of all ranks."""
        return list(map(bytes, self._rows))


WAYS: dict[str, Any] = {"ring": RingMessage, "rounds": ControlGroup.start}


def wait_for_same_moment() -> None:
    """Wait, so that all ranks (which share a clock) return at the same moment."""
    moment = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
    dist.broadcast(moment, 0)
    time.sleep(max(0.0, moment.item() - time.monotonic()))


def alternated(act: Callable[[], object], num_times: int) -> dict[str, list[float]]:
    """Time both ways alternately, each one first equally often; all ranks begin together."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(num_times + WARM_UP):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            way_to_start = WAYS[way]
            ControlGroup.start = lambda group, row, start=way_to_start: start(group, row)  # type: ignore[method-assign, misc]
            wait_for_same_moment()
            found[way].append(timed(act))
    ControlGroup.start = WAYS["rounds"]  # type: ignore[method-assign]
    return {way: seconds[WARM_UP:] for way, seconds in found.items()}


def slowest_seconds(world: World, found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each measurement."""
    return {way: [max(column) for column in zip(*world.gather_numbers(found[way]), strict=True)] for way in found}


def messages(world: World, num_bytes: int, num_times: int) -> dict[str, list[float]]:
    """Time gathers of rows of this many bytes, on the slowest rank."""
    return slowest_seconds(world, alternated(lambda: world.gather_numbers([0.0] * (num_bytes // 8)), num_times))


def tiny_step(world: World, *, counts_need_data: bool) -> Callable[[], object]:
    """Return a function that runs a step of a tiny model, with one sample per rank."""
    made = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 10))
    declared = ab.mean_over(loss, rows_of) if counts_need_data else ab.mean_over_samples(loss)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    engine = ab.Engine(made, optimizer, declared, micro_batch_size=1, strategy="all_reduce", world=world)
    batch = InMemory({"x": torch.randn(world.size, 16), "y": torch.randint(0, 10, (world.size,))})
    return lambda: engine.step(batch)


def measure_rank(*, counts_need_data: bool) -> dict[str, Any]:
    """Run on every rank: return the messages of a step, and seconds of a gather and a step, of both ways."""
    torch.set_num_threads(1)
    with World.from_environment() as world:
        step = tiny_step(world, counts_need_data=counts_need_data)
        steps = slowest_seconds(world, alternated(step, NUM_STEPS))
        seen: list[int] = []
        start = WAYS["rounds"]
        ControlGroup.start = lambda group, row: seen.append(len(row)) or start(group, row)  # type: ignore[method-assign, func-returns-value]
        step()
        ControlGroup.start = start  # type: ignore[method-assign]
        return {"seen": seen, "step": steps, "gather": messages(world, seen[-1], NUM_TIMES)}


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
    columns = [f"{what}, {way}" for what in ("gather", "step") for way in WAYS]
    lines = [
        f"| ranks | counts need data | messages of a rank's step | bytes | of all ranks | {' | '.join(columns)} |",
        f"|--:|---|---|--:|--:|{'--:|' * len(columns)}",
    ]
    for num_ranks in sizes:
        for needs in (False, True):
            with RankPool(num_ranks, timeout_seconds=TIMEOUT_SECONDS) as pool:
                found = pool.run(_with_counts if needs else _without_counts)[0]
            num_messages = num_ranks * len(gather_rounds(0, num_ranks)) * (2 if needs else 1)
            lines.append(
                f"| {num_ranks} | {'yes' if needs else 'no'} | {len(found['seen'])} | "
                f"{sum(found['seen'])} | {num_messages} | {both(found['gather'])} | "
                f"{both(found['step'])} |"
            )
            print(lines[-1], flush=True)
    return lines


def _with_counts() -> object:
    return measure_rank(counts_need_data=True)


def _without_counts() -> object:
    return measure_rank(counts_need_data=False)


def on_a_host(out: Path) -> None:
    """Run on every host: write the slowest rank's seconds of messages of several sizes."""
    torch.set_num_threads(1)
    with World.from_environment(device="cpu") as world:
        found: dict[Any, Any] = {size: messages(world, size, NUM_STEPS) for size in SIZES}
        for needs in (False, True):
            name = "step, counts need data" if needs else "step"
            found[name] = slowest_seconds(world, alternated(tiny_step(world, counts_need_data=needs), NUM_STEPS))
        if world.rank == 0:
            out.write_text(json.dumps(found))
        world.gather_numbers([0.0])


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
    """Return the table of hosts with a latency between them."""
    lines = [
        "| hosts | message | ring | rounds | ring, forecast | rounds, forecast | error | latencies |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    link = Link(latency, FAST)
    for num_hosts in numbers:
        found = from_hosts(num_hosts, latency)
        for size in map(str, SIZES):
            median = statistics.median(found[size]["rounds"])
            ring = ring_all_gather(int(size) * num_hosts, num_hosts, link)
            rounds = bruck_all_gather(int(size) * num_hosts, num_hosts, link)
            lines.append(
                f"| {num_hosts} | {size} bytes | {both(found[size])} | {1000 * ring:.0f} | {1000 * rounds:.0f} | "
                f"{rounds / median - 1:+.0%} | {median / max(latency, 1e-6):.1f} |"
            )
            print(lines[-1], flush=True)
        for name in ("step", "step, counts need data"):
            lines.append(f"| {num_hosts} | {name} | {both(found[name])} | | | | |")
            print(lines[-1], flush=True)
    return lines


def predicted_table() -> list[str]:
    """Return the table of predictions for many ranks."""
    link = Link(CONTROL_LATENCY_SECONDS, 1.25e9)
    lines = [
        "| ranks | parameters | at the end of a step | counts | both, of 200 ms | first around a ring |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in (64, 256, NUM_RANKS, 10 * NUM_RANKS):
        for num_parameters in (100, 500):
            sizes = control_bytes(num_parameters, counts_need_data=True)
            counted, agreed = (control_seconds(size, num_ranks, link) for size in sizes)
            ring = ring_all_gather(sizes[1] * num_ranks, num_ranks, link)
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
        "Milliseconds, medians with quartiles; ring: as gloo gathers; rounds: as the control plane does.",
        "Ranks on this machine, which share its cores; messages of all ranks by rounds:",
        "",
        *on_this_machine(given.ranks),
        "",
        f"Hosts with {1000 * given.latency:g} ms between them, forecast with the latency as configured:",
        "",
        *on_hosts(given.hosts, given.latency),
        "",
        f"The model, {1e6 * CONTROL_LATENCY_SECONDS:g} us from rank to rank:",
        "",
        *predicted_table(),
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
