"""CPU tensors that allocate like CUDA's: autocast's lists, tensors that kernels save, and a complete restore."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from anybatch.memory.ledger import MemoryLedger
from anybatch.planner.cuda_emulation import POLICIES, Profile, allocating_as, choose_foreach
from anybatch.planner.fake_tensor_cache import FakeLedger, fake_mode
from anybatch.planner.torch_internals import registered_operations
from tests.planner.profiled import most_allocated

Function = Callable[[torch.Tensor], torch.Tensor]


def registrations() -> dict[str, str]:
    """Return every kernel of every operation in autocast's lists, as torch prints them."""
    names = registered_operations("AutocastCPU") | registered_operations("AutocastCUDA")
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in sorted(names)}  # noqa: SLF001 (its only name)


def test_autocast_is_restored() -> None:
    """Every kernel in autocast's lists is restored after the profile, also after an error in it."""
    before = registrations()
    within: list[dict[str, str]] = []

    def fail() -> None:
        with allocating_as("cuda"):
            within.append(registrations())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert within[0] != before
    assert registrations() == before


def test_every_operation_of_autocast_on_cuda_has_a_policy() -> None:
    """The table covers the operations only AutocastCUDA has, except two unused ones and, in cuDNN builds, its RNNs."""
    named = {name for names in POLICIES.values() for name in names}

    missing = registered_operations("AutocastCUDA") - registered_operations("AutocastCPU") - named
    assert missing - {"_cudnn_rnn"} == {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert named <= registered_operations("AutocastCUDA")


@pytest.mark.parametrize(
    ("function", "on_cpu", "on_cuda"),
    [
        (lambda x: x @ x, torch.bfloat16, torch.bfloat16),
        (lambda x: (x @ x).softmax(-1), torch.bfloat16, torch.float32),
        (lambda x: functional.layer_norm(x @ x, (4,)), torch.bfloat16, torch.float32),
        (lambda x: (x @ x).sum(), torch.bfloat16, torch.float32),
        (lambda x: (x @ x).sum(dtype=torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (lambda x: (x @ x).exp(), torch.bfloat16, torch.float32),
        (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x @ x, 2, [1]), torch.bfloat16, torch.float32),
        (lambda x: torch.dot((x @ x)[0], x[0]), None, torch.float32),
        (lambda x: torch.mv(x, x[0]), torch.float32, torch.bfloat16),
        (lambda x: functional.rms_norm(x @ x, (4,)), torch.bfloat16, torch.float32),
    ],
)
def test_autocast_casts_as_on_cuda(function: Function, on_cpu: torch.dtype | None, on_cuda: torch.dtype) -> None:
    """Results have the dtypes of CUDA's autocast lists, which partly differ from the CPU's."""
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        values = torch.empty(4, 4)
        if on_cpu is not None:
            assert function(values).dtype is on_cpu
        with allocating_as("cuda"):
            assert function(values).dtype is on_cuda


def kept_bytes(function: Function, profile: Profile) -> int:
    """Return the bytes still allocated after a forward, without its input and output."""
    with FakeTensorMode(), allocating_as(profile), MemoryLedger() as ledger:
        values = torch.empty(8, 2, 16, 32, requires_grad=True)
        result = function(values)
        return ledger.held_bytes - int(values.nbytes) - int(result.nbytes)


@pytest.mark.parametrize(
    ("function", "on_cuda", "on_cpu"),
    [
        (lambda x: functional.dropout(x, 0.1), 1, 4),
        (nn.Dropout(0.5), 1, 4),
        (lambda x: functional.dropout(x.exp(), 0.1, inplace=True), 4, 4),
        (lambda x: functional.scaled_dot_product_attention(x, x, x), 4 / 32, 4 / 32),
        (lambda x: functional.rms_norm(x.bfloat16().relu(), (32,)), 2 + 4 / 32, 2 + 4 + 4 / 32),
    ],
)
def test_kernels_save_the_tensors_of_cudas(function: Function, on_cuda: float, on_cpu: float) -> None:
    """Saved bytes per value: dropout saves one for its mask, attention and RMS norm save four per row of 32."""
    number = 8 * 2 * 16 * 32

    assert kept_bytes(function, "cuda") == on_cuda * number
    assert kept_bytes(function, "cpu") == on_cpu * number


PRODUCTS: dict[str, Function] = {
    "prod": lambda x: x.prod(),
    "of an axis": lambda x: x.prod(1),
    "of a kept axis": lambda x: x.prod(-1, keepdim=True),
    "in float64": lambda x: x.prod(1, dtype=torch.float64),
    "of prefixes": lambda x: x.cumprod(1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_allocate_as_without_a_mode(name: str) -> None:
    """A mode makes the backward of products allocate more; the planner's products do not, and are differentiable."""

    def gradient() -> torch.Tensor:
        values = torch.full((40, 30), 0.99, requires_grad=True)
        (found,) = torch.autograd.grad(PRODUCTS[name](values).square().sum(), values)
        return found

    expected, allocated = gradient(), most_allocated(gradient)
    with allocating_as("cpu"):
        assert torch.allclose(gradient(), expected)
        with fake_mode() as mode, FakeLedger(mode) as ledger:
            gradient()

    assert ledger.peak_bytes == pytest.approx(allocated, rel=0.01)


def test_folded_patches_keep_the_memory_of_a_copy() -> None:
    """The result of `fold` is a part of memory as large as the patches."""
    with fake_mode() as mode, FakeLedger(mode):
        patches = torch.ones(2, 3 * 64, 49)
        fake = functional.fold(patches, (32, 32), 8, stride=4).untyped_storage().nbytes()
    real = functional.fold(torch.ones(2, 3 * 64, 49), (32, 32), 8, stride=4).untyped_storage().nbytes()

    assert fake == real == 4 * 2 * 3 * 64 * 49


def test_attention_with_dropout_keeps_no_scores_on_cuda() -> None:
    """On CUDA the backward draws the mask again, so dropout saves nothing more; a CPU saves the scores."""

    def attend(values: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(values, values, values, dropout_p=0.1)

    assert kept_bytes(attend, "cuda") == 4 * 8 * 2 * 16
    assert kept_bytes(attend, "cpu") > 4 * 8 * 2 * 16 * 16


def test_foreach_is_set_as_on_cuda() -> None:
    """An unset `foreach` becomes True on CUDA and stays unset on a CPU; an explicit choice, and fused, stay."""
    weights = [nn.Parameter(torch.zeros(2))]
    made = {
        "open": torch.optim.AdamW(weights),
        "asked": torch.optim.AdamW(weights, foreach=False),
        "fused": torch.optim.AdamW(weights, fused=True),
        "tensor": torch.optim.AdamW(weights, lr=torch.tensor(1e-3), foreach=None),
    }

    choose_foreach(made["open"], "cpu")
    assert made["open"].param_groups[0]["foreach"] is None
    for optimizer in made.values():
        choose_foreach(optimizer, "cuda")

    chosen = {name: optimizer.param_groups[0]["foreach"] for name, optimizer in made.items()}
    assert chosen == {"open": True, "asked": False, "fused": None, "tensor": False}
