"""Private torch interfaces that norms use: their behaviour, and the fallback if torch lacks them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.core.torch_internals import checkpointed_forward, num_axes_unbatched
from anybatch.errors import UnsupportedTorchError

NOTHING: Any = SimpleNamespace()


def test_a_checkpointed_forward_is_run_again() -> None:
    """A checkpointed forward saves nothing; the backward recomputes it, and the gradient is right."""
    calls = 0
    weight = nn.Parameter(torch.tensor([3.0]))

    class Block(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return (values * weight).square()

    block, values = Block(), torch.tensor([2.0])
    running = checkpointed_forward(block, lambda: (nullcontext(), nullcontext()), (values,), {})
    next(running)
    output = block(values)
    assert next(running, "ended") == "ended"
    output.sum().backward()

    assert calls == 2
    assert weight.grad is not None
    assert float(weight.grad) == 2 * 3 * 2 * 2


def test_axes_of_one_sample_are_known_without_asking() -> None:
    """Without torch's private property the number of axes comes from the layer class; unknown classes are refused."""

    class Silent(nn.InstanceNorm2d):
        @property
        def _get_no_batch_dim(self) -> Any:
            raise AttributeError

    class Unknown(nn.InstanceNorm2d.__base__):  # type: ignore[name-defined, misc]
        @property
        def _get_no_batch_dim(self) -> Any:
            raise AttributeError

    assert num_axes_unbatched(Silent(2)) == 3
    with pytest.raises(UnsupportedTorchError):
        num_axes_unbatched(Unknown(2))


def test_what_torch_lacks_is_refused() -> None:
    """If a private interface is missing and no fallback is safe, the error names the missing feature."""
    with pytest.raises(UnsupportedTorchError):
        checkpointed_forward(nn.Identity(), lambda: (nullcontext(), nullcontext()), (), {}, NOTHING)
    other = SimpleNamespace(_checkpoint_without_reentrant_generator=lambda _: iter(()))
    with pytest.raises(UnsupportedTorchError):
        checkpointed_forward(nn.Identity(), lambda: (nullcontext(), nullcontext()), (), {}, other)
