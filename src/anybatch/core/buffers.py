"""Chapter 12: snapshots of a model's buffers, to restore them after a trial forward or a failed step."""

import operator

import torch
from torch import nn

from anybatch.core.torch_internals import buffer_tables, copy_each


class BufferValues:
    """A snapshot of all buffers' values, copied when it is made."""

    def __init__(self, modules: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values, even if a module has replaced the tensor."""
        for module, name, buffer, value in self._kept:
            buffer.copy_(value)
            setattr(module, name, buffer)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


class BufferKeeper:
    """A snapshot of all buffers' values that every step renews in the same memory.

    It costs nothing for a model without buffers. Modules that are added later are ignored.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._owners = buffer_tables(modules)
        self._before: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]] = []
        self._values: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        """Take the snapshot: copy the current values."""
        self._before = [(owner, dict(owner)) for owner in self._owners if owner]
        values = [value for _, named in self._before for value in named.values() if value is not None]
        # A forward may replace a buffer by a new tensor (`self.running_mean = ...`), whose shape may differ.
        fits = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not fits and not (len(values) == len(self._copies) and all(map(_alike, values, self._copies))):
            self._copies = [torch.empty_like(value) for value in values]
        self._values = values
        if values:
            with torch.no_grad():
                copy_each(self._copies, values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the last snapshot, even if a module has replaced, added or dropped a tensor."""
        # Clear first, to remove buffers that the forward has added.
        for owner in self._owners:
            owner.clear()
        for owner, named in self._before:
            owner.update(named)
        if self._values:
            copy_each(self._values, self._copies)
