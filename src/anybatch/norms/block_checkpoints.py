"""Activation checkpointing of a model's blocks, by hooks instead of wrappers."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from anybatch.core.torch_internals import BatchNormBase
from anybatch.errors import ParameterError
from anybatch.norms.torch_internals import checkpointed_forward


def blocks_of(modules: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks to checkpoint by name; None selects the outermost non-root modules with a BatchNorm child."""
    named = dict(modules.named_modules())
    if names is not None:
        unknown = [name for name in names if name not in named]
        if unknown:
            message = f"blocks={names!r} names {unknown[0]!r}, which is not a module of the model. See named_modules()."
            raise ParameterError(message)
        return {name: named[name] for name in names}
    models = {modules, *(modules.children() if isinstance(modules, nn.ModuleDict) else ())}
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if module not in models and not inside and any(isinstance(child, BatchNormBase) for child in module.children()):
            found[name] = module
    return found


class BlockCheckpoint:
    """Checkpoints one module in train mode with `torch.utils.checkpoint`'s own code for use_reentrant=False.

    The module is neither wrapped nor patched, so its name and its parameters' names stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._running: list[Generator[None, None, None]] = []
        self._recomputing = False
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Recomputation in the backward also runs the hooks, but must not checkpoint the block again.
        if self._recomputing or not module.training:
            return
        running = checkpointed_forward(module, self._contexts, args, kwargs)
        next(running)
        self._running.append(running)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Let the block run again in the backward without another checkpoint."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if not self._recomputing and self._running:
            # Run the generator to its end; the default suppresses StopIteration.
            next(self._running.pop(), None)
