"""What a world and an engine hold of the system, and that nothing of it stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.faults import sees
from tests.parallel import worlds_in_processes as ranks_do
from tests.ranks_fixture import Ranks


@sees(
    "groups: a world that is dropped keeps its group",
    "src/anybatch/parallel/process_groups.py",
    "weakref.finalize(self, _destroy, self._resources)",
    "weakref.finalize(torch, _destroy, self._resources)",
    cases=["dropped"],
)
@sees(
    "groups: an engine does not close the world that it has made",
    "src/anybatch/engine/engine.py",
    "if self._made_world:",
    "if False:",
    cases=["closed", "failed"],
)
@pytest.mark.parametrize("use", [ranks_do.closed, ranks_do.failed, ranks_do.dropped], ids=lambda use: use.__name__)
def test_fifty_engines_leave_nothing(two_ranks: Ranks, use: Callable[[], object]) -> None:
    """Threads, sockets and files of a rank are after fifty engines what they were before, however these ended.

    Engines that were closed are kept: what they had ends because they are closed, and not because they are collected.
    """
    for before, after in two_ranks.run(ranks_do.around_fifty, use):
        assert after.within(before)
        assert before.num_threads > 1  # they were counted


@sees(
    "groups: the default group is open at exit",
    "src/anybatch/parallel/process_groups.py",
    "if is_exit and resources.owns_default_group",
    "if not is_exit and resources.owns_default_group",
)
@pytest.mark.slow
def test_an_open_engine_ends_at_exit(tmp_path: Path) -> None:
    """A program that does not close its engine has neither its thread nor a process group when the interpreter ends."""
    assert ranks_do.run_two_ranks(ranks_do.OPEN_AT_EXIT, (tmp_path / "store").as_uri()) == [(0, "[] False")] * 2


@sees(
    "groups: DDP's buckets are finished in a thread of gloo",
    "src/anybatch/parallel/ddp.py",
    "    if on_cpu:\n        return reductions.finish_later(work, finish, is_last=bucket.is_last())\n",
    """
    if on_cpu and bucket.is_last():
        result = work.get_future().then(summed)
        reductions.wait(work)
        return result
""",
)
@pytest.mark.slow
def test_an_exception_under_ddp_ends_all_ranks_with_status_1(tmp_path: Path) -> None:
    """If one rank raises between steps, the other leaves DDP's reduction and ends with its error, not with an abort."""
    ended = ranks_do.run_two_ranks(ranks_do.ONE_RAISES, (tmp_path / "store").as_uri())
    assert [status for status, _ in ended] == [1, 1]


def test_ranks_end_worlds_at_different_times(three_ranks: Ranks) -> None:
    """A rank that has its result may end the group at once: the others get theirs, however late they come."""
    assert three_ranks.run(ranks_do.ended_at_different_times) == [True] * 3


@sees(
    "groups: closing waits for a sum under way",
    "src/anybatch/parallel/process_groups.py",
    "    if resources.num_pending and not is_exit:",
    "    if False:",
)
def test_closing_does_not_wait_for_other_ranks(two_ranks: Ranks) -> None:
    """A sum that was started and in which another rank takes no part does not keep `close` from returning."""
    for before, after in two_ranks.run(ranks_do.closed_with_a_sum_under_way):
        assert after.within(before)


def test_closing_frees_ranks_that_wait(two_ranks: Ranks) -> None:
    """A rank that fails and closes its world is not waited for: the others learn its error."""
    assert "PlantedError: by rank 0" in two_ranks.run(ranks_do.one_fails_and_closes)[1]


@sees(
    "groups: a closed world does not say so",
    "src/anybatch/parallel/process_groups.py",
    "if not self._resources.groups:",
    "if False:",
)
def test_a_closed_world_is_refused(two_ranks: Ranks) -> None:
    """Closing twice is nothing; what needs other ranks then says that the world is closed, not that a rank failed."""
    for said in two_ranks.run(ranks_do.refused_when_closed):
        assert [words.startswith("WorldError: this world is closed") for words in said] == [True, True]


@sees(
    "groups: a forked child ends the group of its parent",
    "src/anybatch/parallel/process_groups.py",
    "if os.getpid() != resources.process_id:",
    "if False:",
)
def test_a_forked_child_leaves_the_group_to_its_parent(two_ranks: Ranks) -> None:
    """What a loading worker collects does not close the connections of the rank that it was forked from."""
    assert two_ranks.run(ranks_do.ended_by_another_process) == [[[0.0], [1.0]]] * 2


@pytest.fixture(scope="module")
def launcher_store() -> TCPStore:
    """A store such as torchrun keeps for its ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@sees(
    "groups: the first world that is closed ends the default group",
    "src/anybatch/parallel/world.py",
    "if num_open == 0 and",
    "if num_open is not None and",
    cases=["torchrun"],
)
@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["torchrun", "rank 0"])
def test_a_later_world_joins_again(keeper: str, launcher_store: TCPStore) -> None:
    """The last world to be closed ends the default group that the first one has started; a later one starts another.

    Under torchrun all groups of a run meet in the store of the launcher; elsewhere rank 0 has a store as long as the
    group, and a rank that is faster finds the old one.
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
