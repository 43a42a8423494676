"""Chapter 12: the buffers of a model at one moment, to be put back after a forward that was not in earnest."""

import torch
from torch import nn


class BufferValues:
    """The values of all buffers at one moment.

    Args:
        modules: what has them.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back, also where a module has replaced the tensor."""
        for module, name, buffer, value in self._kept:
            buffer.copy_(value)
            setattr(module, name, buffer)
