"""Private torch APIs that planning uses: their behavior, and the fallback if torch lacks them."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.core.torch_internals import outside_modes
from anybatch.errors import UnsupportedTorchError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import FakeTensorMode
from anybatch.planner.torch_internals import (
    fake_device_getter,
    kernel_library,
    operation,
    registered_operations,
    without_kernels,
    without_subclasses,
)

NOTHING: Any = SimpleNamespace()
aten = torch.ops.aten


def test_operations_are_found_by_name() -> None:
    """An unknown operation raises."""
    assert operation("equal.default") is aten.equal.default
    with pytest.raises(UnsupportedTorchError, match=r"not_there\.default"):
        operation("not_there.default")


def test_registered_kernels_are_taken_back() -> None:
    """A replaced kernel is restored, also after an error; a library that cannot be restored raises."""
    with pytest.raises(KeyError), kernel_library() as library:  # noqa: PT012 (the claim is about the context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("relu", lambda _: torch.full((1,), 7.0), "CPU", allow_override=True)
        assert torch.relu(torch.ones(1)).item() == 7
        raise KeyError
    assert torch.relu(torch.ones(1)).item() == 1
    with pytest.raises(UnsupportedTorchError, match="autocast"), kernel_library(lambda: NOTHING):
        pass


def test_modes_can_be_left() -> None:
    """Inside the context a ledger sees nothing; afterwards it does again."""
    with MemoryLedger() as ledger:
        with outside_modes():
            hidden = torch.ones(100)
        assert ledger.held_bytes == 0
        seen = torch.ones(100)
        assert ledger.held_bytes == seen.nbytes
    del hidden


def test_the_device_of_a_tensor_without_data() -> None:
    """A fake tensor's device is read through the private getter, or else by its property."""
    with FakeTensorMode():
        tensor: Any = torch.empty(2, device="cuda:1")

    class Plain:
        fake_device = torch.device("cuda", 2)

    assert fake_device_getter()(tensor) == tensor.fake_device == torch.device("cuda", 1)
    assert fake_device_getter(Plain)(Plain()) == torch.device("cuda", 2)


@pytest.mark.parametrize(
    ("ask", "purpose"),
    [
        (lambda of: registered_operations("CPU", of), "autocast"),
        (partial(without_kernels, "AutocastCPU"), "step"),
        (without_subclasses, "Planning a step"),
        (outside_modes, "within a run"),
    ],
)
def test_missing_torch_features_are_refused(ask: Callable[[Any], object], purpose: str) -> None:
    """Without a safe fallback, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError, match=purpose):
        ask(NOTHING)
