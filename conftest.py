"""What holds for every test: one thread, the same random state to start from, shapes checked, nothing left behind."""

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import hypothesis
import numpy as np
import pytest
import torch

from tests.architecture.leak_police import leaks_since, take_snapshot
from tests.architecture.shape_checker import check_imported, shaped_modules
from tests.architecture.source_tree import PACKAGES

assert not {"anybatch", "anybatch_guide"} & sys.modules.keys(), (
    "anybatch was imported before its shapes could be checked"
)
check_imported([name for package in PACKAGES for name in shaped_modules(package.parent)])

from anybatch.testing.ranks import PRELOADED, rank_context  # noqa: E402 (not before its shapes are checked)
from tests.ranks_fixture import leaks_on_ranks  # noqa: E402 (the same)

RANK_FIXTURES = frozenset({"one_rank", "two_ranks", "three_ranks", "four_ranks", "ranks"})
SLOW_FIXTURES = frozenset({"browser"})
IMPORTED_ON_RANKS = (
    "torch._dynamo",  # by the first optimizer of a process
    "torch._functorch.aot_autograd",  # by the first network that is compiled
    "torch.distributed.optim",  # by zero1
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "anybatch.recipes.run.session",
    "hypothesis",  # by the files of the tests that ranks run functions of
    "pytest",
)
LONG_FILES = (
    *("guide/tests/browser/test_whole_page.py", "tests/cli/test_processes.py"),
    *("guide/tests/browser/test_live_page.py", "tests/diagnostics/test_check_loop.py"),
    *("tests/engine/test_oom_retry.py", "tests/cli/test_hosts.py", "tests/engine/test_compatibility.py"),
    *("tests/parallel/test_fsdp.py", "tests/engine/test_two_pass.py", "tests/parallel/test_model_groups.py"),
    *("guide/tests/test_planner.py", "tests/planner/test_sharded_plan.py", "tests/recipes/test_planning.py"),
    *("guide/tests/test_runs.py", "guide/tests/browser/test_answered_list.py", "guide/tests/test_tracing.py"),
)
"""Files whose tests take longest: they begin first, so that none is still at work when all others are done."""
NOT_FAST = ("slow", "ranks", "published")
"""Marks of tests that `make test-fast` leaves out."""
MOST_SECONDS = 10.0  # forty times what a test without a mark may take: a slow, busy machine is no reason to fail


class TorchRandom:
    """Torch's generator as Hypothesis wants to see one, so that it seeds it for every example and replays that."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def getstate(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    def setstate(self, state: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps no reference of its own


def pytest_configure(config: pytest.Config) -> None:
    """Settle what all tests run under; what is kept for the user from run to run is kept in a folder of theirs."""
    caches = tempfile.TemporaryDirectory(prefix="anybatch-tests-")
    config.add_cleanup(caches.cleanup)
    os.environ["XDG_CACHE_HOME"] = caches.name
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # programs that tests start: several at a time, on the same cores
    resource_tracker.ensure_running()  # Python keeps it, and the first test with processes would start it
    hypothesis.register_random(TORCH_RANDOM)
    hypothesis.settings.register_profile(
        "anybatch",
        deadline=None,  # a busy machine is no reason to fail
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the same
        derandomize="CI" in os.environ,
        print_blob=True,
    )
    hypothesis.settings.load_profile("anybatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a part of the tests be drawn."""
    parser.addoption("--draw", type=float, default=1.0, metavar="X", help="run this part of the tests, drawn by --seed")
    parser.addoption("--seed", default="", metavar="WORD", help="what --draw draws by, such as a commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs ranks, before tests are selected by their markers; a browser is slow to start."""
    part, seed = config.getoption("draw"), config.getoption("seed")
    # Each test by itself, so that all processes of a run draw alike.
    items[:] = [item for item in items if random.Random(f"{seed} {item.nodeid}").random() < part]
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if names & RANK_FIXTURES:
            item.add_marker("ranks")
        if names & SLOW_FIXTURES:
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what ranks are forked from before any test: it stays until the end, and no test has left it behind.

    What was imported and collected stays as well: no garbage collection of a test has to look through it.
    """
    gc.freeze()
    if not any(item.get_closest_marker("ranks") for item in session.items):
        return
    context = rank_context()
    if context.get_start_method() == "forkserver":
        # What ranks would import by themselves, for seconds: here once, not on every rank.
        context.set_forkserver_preload([*PRELOADED, *IMPORTED_ON_RANKS])
        forkserver.ensure_running()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take the processor time of a test, and in CI fail one of `make test-fast` that takes long."""
    begin = processor_seconds()
    yield
    seconds = processor_seconds() - begin
    item.user_properties.append(("processor_seconds", round(seconds, 2)))
    if "CI" in os.environ and seconds > MOST_SECONDS and not any(map(item.get_closest_marker, NOT_FAST)):
        pytest.fail(
            f"took {seconds:.1f} s of processor time, more than the {MOST_SECONDS:.0f} s that `make test-fast` allows: "
            "make it smaller, or mark it with pytest.mark.slow",
            pytrace=False,
        )


def processor_seconds() -> float:
    """Return the time that processors have spent on this process and on its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and start from one random state, whichever tests ran before."""
    for marker in item.iter_markers("gpu"):
        wanted, found = marker.args[0] if marker.args else 1, torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    random.seed(0)
    np.random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # which would note the stack three times, for devices that may be initialised later
        TORCH_RANDOM.seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves variables, settings, threads, processes or a process group behind, here or on ranks."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before) + leaks_on_ranks(request.config)
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(leaks), pytrace=False)
