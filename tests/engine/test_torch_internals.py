"""Private torch interfaces that the engine uses: their behaviour, and the fallback if torch lacks them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch.engine.torch_internals import (
    TrainableParts,
    accumulation_hooks,
    active_dispatch_modes,
    is_in_checkpoint,
    packing_function,
    tensor_hooks,
    widened,
    without_tensor_hooks,
)
from anybatch.errors import UnsupportedTorchError

NOTHING: Any = SimpleNamespace()


def test_a_checkpointed_forward_is_told_from_others() -> None:
    """`is_in_checkpoint` is true inside `checkpoint(use_reentrant=False)` only, not under other hooks."""
    seen = []

    def forward(values: torch.Tensor) -> torch.Tensor:
        seen.append(is_in_checkpoint())
        return values * 2

    values = torch.ones(1, requires_grad=True)
    forward(values)
    checkpoint(forward, values, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        forward(values)

    assert seen == [False, True, False]


class Cached(nn.Module):
    """Caches a table in its forward, and calls a method through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.table: torch.Tensor | None = None
        self.call = self.encode

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones_like(x)
        found: torch.Tensor = self.inner(x) + self.table
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def test_wider_copies_are_modules_of_their_own() -> None:
    """Widened copies compute the same in float64, also recurrent layers; the originals stay unchanged."""
    torch.manual_seed(0)
    cached, recurrent = Cached(), nn.LSTM(2, 2)
    for module in (cached, recurrent):
        before = list(module.parameters())
        wide, copy_of = widened(module, torch.float64)
        x = torch.randn(3, 2)
        expected, found = module(x), wide(x.double())
        one, other = (value if isinstance(value, torch.Tensor) else value[0] for value in (expected, found))

        assert other.dtype is torch.float64
        torch.testing.assert_close(other.float(), one)
        assert all(a is b and a.dtype is torch.float32 for a, b in zip(before, module.parameters(), strict=True))
        assert copy_of(before[0]) is next(wide.parameters())
        assert copy_of(module) is wide
    assert cached.table is not None
    assert cached.table.dtype is torch.float32


@pytest.mark.parametrize(
    ("ask", "purpose"),
    [
        (is_in_checkpoint, "exact"),
        (active_dispatch_modes, "exact"),
        (packing_function, "per_sample"),
    ],
)
def test_what_torch_lacks_is_refused(ask: Callable[[Any], object], purpose: str) -> None:
    """Without a safe fallback, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError, match=purpose):
        ask(NOTHING)


def test_hooks_on_parameters_are_listed_and_taken_off_for_a_while() -> None:
    """Both kinds of hooks are listed; removed hooks return afterwards, and their handles still work."""
    plain, hooked = (nn.Parameter(torch.ones(1)) for _ in range(2))
    handle = hooked.register_hook(torch.neg)
    hooked.register_post_accumulate_grad_hook(lambda _: None)

    assert [number for number, _ in tensor_hooks([plain, hooked])] == [1]
    assert [number for number, _ in accumulation_hooks([plain, hooked])] == [1]
    with without_tensor_hooks([plain, hooked]):
        hooked.sum().backward()
    hooked.sum().backward()
    assert hooked.grad is not None
    assert float(hooked.grad) == 1 - 1
    handle.remove()
    assert tensor_hooks([plain, hooked]) == []


@pytest.mark.parametrize(
    "ask", [tensor_hooks, accumulation_hooks, lambda found: without_tensor_hooks(found).__enter__()]
)
def test_hooks_that_torch_does_not_show_are_refused(ask: Callable[[Any], object]) -> None:
    """Hidden hooks are refused, because they would silently run in every micro-batch."""
    with pytest.raises(UnsupportedTorchError):
        ask([NOTHING])
    with pytest.raises(UnsupportedTorchError):
        TrainableParts(SimpleNamespace(modules=lambda: [NOTHING]))  # type: ignore[arg-type]
