"""Optimizer states shared out over ranks, as in ZeRO stage 1: each rank updates some parameters, and all get them.

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020, section 5.1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from anybatch.core.tree import map_tensors, tensors_of
from anybatch.parallel.world import World


class ShardedUpdate:
    """An update in which this rank's optimizer steps with its own parameters, and all ranks exchange what is new.

    The user's optimizer keeps its groups, which schedulers and reports read; only while it makes state or steps do
    they hold this rank's parameters alone. So any optimizer can be shared out that updates each parameter by itself.

    The plain loop: `optimizer.step()` over the parameters that `owners` gives this rank, then a broadcast of each
    parameter from its owner.

    Args:
        optimizer: over all parameters.
        parameters: what it updates, in an order that is the same on all ranks.
        world: the ranks.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._optimizer = optimizer
        self._world = world
        self._parameters = list(parameters)
        self._owners = owners([parameter.numel() for parameter in parameters], world.size)
        self._own = {id(p) for p, owner in zip(self._parameters, self._owners, strict=True) if owner == world.rank}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the optimizer see this rank's parameters alone, and keep the state of no other."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        whole = [list(parameters) for parameters in groups]
        # A checkpoint has brought the state of all.
        for parameter in [p for p in self._optimizer.state if id(p) not in self._own]:
            del self._optimizer.state[parameter]
        try:
            for parameters in groups:
                parameters[:] = [parameter for parameter in parameters if id(parameter) in self._own]
            yield
        finally:
            for parameters, every in zip(groups, whole, strict=True):
                parameters[:] = every

    def exchange(self) -> None:
        """Give every rank the parameters that their owners have updated."""
        works = []
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            # A collective needs contiguous memory; the parameter keeps its own strides (channels-last weights, say).
            sent = parameter.detach().contiguous()
            with self._world.collective():
                works.append((dist.broadcast(sent, src=owner, async_op=True), sent, parameter))
        for work, sent, parameter in works:
            assert work is not None
            self._world.wait(work)
            if sent.data_ptr() != parameter.data_ptr():
                with torch.no_grad():
                    parameter.copy_(sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's whole state on rank 0; on others what it is that they have. All ranks call it."""
        found = self._optimizer.state_dict()
        own = found["state"]
        described = self._world.gather_objects(
            map_tensors(own, lambda tensor: torch.empty_like(tensor, device="meta")) if own else {}
        )
        for owner, forms in enumerate(described):
            if owner == 0:
                continue
            for number, form in forms.items():
                mine = form if self._world.rank != owner else own[number]
                received = iter([self._sent(tensor, owner) for tensor in tensors_of(mine)])
                if self._world.rank == 0:
                    own[number] = map_tensors(form, partial(_next, received))
        found["state"] = dict(sorted(own.items()))
        return found

    def _sent(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Return a tensor of the owner on every rank, where it lies on the device that updates."""
        device = self._world.device
        sent = (
            tensor.detach().to(device).contiguous()
            if self._world.rank == owner
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        )
        with self._world.collective():
            work = dist.broadcast(sent, src=owner, async_op=True)
            assert work is not None
            self._world.wait(work)
        return sent


def _next(tensors: Iterator[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return next(tensors)


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return which rank owns each of several parameters: the largest first, each to the rank with the least so far.

    Args:
        sizes: numbers of each parameter.
        num_ranks: how many ranks there are.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the best largest share.
    """
    held, found = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        rank = held.index(min(held))
        held[rank] += sizes[place]
        found[place] = rank
    return found
