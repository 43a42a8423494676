"""What holds for every test: one thread, the same random state to start from, shapes checked, nothing left behind."""

import os
import random
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

from tests.architecture.leak_police import leaks_since, take_snapshot
from tests.architecture.shape_checker import CHECKER, shaped_modules
from tests.architecture.source_tree import PACKAGES

assert not {"anybatch", "anybatch_guide"} & sys.modules.keys(), (
    "anybatch was imported before its shapes could be checked"
)
install_import_hook([name for package in PACKAGES for name in shaped_modules(package.parent)], CHECKER)


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
    hypothesis.register_random(TORCH_RANDOM)
    hypothesis.settings.register_profile(
        "anybatch",
        deadline=None,  # a busy machine is no reason to fail
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the same
        derandomize="CI" in os.environ,
        print_blob=True,
    )
    hypothesis.settings.load_profile("anybatch")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and start from one random state, whichever tests ran before."""
    for marker in item.iter_markers("gpu"):
        wanted, found = marker.args[0] if marker.args else 1, torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, found {found}")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves variables, settings, threads, processes or a process group behind."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before)
    if leaks:
        pytest.fail("the test left behind:\n" + "\n".join(leaks), pytrace=False)
