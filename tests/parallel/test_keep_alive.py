"""A rank that is gone is noticed by the one before it, also where no message of theirs is under way."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anybatch as ab
from anybatch.errors import RankFailedError
from anybatch.parallel import keep_alive
from anybatch.parallel.keep_alive import KeepAlive
from anybatch.parallel.torch_internals import HashStore, PrefixStore, TCPStore
from anybatch.testing import RankPool
from tests.faults import sees

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def three() -> Iterator[list[KeepAlive]]:
    """The keep-alive connections of three ranks, which are threads of this process here."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> KeepAlive:
        own = TCPStore("localhost", store.port, wait_for_workers=False)
        return KeepAlive("name", rank, 3, PrefixStore("prefix", own), TIMEOUT)

    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(connect, range(3)))
    yield made
    for one in made:
        one.close()


def test_ranks_that_are_there(three: list[KeepAlive]) -> None:
    """Each rank watches the next one, and finds it there."""
    assert [one.next_rank for one in three] == [1, 2, 0]
    assert [one.is_broken for one in three] == [False] * 3


def test_a_rank_that_ends_without_a_word(three: list[KeepAlive]) -> None:
    """The rank before one whose process ends finds it gone, and the others do not."""
    with mock.patch.object(keep_alive, "_GOODBYE", b""):
        three[1].close()
    assert [one.is_broken for one in three] == [True, False, False]


@sees(
    "a rank that has closed its world is taken for one that has died",
    "src/anybatch/parallel/keep_alive.py",
    "self._from_former.send(_GOODBYE)",
    "pass",
)
def test_a_rank_that_says_goodbye(three: list[KeepAlive]) -> None:
    """A rank that has closed its world in good order is not gone: the one before may wait for others still."""
    three[1].close()
    assert [one.is_broken for one in three] == [False] * 3


def test_without_an_address() -> None:
    """Ranks that have met in a store without an address have no keep-alive connections, and go on."""
    one = KeepAlive("name", 0, 2, HashStore(), TIMEOUT)
    assert not one.is_broken
    one.close()


def evaluate_or_die(port: int) -> object:
    """Run on two ranks: rank 1 ends without a word, and rank 0 calls what begins with a meeting in the store."""
    rank = dist.get_rank()
    dist.destroy_process_group()  # its store is a file, which has no address
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2, timeout=TIMEOUT)
    with ab.World.from_environment(device="cpu") as world:
        model = nn.Linear(3, 1)
        loss = ab.mean_over_samples(lambda model, batch: model(batch).square().mean())
        engine = ab.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, world=world)
        engine.step(torch.randn(2, 3, generator=torch.Generator().manual_seed(world.rank)))
        if world.rank == 1:
            os._exit(1)
        try:
            engine.evaluate([torch.zeros(2, 3)])
        except RankFailedError as error:
            return error.rank
    return "evaluated"


@sees(
    "nobody looks whether the next rank is gone",
    "src/anybatch/parallel/roll_call.py",
    "        self._check_keep_alive()\n",
    "",
)
@pytest.mark.ranks
def test_a_meeting_with_a_rank_that_is_gone() -> None:
    """A rank that meets others in the store, with no message under way, learns within seconds that one has died."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with RankPool(2, timeout_seconds=60) as pool:
        assert pool.outcomes(evaluate_or_die, port)[0].value == 1
