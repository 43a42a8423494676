"""Settings for all tests: one thread, a fixed random state, shape checks, and no leftovers."""

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

from anybatch.parallel.launchers import rank_context  # noqa: E402 (not before its shapes are checked)
from anybatch.testing.ranks import PRELOADED  # noqa: E402 (the same)
from tests.ranks_fixture import leaks_on_ranks  # noqa: E402 (the same)

RANK_FIXTURES = frozenset({"one_rank", "two_ranks", "three_ranks", "four_ranks", "ranks"})
SLOW_FIXTURES = frozenset({"browser"})
IMPORTED_ON_RANKS = (
    "torch._dynamo",  # by a process's first optimizer
    "torch._functorch.aot_autograd",  # by the first compiled network
    "torch.distributed.optim",  # by zero1
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "anybatch.recipes.session",
    "hypothesis",  # by test files whose functions run on ranks
    "pytest",
)
LONG_FILES = (
    *("tests/parallel/test_fsdp.py", "tests/diagnostics/test_check_loop.py", "tests/engine/test_oom_retry.py"),
    *("tests/engine/test_two_pass.py", "tests/planner/test_sharded_plan.py", "tests/cli/test_local_ranks.py"),
    *("tests/engine/test_exactness.py", "tests/recipes/test_planning.py", "guide/tests/test_playground_ranks.py"),
)
"""The slowest test files: they start first, so that none runs alone at the end."""
DRAWN_FILES = (
    *("tests/engine/test_compatibility.py", "tests/cli/test_hosts.py"),
    *("tests/engine/test_misbehaving_ranks.py",),
    *("guide/tests/browser/test_whole_page.py", "guide/tests/browser/test_live_page.py"),
    *("guide/tests/browser/test_later_parts.py", "guide/tests/browser/test_answered_list.py"),
)
"""Files whose tests take longest and fail most rarely: marked `published`, so CI runs a part of them, by the commit."""


class TorchRandom:
    """Torch's generator in the interface of Hypothesis, which seeds and restores it for every example."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def getstate(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    def setstate(self, state: bytes) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps only a weak reference


def pytest_configure(config: pytest.Config) -> None:
    """Configure all tests; caches of the user go to a temporary folder."""
    caches = tempfile.TemporaryDirectory(prefix="anybatch-tests-")
    config.add_cleanup(caches.cleanup)
    os.environ["XDG_CACHE_HOME"] = caches.name
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # programs started by tests run in parallel on the same cores
    resource_tracker.ensure_running()  # Python keeps it running, and the first test with processes would start it
    hypothesis.register_random(TORCH_RANDOM)
    hypothesis.settings.register_profile(
        "anybatch",
        deadline=None,  # a busy machine must not fail tests
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # likewise
        max_examples=100 if "CI" in os.environ else 30,  # other ones each time
        derandomize="CI" in os.environ,
        print_blob=True,
    )
    hypothesis.settings.load_profile("anybatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options to draw a part of the tests."""
    parser.addoption("--draw", type=float, default=1.0, metavar="X", help="run this part of the tests, drawn by --seed")
    parser.addoption("--seed", default="", metavar="WORD", help="what --draw draws by, such as a commit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before tests are selected by markers, mark tests that need ranks or a browser, and all of DRAWN_FILES."""
    part, seed = config.getoption("draw"), config.getoption("seed")
    # Each test separately, so that all processes draw the same.
    items[:] = [item for item in items if random.Random(f"{seed} {item.nodeid}").random() < part]
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if names & RANK_FIXTURES:
            item.add_marker("ranks")
        if names & SLOW_FIXTURES:
            item.add_marker("slow")
        if item.nodeid.partition("::")[0] in DRAWN_FILES:
            item.add_marker("published")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before any test, so that no test is blamed for it.

    Imported modules and collected tests are exempt from garbage collection, which saves time in tests.
    """
    gc.freeze()
    if not any(item.get_closest_marker("ranks") for item in session.items):
        return
    context = rank_context()
    if context.get_start_method() == "forkserver":
        # Import once, not on every rank, for seconds.
        context.set_forkserver_preload([*PRELOADED, *IMPORTED_ON_RANKS])
        forkserver.ensure_running()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need more GPUs than available, and set a fixed random state."""
    for marker in item.iter_markers("gpu"):
        wanted, found = marker.args[0] if marker.args else 1, torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    random.seed(0)
    np.random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # which would record the stack three times, for devices that may be initialized later
        TORCH_RANDOM.seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks variables, settings, threads, processes or a process group, here or on ranks."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before) + leaks_on_ranks(request.config)
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(leaks), pytrace=False)
