"""FSDP2 behind the strategy seam: a sketch that shows what a sharding strategy needs, not a product."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from anybatch.parallel.strategy import Capabilities, ParameterLayout, Prepared, ReductionObserver, Turn, trainable
from anybatch.parallel.world import World


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm over all shards of all ranks."""
    norm: Any = torch.nn.utils.get_total_norm(list(gradients))
    whole: torch.Tensor = norm.full_tensor()
    return whole


def gather(tensor: Any) -> torch.Tensor:
    """Return a sharded tensor in one piece; others are whole on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, sharded like another."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


SHARDED = ParameterLayout(
    local=lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor,
    gather=gather,
    scatter=scatter,
    norm=total_norm,
)


class FullyShard:
    """Shards parameters, gradients and optimizer state; every forward gathers, so ranks run in lockstep.

    Args:
        defer: keep whole gradients in memory and reduce them in the last micro-batch only; otherwise shards are
            reduced in every one.
    """

    capabilities = Capabilities(name="fully_shard", lockstep=True, replaces_parameters=True)

    def __init__(self, *, defer: bool = True) -> None:
        self._defer = defer
        self._sharded: list[FSDPModule] = []
        self._parameters: list[nn.Parameter] = []

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Shard every child and then the rest, and have all of them sum."""
        del on_reduction  # FSDP2 tells nobody when it reduces
        mesh = init_device_mesh("cpu", (world.size,))
        for child in modules.children():
            if any(parameter.requires_grad for parameter in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(modules, mesh=mesh)
        self._sharded = [module for module in modules.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        parameters = trainable(modules)
        self._parameters = list(parameters.values())
        return Prepared(parameters=parameters, call=lambda function, batch: function(model, batch), layout=SHARDED)

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Choose whether this backward reduces."""
        for module in self._sharded:
            module.set_requires_gradient_sync(turn.last or not self._defer, recurse=False)
            module.set_is_last_backward(turn.last)
        return nullcontext()

    def finish_gradients(self, numbers: torch.Tensor) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """Return the shards that the last backward has reduced."""
        return [parameter.grad for parameter in self._parameters], self.sum(numbers)

    def place_gradients(self) -> None:
        """Begin with none."""
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Let the shards' gradients go."""
        for parameter in self._parameters:
            parameter.grad = None

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor."""
        dist.all_reduce(numbers)
        return numbers

    def close(self) -> None:
        """Nothing to remove: a sharded module stays sharded."""
