"""Replace `F.batch_norm` inside BatchNorm layers while they run; the layers themselves are not changed."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.core.torch_internals import BatchNormBase


@dataclass(frozen=True, slots=True)
class BatchNormCall:
    """One call of `F.batch_norm` that normalises by the statistics of its input.

    Attributes:
        values: (samples, channels, ...).
        running_mean: identifies the layer, by its buffer; None for a layer without running statistics.
        weight: per channel, or None.
        bias: per channel, or None.
        eps: added to the variance.
    """

    values: Tensor
    running_mean: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float


Normalise = Callable[[BatchNormCall], Tensor]


class Interceptor:
    """Replaces the normalisation of BatchNorm layers in train mode by another function, while one is set.

    The rest of a layer's forward, a fused activation, say, runs as before. Hooks enter the context around each layer
    only. So it costs nothing elsewhere, and is active in any thread that runs the layer, even if a backward recomputes
    a checkpointed block. Compiled layers are not intercepted.
    """

    def __init__(self, layers: Iterable[BatchNormBase]) -> None:
        self._everywhere: Normalise | None = None
        self._thread = threading.local()
        self._handles = [
            handle
            for layer in layers
            for handle in (
                layer.register_forward_pre_hook(self._enter),
                # Always: after an error in the layer the mode would stay active, and intercept calls of later layers.
                layer.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def everywhere(self, normalise: Normalise | None) -> Iterator[None]:
        """Use a function in all threads; with None layers normalise as usual."""
        self._everywhere = normalise
        try:
            yield
        finally:
            self._everywhere = None

    @contextmanager
    def in_this_thread(self, normalise: Normalise) -> Iterator[None]:
        """Use a function in this thread only."""
        self._thread.normalise = normalise
        try:
            yield
        finally:
            self._thread.normalise = None

    def _enter(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        normalise = getattr(self._thread, "normalise", None) or self._everywhere
        if normalise is None or not layer.training:
            return
        self._thread.mode = _InsteadOfBatchNorm(normalise)
        # Manually, because a `with` block cannot span two hooks.
        self._thread.mode.__enter__()

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del layer, args, output
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.__exit__(None, None, None)


class _InsteadOfBatchNorm(TorchFunctionMode):
    """A context that replaces `F.batch_norm`."""

    def __init__(self, normalise: Normalise) -> None:
        super().__init__()
        self._normalise = normalise

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the result of torch's function)
        """Run a function of torch, or our replacement of `F.batch_norm`."""
        del types
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(  # noqa: PLR0917 (torch's signature)
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            # No recursion: a mode is off while it handles a function.
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        # Like torch's kernel, whose input autocast does not convert.
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(BatchNormCall(input, running_mean, weight, bias, eps))
