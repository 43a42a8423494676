"""Causes of bad scaling, planted alone and in pairs: is the right one reported first, with the predicted gain?

A small job runs on two hosts (network namespaces of this machine, `tests/hosts.py`; root and iproute2). Its layers
sleep for a time per sample, in forward and backward, like an asynchronous device, so compute does not depend on other
programs of this machine, and reductions can overlap. Gradients travel over real sockets. Planted are samples that load
slowly, too few workers for them, a slow link, a link with latency, a rank that computes more, a bucket for every
parameter, and one bucket for all. A pair is right if either cause is reported first. Healthy jobs have none of these.
Waiting for a core (`shared_cores`) is left out: it depends on other programs of this machine, and no job is planted
with it; the table counts how often it was reported.

    python benchmarks/planted_causes.py [--only WORD] [--out benchmarks/results/NAME.md]
    python benchmarks/planted_causes.py --kept FILE --seconds 240    # run a part; repeat until all have run
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
import torch
from torch import nn

import anybatch as ab
from anybatch.cli.command import plain
from anybatch.data.batches import Batches
from anybatch.diagnostics.scale import scale_on_ranks
from anybatch.diagnostics.scaling_ranks import RunSettings
from anybatch.engine.arguments import TrainSpec
from anybatch.parallel.world import World

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts come from the tests
from tests.hosts import NoHostsError, hosts

ROOT = Path(__file__).parents[1]
EFFECTIVE_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_RANKS = 32, 8, 2
NUM_CORES = 64  # sleeping needs none
TIMEOUT_SECONDS = 900
BUCKET_SIZES = (2**16, 2**20, 2**21, 2**30)
MACHINE = "shared_cores"
MOST_TOGETHER = 4  # jobs on one network, which ranks join once


@dataclass(frozen=True, kw_only=True)
class Case:
    """A simulated job, and the network that it runs on.

    Attributes:
        planted: the causes that it has.
        layers: number of layers of the model.
        width: width of each layer.
        sample_seconds: time of a sample in forward and backward.
        load_seconds: time to load a sample.
        workers: loading processes per rank.
        bucket_bytes: bucket size of the run.
        straggles: how much longer rank 1 computes.
        rate: rate of the cable.
        latency: seconds from host to host.
        bucket_sizes: bytes of the buckets that are tried; empty for the default sizes of `anybatch scale`.
    """

    planted: tuple[str, ...] = ()
    layers: int = 8
    width: int = 512
    sample_seconds: float = 0.005
    load_seconds: float = 0.0
    workers: int = 0
    bucket_bytes: int = 2 * 2**20
    straggles: float = 0.0
    rate: str | None = None
    latency: float = 0.0
    bucket_sizes: tuple[int, ...] | None = BUCKET_SIZES


PLANT: dict[str, dict[str, Any]] = {
    "slow_loader": {"load_seconds": 0.003},
    "too_few_workers": {"load_seconds": 0.012, "workers": 1},
    "slow_link": {"rate": "400mbit"},
    "high_latency": {"latency": 0.008, "width": 32},
    "straggler": {"straggles": 0.5},
    "tiny_buckets": {"bucket_bytes": 1, "layers": 100, "width": 32},
    "giant_buckets": {"bucket_bytes": 2**30, "rate": "1500mbit", "width": 512},
}
EXCLUSIVE = ({"slow_loader", "too_few_workers"}, {"tiny_buckets", "giant_buckets"})
HEALTHY = (
    Case(),
    Case(width=128),
    Case(layers=16, width=256),
    Case(workers=2, load_seconds=0.003),
    Case(rate="10gbit", bucket_bytes=4 * 2**20),
    Case(sample_seconds=0.012, width=256),
)


def planted(*names: str) -> Case:
    """Return the job with these causes; if two conflict, the change that hides the other one is dropped."""
    values: dict[str, Any] = {}
    for name in names:
        values |= PLANT[name]
    if {"slow_link", "giant_buckets"} <= set(names):
        values["rate"] = PLANT["slow_link"]["rate"]
    if "high_latency" in names and {"slow_link", "giant_buckets"} & set(names):
        values["width"] = 512
    if {"tiny_buckets", "high_latency"} <= set(names):
        values["layers"] = 12  # every layer is two messages of 17 ms
    if {"tiny_buckets", "slow_link"} <= set(names):
        values |= {"layers": 100, "width": 144}
    return Case(planted=names, **values)


def cases() -> list[Case]:
    """Return all jobs: healthy ones, each cause, and each possible pair."""
    pairs = [pair for pair in itertools.combinations(PLANT, 2) if set(pair) not in EXCLUSIVE]
    return [*HEALTHY, *(planted(name) for name in PLANT), *(planted(*pair) for pair in pairs)]


class Device(torch.autograd.Function):
    """Returns its input after the time that a device would take."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:  # noqa: ANN401 (torch's)
        """Sleep for a third of the time."""
        context.seconds = seconds
        time.sleep(seconds / 3 * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401 (torch's)
        """Sleep for two thirds of the time."""
        time.sleep(2 * context.seconds / 3 * len(gradients[0]))
        return gradients[0], None


class Layers(nn.Module):
    """Layers with a simulated duration."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(case.width, case.width) for _ in range(case.layers))
        slower = 1.0 + case.straggles if os.environ.get("RANK") == "1" else 1.0
        self.seconds = case.sample_seconds * slower / case.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = Device.apply(layer(x).tanh(), self.seconds)  # type: ignore[no-untyped-call]
        return x


@dataclass(frozen=True)
class Samples:
    """Samples with a simulated loading time."""

    case: Case

    def __len__(self) -> int:
        """Return the number of samples."""
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample after its loading time."""
        time.sleep(self.case.load_seconds)
        return torch.full((self.case.width,), index / 4096)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the outputs."""
    found: torch.Tensor = model(batch).square().mean()
    return found


@dataclass(frozen=True)
class PlantedJob:
    """The job of a case."""

    case: Case

    def train_spec(self) -> TrainSpec:
        """Return the training specification."""
        return TrainSpec(
            model=Layers(self.case),
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-6),
            loss=ab.mean_over_samples(loss),
            measure_gradient_norm=False,
        )

    def data(self, *, steps: int) -> Callable[[int], Batches]:
        """Return the batches by number of workers."""
        return lambda workers: ab.batches(
            Samples(self.case), effective_batch_size=EFFECTIVE_BATCH_SIZE, steps=steps, num_workers=workers
        )


def run_rank(cases_of_network: Sequence[Case], out: Path) -> None:
    """Run as one rank: measure each job, try the change, and write the findings."""
    torch.set_num_threads(1)
    # Kept open until the end, so that ranks join once.
    world = World.from_environment(device="cpu")
    for number, case in enumerate(cases_of_network):
        job = PlantedJob(case)
        settings = RunSettings(
            micro_batch_size=MICRO_BATCH_SIZE, bucket_bytes=case.bucket_bytes, num_workers=case.workers
        )
        found = scale_on_ranks(
            job.train_spec,
            job.data,
            num_cores=NUM_CORES,
            settings=settings,
            bucket_sizes=case.bucket_sizes,
            max_seconds=6.0,
            device="cpu",
        )
        if os.environ["RANK"] == "0":
            step = found.measured.parts.step
            causes = [[cause.code, cause.cost / step] for cause in found.causes]
            values = {"causes": causes, "text": str(found), "report": plain(found)}
            Path(out, f"{number}.json").write_text(json.dumps(values))
    world.gather_numbers([0.0])  # rank 0 has the store, so it ends last
    world.close()


def run_cases(cases_of_network: Sequence[Case]) -> list[dict[str, Any]]:
    """Run jobs on the same network of hosts, and return rank 0's findings for each."""
    first = cases_of_network[0]
    with tempfile.TemporaryDirectory() as folder:
        with hosts(NUM_RANKS, rate=first.rate, latency=first.latency) as made:
            ranks = []
            for rank, host in enumerate(made):
                env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": "0"}
                env |= {"MASTER_ADDR": made[0].address, "MASTER_PORT": "23456", "OMP_NUM_THREADS": "1"}
                env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
                given = json.dumps([asdict(case) for case in cases_of_network])
                command = [sys.executable, __file__, "--cases", given, "--out", folder]
                ranks.append(host.start(command, env=env, out=subprocess.PIPE))
            said = [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("\n".join(said))
        results = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(len(cases_of_network))]
    for found in results:
        found["busy"] = any(code == MACHINE for code, _ in found["causes"])
        found["causes"] = [cause for cause in found["causes"] if cause[0] != MACHINE]
    return results


def case_of(values: dict[str, Any]) -> Case:
    """Return a job parsed from JSON."""
    sizes = values["bucket_sizes"]
    tuples = {"planted": tuple(values["planted"]), "bucket_sizes": sizes and tuple(sizes)}
    return Case(**values | tuples)


def network_of(case: Case) -> tuple[bool, str, float]:
    """Return the properties shared by jobs on the same hosts: whether they are pairs, rate and latency."""
    return len(case.planted) > 1, case.rate or "", case.latency


def row_of(case: Case, found: dict[str, Any]) -> str:
    """Return the line of a case in the table."""
    named = ", ".join(f"{code} {share:.0%}" for code, share in found["causes"]) or "none"
    right = "yes" if is_right(case, found) else "**no**"
    return f"| {' + '.join(case.planted) or 'healthy'} | {named} | {right} |"


def is_right(case: Case, found: dict[str, Any]) -> bool:
    """Return whether a planted cause is reported first, or none for a healthy job."""
    first = found["causes"][0][0] if found["causes"] else None
    return first in case.planted if case.planted else first is None


def summary(results: Iterable[tuple[Case, dict[str, Any]]]) -> list[str]:
    """Return the hit rates."""
    results = list(results)
    busy = sum(found["busy"] for _, found in results)
    lines = [f"- ranks wait for a core, a tenth of a step or more, which is left out: {busy} of {len(results)} runs"]
    for name, number in (
        ("healthy: none named", 0),
        ("one cause: named first", 1),
        ("two: one of them named first", 2),
    ):
        rights = [is_right(case, found) for case, found in results if len(case.planted) == number]
        if rights:
            lines.append(f"- {name}: {sum(rights)} of {len(rights)} ({sum(rights) / len(rights):.0%})")
    pairs = [(case, found) for case, found in results if len(case.planted) == 2]
    both = sum(set(case.planted) <= {code for code, _ in found["causes"]} for case, found in pairs)
    if pairs:
        lines.append(f"- two: both named: {both} of {len(pairs)}")
    return lines


def main() -> None:
    """Run all cases, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", help="cases with this planted cause; healthy for those without")
    parser.add_argument("--kept", type=Path, help="file with results of earlier runs, to go on with and add to")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further jobs after so long")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true", help="print the whole report of each case")
    given = parser.parse_args()
    if given.cases is not None:
        values = json.loads(given.cases)
        run_rank([case_of(one) for one in values], given.out)
        return
    chosen = [case for case in cases() if given.only in (None, *(case.planted or ("healthy",)))]
    kept = json.loads(given.kept.read_text()) if given.kept and given.kept.exists() else []
    known = {case_of(values): found for values, found in kept}
    begun = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):  # the finished part is shown
        # Single causes first.
        for network in sorted({network_of(case) for case in chosen}):
            same = [case for case in chosen if network_of(case) == network and case not in known]
            while same and time.perf_counter() - begun < given.seconds:
                some, same = same[:MOST_TOGETHER], same[MOST_TOGETHER:]
                for case, found in zip(some, run_cases(some), strict=True):
                    known[case] = found
                    print(row_of(case, found), flush=True)
                    if given.verbose:
                        print(found["text"], flush=True)
                if given.kept:
                    given.kept.write_text(json.dumps([[asdict(case), found] for case, found in known.items()]))
    results = [(case, known[case]) for case in chosen if case in known]
    stopped = [f"{len(results)} of {len(chosen)} runs.", ""] if len(results) < len(chosen) else []
    lines = ["| planted | named, with their share of a step | right |"]
    lines += ["|---|---|---|", *(row_of(case, found) for case, found in results)]
    report.publish(
        [*stopped, *summary(results), "", *lines],
        title="Planted causes of bad scaling: named",
        command="python benchmarks/planted_causes.py",
        setting=f"{NUM_RANKS} ranks over gloo, one in each network namespace, compute that sleeps",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
