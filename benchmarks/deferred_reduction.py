"""A step of 8 micro-batches on two hosts, reduced once or once per micro-batch: seconds, and bytes on the link.

Two hosts, which are network namespaces of this machine (`tests/hosts.py`; root, iproute2), with links of 1 Gbit/s
and 1 ms, run one rank each. Three kinds of step alternate in one run: DDP by hand with no_sync until the last
micro-batch and without it, and the engine under `all_reduce`. The kernel counts the bytes on each host's interface,
sent and received, between the beginning and the end of a step, including headers and the control plane.

    python benchmarks/deferred_reduction.py [--rounds 9] [--out benchmarks/results/NAME.md]
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import report
import torch
from all_reduce_against_ddp import InMemory, loss
from lines_by_hand import ddp_accumulated, ddp_without_no_sync
from several_hosts import environment
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.parallel.world import World

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError, hosts

RATE, LATENCY = "1gbit", 0.001
STEPS, SIZE, WIDTH, LAYERS = 8, 32, 1024, 4
WARM_UP, TIMEOUT_SECONDS = 2, 300
COUNTERS = Path("/sys/class/net/eth0/statistics")


def model() -> nn.Sequential:
    """Return 4 layers: 16.9 MB of gradients."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, WIDTH)]
    for _ in range(LAYERS):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, 10))


def batch(num_samples: int) -> InMemory:
    """Return a batch of random samples."""
    torch.manual_seed(1)
    return InMemory({"x": torch.randn(num_samples, 16), "y": torch.randint(0, 10, (num_samples,))})


def link_bytes() -> int:
    """Return the bytes that this host has sent and received."""
    return sum(int((COUNTERS / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


class StepMeasurements:
    """Seconds and bytes of each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun, self._before = 0.0, 0
        self.seconds: list[float] = []
        self.num_bytes: list[int] = []

    def begin(self) -> None:
        """Begin to measure a step, on both hosts together."""
        self._world.gather_numbers([0.0])
        self._begun, self._before = time.perf_counter(), link_bytes()

    def end(self) -> None:
        """End the measurement of a step."""
        self.seconds.append(time.perf_counter() - self._begun)
        self.num_bytes.append(link_bytes() - self._before)


def by_engine(world: World, whole: InMemory) -> tuple[StepMeasurements, Callable[[], None]]:
    """Return the measurements of the engine's steps, and a function that runs a step."""
    taken, net = StepMeasurements(world), model()
    engine = ab.Engine(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        ab.mean_over_samples(loss),
        micro_batch_size=SIZE,
        strategy="all_reduce",
        world=world,
        measure_gradient_norm=False,
    )

    def step() -> None:
        taken.begin()
        engine.step(whole)
        taken.end()

    return taken, step


def by_hand(world: World, whole: InMemory, loop: Callable[..., None]) -> tuple[StepMeasurements, Callable[[], None]]:
    """Return the measurements of a loop's steps, and a function that runs a step in the loop's thread."""
    taken = StepMeasurements(world)
    own = slice(world.rank * STEPS * SIZE, (world.rank + 1) * STEPS * SIZE)
    pieces = [
        {"x": x, "y": y}
        for x, y in zip(whole.batch["x"][own].split(SIZE), whole.batch["y"][own].split(SIZE), strict=True)
    ]
    asked: SimpleQueue[None] = SimpleQueue()
    done: SimpleQueue[None] = SimpleQueue()

    def loss_share(net: Any, piece: Any) -> torch.Tensor:  # noqa: ANN401 (wrapped)
        return functional.cross_entropy(net(piece["x"]), piece["y"], reduction="sum") / len(whole.sample_ids)

    def steps() -> Iterator[Any]:
        while True:
            asked.get()
            taken.begin()
            yield pieces
            taken.end()
            done.put(None)

    arguments = (model(), partial(torch.optim.SGD, lr=1e-3), loss_share, steps())
    Thread(target=loop, args=arguments, daemon=True).start()

    def step() -> None:
        asked.put(None)
        done.get()

    return taken, step


def measure(rounds: int, out: Path) -> None:
    """Run on every rank: alternate the kinds of step, and write their seconds."""
    torch.set_num_threads(1)
    with World.from_environment() as world:
        whole = batch(STEPS * SIZE * world.size)
        kinds = {
            "DDP, no_sync until the last": by_hand(world, whole, ddp_accumulated),
            "DDP, reduced in each": by_hand(world, whole, ddp_without_no_sync),
            "engine, all_reduce": by_engine(world, whole),
        }
        for _ in range(rounds + WARM_UP):
            for _, step in kinds.values():
                step()
        found = {
            name: {"seconds": one.seconds[WARM_UP:], "bytes": one.num_bytes[WARM_UP:]}
            for name, (one, _) in kinds.items()
        }
        everyone = world.gather_objects(json.dumps(found))
        if world.is_first:
            out.write_text(json.dumps([json.loads(one) for one in everyone]))


def main() -> None:
    """Run the measurement on two hosts, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank-writes", type=Path, help="of a rank that this program has started")
    given = parser.parse_args()
    if given.rank_writes is not None:
        measure(given.rounds, given.rank_writes)
        return
    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=RATE, latency=LATENCY) as made:
        out = Path(folder, "found.json")
        common = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        command = [sys.executable, __file__, "--rounds", str(given.rounds), "--rank-writes", str(out)]
        ranks = [
            host.start(command, env=environment(**common, RANK=str(rank)), out=subprocess.DEVNULL)
            for rank, host in enumerate(made)
        ]
        if statuses := [one.wait(TIMEOUT_SECONDS) for one in ranks if one.wait(TIMEOUT_SECONDS)]:
            message = f"a rank ended with status {statuses[0]}"
            raise RuntimeError(message)
        by_rank = json.loads(out.read_text())
    gradient = sum(4 * one.numel() for one in model().parameters())
    lines = ["| step | median, ms | quartiles | bytes of a cable | by the gradient's |", "|---|--:|---|--:|--:|"]
    for name in by_rank[0]:
        seconds = [max(pair) for pair in zip(*(one[name]["seconds"] for one in by_rank), strict=True)]
        low, middle, high = statistics.quantiles(seconds, n=4)
        num_bytes = statistics.median(by_rank[0][name]["bytes"])
        lines.append(
            f"| {name} | {1e3 * middle:.0f} | {1e3 * low:.0f} to {1e3 * high:.0f} | {num_bytes / 1e6:.1f} MB | "
            f"{num_bytes / gradient:.2f} |"
        )
    report.publish(
        [*lines, "", f"Gradients are {gradient / 1e6:.1f} MB; on two ranks a ring sends and receives each byte once."],
        title="Reduced once, or in every micro-batch: two hosts, 1 Gbit/s, 1 ms",
        command="python benchmarks/deferred_reduction.py",
        setting=f"8 accumulation steps of {SIZE} samples, gloo, 1 thread each, medians of alternating steps",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        print(f"not measured: {error}")
