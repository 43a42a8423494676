"""Find a model's BatchNorm layers in all their forms, and InstanceNorm layers with running statistics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase
from anybatch.errors import CompositionError, ParameterError

Tracking = BatchNormBase | InstanceNormBase
"""A layer with running statistics."""

ModelCall = Callable[[nn.Module, Any], object]
"""Runs a model on a batch, such as `lambda model, batch: model(batch["image"])`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The collectives that normalisation over ranks needs. The default is one rank.

    Attributes:
        size: number of ranks.
        sum: replaces a small tensor on this rank's device by its sum over ranks, and returns it.
        most: returns the largest of the ranks' integers.
    """

    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    most: Callable[[int], int] = lambda number: number


def batch_norms(modules: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorm layers of all kinds by name, in train and in evaluation mode."""
    return {name: module for name, module in modules.named_modules() if isinstance(module, BatchNormBase)}


def tracking_layers(modules: nn.Module) -> dict[str, Tracking]:
    """Return the layers with running statistics by name: BatchNorm, and InstanceNorm that tracks them."""
    return {
        name: module
        for name, module in modules.named_modules()
        if isinstance(module, Tracking) and module.running_mean is not None
    }


def refuse_unfit_layers(modules: nn.Module, *, num_ranks: int, frozen: bool) -> None:
    """Refuse layers that no policy supports; with `frozen`, BatchNorm layers use their running statistics.

    Raises:
        ParameterError: a lazy layer without parameters, because it has not seen a batch.
        CompositionError: torch's SyncBatchNorm on several ranks, unless frozen: it communicates in each forward, even
            if ranks run different numbers of micro-batches.
    """
    for name, module in batch_norms(modules).items():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            message = (
                f"layer {name!r} is a {type(module).__name__} that has not seen a batch, so it has no parameters yet. "
                "Run the model on a batch once before the optimizer and the engine are built."
            )
            raise ParameterError(message)
        if isinstance(module, nn.SyncBatchNorm) and num_ranks > 1 and not frozen:
            message = (
                f"layer {name!r} is a SyncBatchNorm, and there are {num_ranks} ranks: it waits for the others in each "
                "forward, which hangs where ranks run different numbers of micro-batches. Use torch's BatchNorm "
                "layers with norms='sync', or norms='exact'."
            )
            raise CompositionError(message)
