"""Closing a world or an engine releases all of its system resources."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from anybatch.errors import WorldError
from anybatch.parallel.control import signed, verified
from tests.parallel import worlds_in_processes as ranks_do
from tests.ranks_fixture import Ranks


@pytest.mark.parametrize("use", [ranks_do.closed, ranks_do.failed, ranks_do.dropped], ids=lambda use: use.__name__)
def test_ten_engines_leave_nothing(two_ranks: Ranks, use: Callable[[], object]) -> None:
    """Ten engines leave no threads, sockets or files, whether closed, failed or dropped.

    Closed engines are kept alive: closing releases their resources, not garbage collection.
    """
    for before, after in two_ranks.run(ranks_do.around_ten, use):
        assert after.within(before)
        assert before.num_threads > 1  # threads were counted


@pytest.mark.slow
def test_an_exception_under_ddp_ends_all_ranks_with_status_1(tmp_path: Path) -> None:
    """If one rank raises between steps, the other leaves DDP's reduction with an error instead of aborting."""
    ended = ranks_do.run_two_ranks(ranks_do.ONE_RAISES, (tmp_path / "store").as_uri())
    assert [status for status, _ in ended] == [1, 1]


@pytest.mark.slow
def test_exit_abandons_pending_messages(tmp_path: Path) -> None:
    """A message in flight at exit is abandoned before the interpreter shuts down; the exit status is 0."""
    ended = ranks_do.run_two_ranks(ranks_do.ONE_SENDS_AT_EXIT, (tmp_path / "store").as_uri())
    assert ended == [(0, "threads: ['MainThread']")] * 2


def test_closing_does_not_wait_for_other_ranks(two_ranks: Ranks) -> None:
    """A pending gather that another rank never joins does not block `close`."""
    for before, after in two_ranks.run(ranks_do.closed_with_a_gather_under_way):
        assert after.within(before)


def test_closing_frees_ranks_that_wait(two_ranks: Ranks) -> None:
    """If a rank fails and closes its world, waiting ranks get its error."""
    assert "PlantedError: by rank 0" in two_ranks.run(ranks_do.one_fails_and_closes)[1]


def test_a_closed_world_is_refused(two_ranks: Ranks) -> None:
    """Closing twice is a no-op; later collectives report that the world is closed, not that a rank failed."""
    for said in two_ranks.run(ranks_do.refused_when_closed):
        assert [words.startswith("WorldError: this world is closed") for words in said] == [True, True]


def test_a_forked_child_leaves_the_group_to_its_parent(two_ranks: Ranks) -> None:
    """Garbage collection in a forked loading worker does not close the connections of its parent rank."""
    assert two_ranks.run(ranks_do.ended_by_another_process) == [[[0.0], [1.0]]] * 2


@pytest.fixture(scope="module")
def launcher_store() -> TCPStore:
    """A store like the one that torchrun keeps for its ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["torchrun", "rank 0"])
def test_a_later_world_joins_again(keeper: str, launcher_store: TCPStore) -> None:
    """The last closed world ends the default group that the first one started; later worlds start a new one.

    Under torchrun all groups of a run use the launcher's store. Otherwise rank 0's store lives as long as the group,
    and a faster rank may still find the old one.
    """
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    if keeper == "torchrun":
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(launcher_store.port)}
    else:
        variables |= {"MASTER_PORT": str(ranks_do.free_port())}
    found = ranks_do.by_launcher(ranks_do.joined_again, variables, 2)

    for *seen, before, after in found:
        gathered = [[[float(number)], [float(1 + number)]] for number in range(4)]
        assert seen == [x for rows in gathered for x in (rows, False)] + [True, gathered[0], True]
        assert after.within(before)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_closed_engine_leaves_no_group() -> None:
    """Closing an engine ends the default group that it started, although its model was sharded on a mesh."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks_do.free_port())}
    for before, after in ranks_do.by_launcher(ranks_do.sharded_and_closed, variables, 2):
        assert after.within(before)


def test_foreign_messages_are_refused() -> None:
    """A message with the right signature is accepted; one with a wrong secret, changed or truncated, is refused."""
    message = signed(b"weights", b"secret")
    assert verified(message, b"secret") == b"weights"
    for foreign in (signed(b"weights", b"guess"), message[:-1] + b"S", message[:8], b""):
        with pytest.raises(WorldError):
            verified(foreign, b"secret")
