"""Refuses weights that a loss function uses while they are sharded, outside of their block's forward."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.errors import LossError

_SHARDS_IN_LOSS = (
    "the loss function uses parameter {!r} outside of its block under strategy 'fsdp', where each rank holds a shard: "
    "weights of a block are gathered only while the block runs. Compute this term in the forward of the block and "
    "return it, or use strategy='zero1', which keeps whole weights on every rank."
)
_VIEWS = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH)


def refuse_gradient_of(name: str) -> Callable[[object], None]:
    """Return a hook that autograd calls if a loss has used a shard itself: its gradient would not be summed."""

    def refuse(_: object) -> None:
        raise LossError(_SHARDS_IN_LOSS.format(name))

    return refuse


class ShardWatch(TorchFunctionMode):
    """Refuses operations on shards, before torch raises a raw error or computes with parts of weights.

    Args:
        names: of the trainable parameters, by the id of their shard.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (what an operation returns)
        """Run an operation unless it computes with a shard."""
        if getattr(func, "__name__", "") not in {"__get__", "__set__"} or getattr(func, "__self__", None) in _VIEWS:
            for one in args:
                if id(one) in self._names:
                    raise LossError(_SHARDS_IN_LOSS.format(self._names[id(one)]))
        return func(*args, **(kwargs or {}))
