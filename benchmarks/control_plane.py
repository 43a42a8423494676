"""What the engine sends by itself in a step, on 2 to 64 ranks; and how the time of it grows, against the model.

Three tables. Of ranks on this machine: the control group's collectives in a step, counted, with a loss that counts
samples and with one whose counts need the data; and seconds of the message alone and of a step of a tiny model. All
ranks share the cores, so that what is measured there is processor time, in proportion to all ranks' messages. Of hosts
that are network namespaces with 5 ms between them: the time of the message, against `gloo_all_reduce` of
core/collective_times.py. And the model at 1,000 ranks, each on a core of its own.

    python benchmarks/control_plane.py [--ranks 2 8 32 64] [--out benchmarks/results/NAME.md]
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

import report
import torch
import torch.distributed as dist
from all_reduce_against_ddp import InMemory, loss
from several_hosts import environment
from torch import nn

import anybatch as ab
from anybatch.core.collective_times import Link, gloo_all_reduce
from anybatch.parallel.process_groups import ControlGroup
from anybatch.parallel.world import World
from anybatch.planner.forecast.control_plane import ControlMessages
from anybatch.planner.forecast.workload import CONTROL_LATENCY_SECONDS
from anybatch.testing import RankPool
from tests.hosts import NoHostsError, hosts

NUM_STEPS = 12
WARM_UP_STEPS = 3
HOSTS = (4, 8, 16)
LATENCY = 0.005
SIZES = (20, 114, 1000)
FAST = 1e12
NUM_RANKS = 1000
TIMEOUT_SECONDS = 300


def rows_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the samples of a batch, as a count that only the data tells."""
    return torch.tensor(float(len(batch["x"])))


def count_and_time(*, counts_need_data: bool) -> tuple[list[tuple[str, int]], float, float, int]:
    """Run on every rank: return collectives and bytes of a step, seconds of the message and of a step, parameters."""
    made = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 10))
    declared = ab.mean_over(loss, rows_of) if counts_need_data else ab.mean_over_samples(loss)
    with World.from_environment() as world:
        engine = ab.Engine(
            made,
            torch.optim.SGD(made.parameters(), lr=1e-3),
            declared,
            micro_batch_size=1,
            strategy="all_reduce",
            world=world,
        )
        batch = InMemory({"x": torch.randn(world.size, 16), "y": torch.randint(0, 10, (world.size,))})
        seen: list[tuple[str, int]] = []
        own_sum, own_gather = ControlGroup.start_sum, ControlGroup.gather

        def start_sum(group: ControlGroup, numbers: torch.Tensor) -> object:
            seen.append(("sum", numbers.numel() * numbers.itemsize))
            return own_sum(group, numbers)

        def gather(group: ControlGroup, rows: list[torch.Tensor], mine: torch.Tensor) -> None:
            seen.append(("gather", mine.numel() * mine.itemsize))
            own_gather(group, rows, mine)

        ControlGroup.start_sum, ControlGroup.gather = start_sum, gather  # type: ignore[method-assign, assignment]
        steps = [timed(lambda: engine.step(batch)) for _ in range(NUM_STEPS) if not seen.clear()]  # type: ignore[func-returns-value]
        last = list(seen)
        ControlGroup.start_sum, ControlGroup.gather = own_sum, own_gather  # type: ignore[method-assign]
        size = next(num_bytes for kind, num_bytes in last if kind == "sum")

        def message() -> None:
            pending = world.start_sum(torch.zeros(size // 8, dtype=torch.float64))
            assert pending is not None
            pending.wait()

        alone = [timed(message) for _ in range(NUM_STEPS)]
        return (
            last,
            statistics.median(alone[WARM_UP_STEPS:]),
            statistics.median(steps[WARM_UP_STEPS:]),
            len(list(made.parameters())),
        )


def timed(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def on_this_machine(sizes: list[int]) -> list[str]:
    """Return the table of ranks on this machine."""
    cores = os.cpu_count() or 1
    lines = [
        "| ranks | counts need data | collectives | bytes | messages of all | sum alone | core time of each | step |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in sizes:
        for needs in (False, True):
            with RankPool(num_ranks, timeout_seconds=TIMEOUT_SECONDS) as pool:
                found = pool.run(_with_counts if needs else _without_counts)
            seen, alone, step, num_parameters = found[0]
            control = ControlMessages.of(num_parameters, counts_need_data=needs)
            each = alone * cores / ControlMessages(control.agreement_bytes, 0).messages(num_ranks)
            lines.append(
                f"| {num_ranks} | {'yes' if needs else 'no'} | {', '.join(kind for kind, _ in seen)} | "
                f"{sum(size for _, size in seen)} | {control.messages(num_ranks)} | {1000 * alone:.2f} ms | "
                f"{1e6 * each:.0f} us | {1000 * step:.1f} ms |"
            )
            print(lines[-1], flush=True)
    return lines


def _with_counts() -> object:
    return count_and_time(counts_need_data=True)


def _without_counts() -> object:
    return count_and_time(counts_need_data=False)


def sums(out: Path) -> None:
    """Run on every host: write the slowest rank's median seconds of sums of so many numbers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for size in SIZES:
        numbers, seconds = torch.zeros(size, dtype=torch.float64), []
        for _ in range(NUM_STEPS):
            dist.barrier()
            slowest = torch.tensor([timed(lambda numbers=numbers: dist.all_reduce(numbers))])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds.append(slowest.item())
        found[size] = statistics.median(seconds[WARM_UP_STEPS:])
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_hosts() -> list[str]:
    """Return the table of hosts that are far from each other."""
    lines = [
        "| hosts | numbers | measured | forecast | error | latencies, of 4 (N - 1) at most |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for num_hosts in HOSTS:
        with tempfile.TemporaryDirectory() as folder, hosts(num_hosts, latency=LATENCY) as made:
            out = Path(folder, "found.json")
            common = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": str(num_hosts)}
            command = [sys.executable, __file__, "--rank-writes", str(out)]
            ranks = [
                host.start(command, env=environment(**common, RANK=str(rank)), out=subprocess.DEVNULL)
                for rank, host in enumerate(made)
            ]
            for one in ranks:
                one.wait(TIMEOUT_SECONDS)
            found = json.loads(out.read_text())
        for size, seconds in found.items():
            said = gloo_all_reduce(8 * int(size), num_hosts, Link(LATENCY, FAST), item_bytes=8)
            lines.append(
                f"| {num_hosts} | {size} | {1000 * seconds:.0f} ms | {1000 * said:.0f} ms | "
                f"{said / seconds - 1:+.0%} | {said / LATENCY:.0f} of {4 * (num_hosts - 1)} |"
            )
            print(lines[-1], flush=True)
    return lines


def of_the_model() -> list[str]:
    """Return what the model says of many ranks."""
    link = Link(CONTROL_LATENCY_SECONDS, 1.25e9)
    lines = [
        "| ranks | parameters | sum at the end of a step | gather of counts | a tree would take |",
        "|--:|--:|--:|--:|--:|",
    ]
    for num_ranks in (64, 256, NUM_RANKS):
        for num_parameters in (100, 500):
            control = ControlMessages.of(num_parameters, counts_need_data=True)
            tree = 2 * (num_ranks - 1).bit_length() * link.latency_seconds
            lines.append(
                f"| {num_ranks} | {num_parameters} | {1000 * control.agreement_seconds(num_ranks, link):.1f} ms | "
                f"{1000 * control.count_seconds(num_ranks, link):.1f} ms | {1000 * tree:.2f} ms |"
            )
    return lines


def main() -> None:
    """Print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--rank-writes", type=Path, help="of a rank that this program has started")
    given = parser.parse_args()
    if given.rank_writes is not None:
        sums(given.rank_writes)
        return
    here = on_this_machine(given.ranks)
    lines = [
        "Ranks on this machine, which share its cores; collectives and bytes are a rank's in a step:",
        "",
        *here,
        "",
        f"Hosts with {1000 * LATENCY:g} ms between them, sums of float64; forecast with the latency as configured:",
        "",
        *on_hosts(),
        "",
        f"The model, {1e6 * CONTROL_LATENCY_SECONDS:g} us from rank to rank; a ring's latency grows with the ranks:",
        "",
        *of_the_model(),
    ]
    report.publish(
        lines,
        title="The control plane: messages, bytes and time of a step",
        command=f"python benchmarks/control_plane.py --ranks {' '.join(map(str, given.ranks))}",
        setting=f"{os.cpu_count()} cores that others used too, 1 thread per rank, gloo",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
