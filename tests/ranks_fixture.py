"""Pools of real ranks, started once per test session on first use and shared by all folders.

A folder whose tests need ranks imports the fixtures in its `conftest.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from anybatch.testing import RankOutcome, RankPool
from tests.architecture.leak_police import new_groups, take_snapshot

POOL_TIMEOUT_SECONDS = 120.0


def watched(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Run a function on a rank, and return its value and the process groups that it leaked."""
    before = take_snapshot()
    return function(*args), new_groups(before)


class Ranks:
    """A rank pool that records whether a failed test ruined it; with `keep_groups`, functions may leave groups."""

    def __init__(self, world_size: int, *, keep_groups: bool = False) -> None:
        self.world_size = world_size
        self.ruined = False
        self.leaks: list[str] = []
        self._keep_groups = keep_groups
        self._pool = RankPool(world_size, timeout_seconds=POOL_TIMEOUT_SECONDS)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank and return its values, in rank order."""
        if self.ruined:
            pytest.fail(f"a test before this one has ruined the {self.world_size} ranks", pytrace=False)
        outcomes = self.outcomes(function, *args)
        failed = [f"rank {rank}:\n{outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        self.ruined = bool(failed)
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[RankOutcome]:
        """Run `function(*args)` on every rank and return the outcomes."""
        if self._keep_groups:
            return self._pool.outcomes(function, *args)
        outcomes = self._pool.outcomes(watched, function, *args)
        self.leaks += [f"rank {rank}: {leak}" for rank, o in enumerate(outcomes) if not o.error for leak in o.value[1]]
        return [outcome if outcome.error else RankOutcome(value=outcome.value[0]) for outcome in outcomes]

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of a parameter that selected tests of this module use.

    A fixture that computes results for many tests can skip the unselected ones.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[parameter] for params in calls if parameter in params))


STARTED = pytest.StashKey[dict[int, Ranks]]()


def started_ranks(config: pytest.Config, world_size: int) -> Ranks:
    """Return the session's pool of this size, started on first use or after a test ruined it."""
    started = config.stash.setdefault(STARTED, {})
    if world_size in started and started[world_size].ruined:
        started.pop(world_size).close()
    if world_size not in started:
        started[world_size] = ranks = Ranks(world_size)
        config.add_cleanup(ranks.close)
    return started[world_size]


def leaks_on_ranks(config: pytest.Config) -> list[str]:
    """Return the leaks on ranks since the last call."""
    found: list[str] = []
    for ranks in config.stash.get(STARTED, {}).values():
        found += ranks.leaks
        ranks.leaks.clear()
    return found


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest) -> Ranks:
    """One rank with a process group."""
    return started_ranks(request.config, 1)


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Two ranks."""
    return started_ranks(request.config, 2)


@pytest.fixture(scope="module")
def three_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Three ranks; batch sizes in tests are not divisible by two, three and the micro-batch size together."""
    return started_ranks(request.config, 3)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1-rank", "2-ranks", "3-ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """One, two and three ranks in succession."""
    world_size: int = request.param
    return started_ranks(request.config, world_size)
