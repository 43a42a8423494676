"""Keep-alive connections: each rank notices when the next one dies, also without messages between them."""

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

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def three() -> Iterator[list[KeepAlive]]:
    """The keep-alive connections of three ranks, run as threads of this process."""
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
    """Each rank watches the next one and finds it alive."""
    assert [one.next_rank for one in three] == [1, 2, 0]
    assert [one.is_broken for one in three] == [False] * 3


def test_a_rank_that_ends_without_a_word(three: list[KeepAlive]) -> None:
    """If a process dies, only the rank that watches it notices."""
    with mock.patch.object(keep_alive, "_GOODBYE", b""):
        three[1].close()
    assert [one.is_broken for one in three] == [True, False, False]


def test_a_rank_that_says_goodbye(three: list[KeepAlive]) -> None:
    """A rank that closed its world properly does not count as dead."""
    three[1].close()
    assert [one.is_broken for one in three] == [False] * 3


def test_without_an_address() -> None:
    """A store without an address gives no keep-alive connections, and ranks still work."""
    one = KeepAlive("name", 0, 2, HashStore(), TIMEOUT)
    assert not one.is_broken
    one.close()


def evaluate_or_die(port: int) -> object:
    """Run on two ranks: rank 1 dies; rank 0 calls evaluate, which starts with a rendezvous in the store."""
    rank = dist.get_rank()
    dist.destroy_process_group()  # the pool's store is a file, which has no address
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


@pytest.mark.ranks
def test_a_meeting_with_a_rank_that_is_gone() -> None:
    """A rank that waits for a rendezvous in the store learns within seconds that a peer has died."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with RankPool(2, timeout_seconds=60) as pool:
        assert pool.outcomes(evaluate_or_die, port)[0].value == 1
