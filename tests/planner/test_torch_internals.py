"""Private torch APIs that planning uses: their behavior, and the fallback if torch lacks them."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.core.torch_internals import outside_modes
from anybatch.errors import UnsupportedTorchError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import FakeTensorMode
from anybatch.parallel.torch_internals import Store
from anybatch.planner.torch_internals import (
    checkpointed,
    cuda_driver_number,
    fake_device_getter,
    imagined_store,
    kernel_library,
    known_operations,
    operation,
    registered_operations,
    schema_of,
    without_autocast_kernels,
    without_subclasses,
)

NOTHING: Any = SimpleNamespace()
aten = torch.ops.aten


def test_operations_are_found_by_name() -> None:
    """An unknown operation raises; unknown operations in a list are left out."""
    assert operation("equal.default") is aten.equal.default
    assert known_operations(["mm.default", "mm.not_there", "not_there.default"]) == {aten.mm.default}
    with pytest.raises(UnsupportedTorchError, match=r"not_there\.default"):
        operation("not_there.default")


def test_operations_say_what_they_write_to() -> None:
    """An operation's schema says which arguments it writes to."""
    in_place, pure = schema_of(aten.add_.Tensor), schema_of(aten.add.Tensor)

    assert (in_place.is_mutable, pure.is_mutable) == (True, False)
    assert [argument.name for argument in in_place.arguments if argument.alias_info is not None] == ["self"]
    with pytest.raises(UnsupportedTorchError, match="Planning a step"):
        schema_of(NOTHING)


def test_kernels_of_autocast_are_listed() -> None:
    """Matrix products have a kernel for autocast on CUDA, additions do not."""
    assert "mm" in registered_operations("AutocastCUDA")
    assert "add.Tensor" not in registered_operations("AutocastCUDA")


def test_an_operation_can_pass_by_autocast() -> None:
    """Without its kernels autocast changes no dtype; outside of the context it does."""
    one = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast_kernels():
            assert (one @ one).dtype == torch.float32
        assert (one @ one).dtype == torch.bfloat16


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


class Told(Tensor):
    """A tensor subclass that overrides every torch function."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> str:
        """Return a constant instead of calling torch."""
        return "told"


CORE: Any = torch._C  # noqa: SLF001 (a module that has the context's private name)


@pytest.mark.parametrize("of", [CORE, SimpleNamespace(DisableTorchFunctionSubclass=CORE.DisableTorchFunctionSubclass)])
def test_classes_of_tensors_can_be_passed_by(of: object) -> None:
    """Inside the context a tensor subclass is a plain tensor, under either private name."""
    tensor = torch.ones(2).as_subclass(Told)
    with without_subclasses(of):
        assert float(tensor.sum()) == 2
    assert tensor.sum() == "told"


def test_modes_can_be_left() -> None:
    """Inside the context a ledger sees nothing; afterwards it does again."""
    with MemoryLedger() as ledger:
        with outside_modes():
            hidden = torch.ones(100)
        assert ledger.held_bytes == 0
        seen = torch.ones(100)
        assert ledger.held_bytes == seen.nbytes
    del hidden


def test_a_module_is_checkpointed() -> None:
    """The forward of a checkpointed module runs again in the backward, with the gradient of the plain module."""
    calls = []
    linear = nn.Linear(2, 1)
    linear.register_forward_pre_hook(lambda *_: calls.append(1))
    values = torch.ones(3, 2)
    expected = torch.autograd.grad(linear(values).square().sum(), linear.weight)[0]
    calls.clear()

    checkpointed(linear, {})(values).square().sum().backward()

    assert len(calls) == 2
    torch.testing.assert_close(linear.weight.grad, expected)


def test_there_are_imagined_ranks() -> None:
    """Torch has a store for simulated ranks."""
    assert isinstance(imagined_store(), Store)


def test_the_driver_s_number() -> None:
    """The driver's version comes from torch; None if torch was built without CUDA or lacks the function."""
    ask = SimpleNamespace(_cuda_getDriverVersion=lambda: 12040)

    assert cuda_driver_number(ask) == (None if torch.version.cuda is None else 12040)
    assert cuda_driver_number(NOTHING) is None


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
        (without_autocast_kernels, "autocast"),
        (without_subclasses, "Planning a step"),
        (outside_modes, "within a run"),
    ],
)
def test_what_torch_lacks_is_refused(ask: Callable[[Any], object], purpose: str) -> None:
    """Without a safe fallback, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError, match=purpose):
        ask(NOTHING)
