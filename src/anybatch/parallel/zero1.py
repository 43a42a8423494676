"""Strategy "zero1": replicas as in `all_reduce`, with optimizer state sharded over ranks (ZeRO stage 1)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import Feature
from anybatch.core.tree import map_tensors, tensors_of
from anybatch.parallel.all_reduce import BucketSums
from anybatch.parallel.replicas import Initial
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionNotifier
from anybatch.parallel.world import World

_SMALL_BYTES = 1 << 16
"""Size up to which a message's latency exceeds the cost of copying its content."""


class ShardedUpdate:
    """An update in which each rank updates only some parameters, which it "owns", and sends them to the other ranks.

    Schedulers and reports read the groups of the user's optimizer, so these are kept. While the optimizer steps or
    creates state, they have only this rank's parameters. So any optimizer works that updates parameters independently.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._optimizer = optimizer
        self._world = world
        owners = _owners([parameter.numel() for parameter in parameters], world.size)
        self._own_ids = {id(p) for p, owner in zip(parameters, owners, strict=True) if owner == world.rank}
        self._bundles = _bundled(parameters, owners)

    @contextmanager
    def only_own_parameters(self) -> Iterator[None]:
        """Context in which the optimizer has only this rank's parameters; state of other parameters is dropped."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        all_parameters = [list(parameters) for parameters in groups]
        # A checkpoint contains the state of all parameters.
        for parameter in [p for p in self._optimizer.state if id(p) not in self._own_ids]:
            del self._optimizer.state[parameter]
        try:
            for parameters in groups:
                parameters[:] = [parameter for parameter in parameters if id(parameter) in self._own_ids]
            yield
        finally:
            for parameters, original in zip(groups, all_parameters, strict=True):
                parameters[:] = original

    def exchange(self) -> None:
        """Broadcast each parameter from its owner, which has updated it."""
        works = []
        for owner, parameters in self._bundles:
            parts = [parameter.detach() for parameter in parameters]
            if len(parts) == 1:
                # A collective needs contiguous memory, but the parameter keeps its strides (such as channels-last).
                sent = parts[0].contiguous()
            elif owner == self._world.rank:
                sent = torch.cat([part.reshape(-1) for part in parts])
            else:
                sent = parts[0].new_empty(sum(part.numel() for part in parts))
            with self._world.collective():
                works.append((self._start_broadcast(sent, owner), sent, parts))
        for work, sent, parts in works:
            self._world.wait(work)
            if sent.data_ptr() != parts[0].data_ptr():
                for part, piece in zip(parts, sent.view(-1).split([part.numel() for part in parts]), strict=True):
                    part.copy_(piece.view(part.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer state on rank 0, and this rank's part on any other rank. All ranks call it."""
        state_dict = self._optimizer.state_dict()
        states = state_dict["state"]
        described = self._world.gather_objects(map_tensors(states, _without_data))
        for owner in range(1, self._world.size):
            for number, form in described[owner].items():
                state = form if self._world.rank != owner else states[number]
                received = iter([self._broadcast(tensor, owner) for tensor in tensors_of(state)])
                if self._world.rank == 0:
                    states[number] = map_tensors(form, partial(_next, received))
        state_dict["state"] = dict(sorted(states.items()))
        return state_dict

    def state_dict_in_parts(self) -> dict[str, Any]:
        """Return the optimizer's state, with meta tensors (no data) for other ranks' tensors. All ranks call it."""
        state_dict = self._optimizer.state_dict()
        states = state_dict["state"]
        for described in self._world.gather_objects(map_tensors(states, _without_data)):
            for number, form in described.items():
                states.setdefault(number, form)
        state_dict["state"] = dict(sorted(states.items()))
        return state_dict

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Send a tensor of the owner to all ranks; return it, on the device of the update."""
        device = self._world.device
        sent = (
            tensor.detach().to(device).contiguous()
            if self._world.rank == owner
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        )
        with self._world.collective():
            self._world.wait(self._start_broadcast(sent, owner))
        return sent

    def _start_broadcast(self, sent: torch.Tensor, owner: int) -> dist.Work:
        work: dist.Work | None = dist.broadcast(sent, src=owner, async_op=True)
        assert work is not None
        return work


def _bundled(parameters: Sequence[nn.Parameter], owners: Sequence[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the owner and parameters of each message: one large parameter, or all small parameters of an owner."""
    alone: list[tuple[int, list[nn.Parameter]]] = []
    together: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, owner in zip(parameters, owners, strict=True):
        if parameter.nbytes > _SMALL_BYTES:
            alone.append((owner, [parameter]))
        else:
            together.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter)
    return alone + [(owner, members) for (owner, *_), members in together.items()]


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _next(tensors: Iterator[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return next(tensors)


def _owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner rank of each parameter: parameters are assigned by size, each to the rank with the least so far.

    Then ranks are renumbered so that rank 0 has the most elements: memory is planned for rank 0, so a plan is an upper
    limit for every rank.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the best largest share.
    """
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[index]
        owners[index] = rank
    by_load = sorted(range(num_ranks), key=lambda rank: (-loads[rank], rank))
    return [by_load.index(rank) for rank in owners]


class Zero1(BucketSums):
    """Replicas as in `AllReduce`. Each rank updates a part of the parameters, and broadcasts them to the other ranks.

    So each rank has 1 / ranks of the optimizer's state. The optimizer must update each parameter independently, as all
    optimizers in `torch.optim` do. torch's `ZeroRedundancyOptimizer` is not used, because it creates the optimizer from
    a class and arguments. Here the user's own optimizer works, with its groups and scheduler.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
    """

    capabilities = Capabilities(name="zero1", feature=Feature.ZERO1, replicas=True)

    def __init__(self, *, bucket_bytes: int = 25 * 2**20, initial: Initial = "broadcast") -> None:
        super().__init__(bucket_bytes, initial, overlap=True)

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Make the replicas equal and put every gradient into a bucket."""
        prepared = super().prepare(modules, model, world, notifier)
        return replace(prepared, shard_update=partial(ShardedUpdate, world=world))
