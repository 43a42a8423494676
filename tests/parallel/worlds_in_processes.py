"""Functions that ranks run in the tests of process groups: create, close, drop and recreate worlds."""

import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anybatch as ab
from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.control import _destroy as destroy_group
from anybatch.parallel.launchers import rank_context
from anybatch.testing.ranks import PRELOADED
from tests.architecture.leak_police import Holdings, holdings, settled
from tests.architecture.source_tree import PACKAGE, ROOT

NUM_ENGINES = 10
LATEST_END_SECONDS = 600.0
LATER_JOIN_SECONDS = 20.0  # stale addresses fail after this time; the default is ten minutes


class PlantedError(Exception):
    """Raised by a loss on purpose."""


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean squared output."""
    output: torch.Tensor = model(batch)
    return output.square().mean()


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Raise in the middle of a step, on every rank."""
    model(batch)
    raise PlantedError


def an_engine(loss: Callable[..., torch.Tensor] = mean_square) -> ab.Engine:
    """Return an engine that creates its own world."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=2, check_loss=False)


def a_step(engine: ab.Engine) -> None:
    """Make one step."""
    engine.step(next(iter(ab.batches(torch.arange(18.0).reshape(6, 3), effective_batch_size=6, epochs=1))))


def closed() -> ab.Engine:
    """Use an engine and close it properly."""
    with an_engine() as engine:
        a_step(engine)
    return engine


def failed() -> ab.Engine:
    """Close an engine through the error of a step."""
    engine = an_engine(failing)
    with pytest.raises(PlantedError), engine:
        a_step(engine)
    return engine


def dropped() -> None:
    """Use an engine without closing it."""
    a_step(an_engine())


def around_ten(use: Callable[[], ab.Engine | None]) -> tuple[Holdings, Holdings]:
    """Run on every rank: return the resources before and after ten engines; the first opens permanent ones."""
    use()
    gc.collect()
    before = holdings()
    kept = [use() for _ in range(NUM_ENGINES)]
    after = settled(before)
    assert len(kept) == NUM_ENGINES
    return before, after


def closed_with_a_gather_under_way() -> tuple[Holdings, Holdings]:
    """Run on two ranks: the first starts a gather that the second does not join before the first has closed."""
    before, former = holdings(), set(threading.enumerate())
    world, other = ab.World.from_environment(device="cpu"), ab.World.from_environment(device="cpu")
    if world.rank == 0:
        world.start_gather(b"row")
        world.close()
        # The other rank does not join, and this one has continued anyway.
        assert sum(one.name == "anybatch messages" for one in threading.enumerate()) == 2
    other.gather_numbers([1.0])  # the second rank would hang here if closing waited for the gather
    world.close()
    other.close()
    # The first rank's group ends once the second has left, which may take long on a busy machine.
    for thread in set(threading.enumerate()) - former:
        thread.join()
    return before, settled(before)


def one_fails_and_closes() -> str:
    """Run on two ranks: one fails and closes its world while the other waits; return the error of the latter."""
    world = ab.World.from_environment(device="cpu")
    if world.rank == 0:
        error = PlantedError("by rank 0")
        world.publish_failure(error, 3)
        world.close(error)
        return ""
    with pytest.raises(RankFailedError) as caught:
        world.gather_numbers([1.0])
    world.close()
    return str(caught.value)


def refused_when_closed() -> list[str]:
    """Run on two ranks: return the errors of a closed world."""
    world = ab.World.from_environment(device="cpu")
    world.close()
    world.close()
    said = []
    for ask in (lambda: world.gather_numbers([1.0]), lambda: world.start_gather(b"row")):
        with pytest.raises(WorldError) as caught:
            ask()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def ended_by_another_process() -> list[list[float]]:
    """Run on every rank: end the group like a forked child with shared memory, then continue as the parent."""
    world = ab.World.from_environment(device="cpu")
    assert world._control is not None  # noqa: SLF001
    resources = world._control._resources  # noqa: SLF001 (a real fork among torch's threads may deadlock)
    own, resources.process_id = resources.process_id, os.getppid()
    world.close()
    gathered = world.gather_numbers([float(world.rank)])
    resources.process_id = own
    destroy_group(resources)
    return gathered


def joined_again(variables: dict[str, str], rank: int) -> list[Any]:
    """Run in a separate process: create worlds one after another; the first of each round starts the default group."""
    os.environ.update(variables, RANK=str(rank))
    join = partial(ab.World.from_environment, device="cpu", timeout_seconds=LATER_JOIN_SECONDS)
    seen: list[Any] = []
    before = holdings()
    for number in range(4):
        with join() as first:
            second = join()
            first.close()
            seen.append(second.gather_numbers([float(rank + number)]))
            second.close()
        seen.append(dist.is_initialized())
        if number == 0:
            before = holdings()  # the store opens some files once
    dropped_one = join()
    seen.append(holdings().num_threads > before.num_threads)
    del dropped_one
    with join() as last:
        seen.append(last.gather_numbers([float(rank)]))
    seen.append(dist.is_initialized())  # a world that was only dropped keeps the default group
    dist.destroy_process_group()
    return [*seen, before, settled(before)]


def sharded_and_closed(variables: dict[str, str], rank: int) -> tuple[Holdings, Holdings]:
    """Run in a separate process: return the resources after one sharded engine, and after three more."""
    os.environ.update(variables, RANK=str(rank))

    def train() -> None:
        loss = ab.mean_over_samples(lambda model, batch: model(batch["x"]).mean())
        engine = ab.Engine(nn.Linear(4, 2), _sgd, loss, micro_batch_size=2, strategy="fsdp", check_loss=False)
        engine.step({"x": torch.ones(2, 4) * (1 + rank)})
        engine.close()

    train()
    before = holdings()
    for _ in range(3):
        train()
    return before, settled(before)


def _sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def by_launcher(function: Callable[..., Any], variables: dict[str, str], world_size: int) -> list[Any]:
    """Run a function (variables, rank) in new processes that read their rank from a launcher's variables."""
    context = rank_context(*PRELOADED)
    with ProcessPoolExecutor(world_size, mp_context=context) as processes:
        return list(processes.map(function, [variables] * world_size, range(world_size)))


ONE_RAISES = """
import os, warnings
warnings.simplefilter("ignore")
import torch
import anybatch as ab

torch.set_num_threads(1)
samples = [{"x": torch.ones(4)} for _ in range(8)]
loss = ab.mean_over_samples(lambda model, batch: model(batch["x"]).mean())
make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
engine = ab.Engine(torch.nn.Linear(4, 3), make, loss, micro_batch_size=4, strategy="ddp")
for batch in ab.batches(samples, effective_batch_size=8, steps=3):
    if engine.num_steps == 2 and os.environ["RANK"] == "1":
        raise ValueError("mine")
    engine.step(batch)
"""


ONE_SENDS_AT_EXIT = """
import atexit, os, threading
atexit.register(lambda: print("threads:", [one.name for one in threading.enumerate()]))
import torch
import anybatch as ab
world = ab.World.from_environment(device="cpu")
if world.rank == 0:
    started = world.start_gather(b"row")  # in which the other rank takes no part
"""


def run_two_ranks(program: str, store: str) -> list[tuple[int, str]]:
    """Run a program on two ranks; return exit statuses and standard outputs."""
    variables = {**os.environ, "WORLD_SIZE": "2", "ANYBATCH_INIT_METHOD": store, "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(ROOT)])}
    ranks = [
        subprocess.Popen(  # noqa: S603 (a fixed program)
            [sys.executable, "-c", program],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=LATEST_END_SECONDS)[0] for rank in ranks]
    return [(rank.returncode, output.strip()) for rank, output in zip(ranks, outputs, strict=True)]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
