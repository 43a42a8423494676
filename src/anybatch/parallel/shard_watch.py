"""Refuse losses that use sharded weights outside of their block's forward, or that run a backward."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from anybatch.core.tree import tensors_of
from anybatch.errors import LossError

_SHARDS_IN_LOSS = (
    "the loss function uses parameter {!r} outside of its block under strategy 'fsdp', where each rank holds a shard: "
    "weights of a block are gathered only while the block runs. Compute this term in the forward of the block and "
    "return it, or use strategy='zero1', which keeps whole weights on every rank."
)
_VIEWS = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH)


def refuse_gradient_of(name: str) -> Callable[[object], None]:
    """Return an autograd hook for a shard that a loss has used directly: its gradient would not be summed."""

    def refuse(_: object) -> None:
        raise LossError(_SHARDS_IN_LOSS.format(name))

    return refuse


class ShardWatch(TorchFunctionMode):
    """Refuses operations on shards, before torch raises an unclear error or computes with parts of weights.

    `names` are the trainable parameters, by the id of their shard.
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
    ) -> Any:  # noqa: ANN401 (the operation's result)
        """Run an operation unless it computes with a shard."""
        if getattr(func, "__name__", "") not in {"__get__", "__set__"} or getattr(func, "__self__", None) in _VIEWS:
            for one in args:
                if id(one) in self._names:
                    raise LossError(_SHARDS_IN_LOSS.format(self._names[id(one)]))
        return func(*args, **(kwargs or {}))


class BackwardInLoss:
    """Notices a backward through a sharded module inside the loss function: it frees weights that are needed again."""

    def __init__(self) -> None:
        self._runs = False
        self._found = False

    def begin(self) -> None:
        """Begin a call of the loss function."""
        self._runs, self._found = True, False

    def ended(self) -> bool:
        """End the call; return whether a backward has started in it."""
        self._runs = False
        return self._found

    def mark(self, module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401, ARG002 (a forward hook)
        """Watch the outputs of a sharded module; a forward hook."""
        if not self._runs or torch.compiler.is_compiling():
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._note)

    def _note(self, gradient: object) -> None:  # noqa: ARG002 (a hook's signature)
        self._found = self._found or self._runs
