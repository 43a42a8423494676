"""Replicas as under `all_reduce`, with optimizer states sharded over the ranks (ZeRO stage 1)."""

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
from anybatch.parallel.local_parts import is_dtensor, local_part, with_local_part
from anybatch.parallel.replicas import Initial
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionObserver
from anybatch.parallel.world import World

_SMALL_BYTES = 1 << 16
"""Size up to which a message's latency exceeds the cost of copying its content."""


class ShardedUpdate:
    """An update in which this rank's optimizer steps with its own parameters, and all ranks exchange the results.

    The user's optimizer keeps its groups, which schedulers and reports read; while it creates state or steps, they
    contain only this rank's parameters. So any optimizer works that updates each parameter independently.

    The plain loop: `optimizer.step()` over the parameters that `owners` gives this rank, then a broadcast of each
    parameter from its owner. `parameters` are the optimizer's, in the same order on all ranks.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._optimizer = optimizer
        self._world = world
        self._parameters = list(parameters)
        self._owners = owners([parameter.numel() for parameter in parameters], world.size)
        self._own = {id(p) for p, owner in zip(self._parameters, self._owners, strict=True) if owner == world.rank}
        self._bundles = _bundled(self._parameters, self._owners)

    @property
    def _in_groups(self) -> list[nn.Parameter]:
        """The parameters in the order of the optimizer's state dict."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Show the optimizer only this rank's parameters, and drop the state of the others."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        whole = [list(parameters) for parameters in groups]
        # A checkpoint contains the state of all parameters.
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
        """Send every rank the parameters that their owners have updated."""
        works = []
        for owner, parameters in self._bundles:
            parts = [local_part(parameter).detach() for parameter in parameters]
            if len(parts) == 1:
                # A collective needs contiguous memory; the parameter keeps its strides (channels-last weights, say).
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
        """Return the optimizer's whole state on rank 0, and each other rank's own part. All ranks call it."""
        found = self._optimizer.state_dict()
        own = found["state"]
        # The local part of a `DTensor` is sent, and gets the layout of its parameter after it has arrived.
        parts = [is_dtensor(tensor) for tensor in tensors_of(own)]
        described = self._world.gather_from_processes((map_tensors(own, _without_data), parts) if own else ({}, []))
        for owner in range(1, self._world.size):
            forms, has_parts = described[self._world.process_of(owner)]
            are_parts = iter(has_parts)
            for number, form in forms.items():
                mine = form if self._world.rank != owner else map_tensors(own[number], local_part)
                received = [self._sent(tensor, owner) for tensor in tensors_of(mine)]
                like = self._in_groups[number]
                laid_out = iter([with_local_part(one, like) if next(are_parts) else one for one in received])
                if self._world.rank == 0:
                    own[number] = map_tensors(form, partial(_next, laid_out))
        found["state"] = dict(sorted(own.items()))
        return found

    def state_dict_in_parts(self) -> dict[str, Any]:
        """Return the optimizer's state, with tensors of other ranks without data. All ranks call it."""
        found = self._optimizer.state_dict()
        own = found["state"]
        for described in self._world.gather_from_processes(map_tensors(own, _without_data)):
            for number, form in described.items():
                own.setdefault(number, form)
        found["state"] = dict(sorted(own.items()))
        return found

    def _sent(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        """Return a tensor of the owner on every rank, on the device of the update."""
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
        work: dist.Work | None = dist.broadcast(
            sent, src=self._world.process_of(owner), group=self._world.group, async_op=True
        )
        assert work is not None
        return work


def _bundled(parameters: Sequence[nn.Parameter], owners_of: Sequence[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the owner and the parameters of each message, in the same order on all ranks.

    A large parameter is sent alone, small ones of one owner together.
    """
    alone: list[tuple[int, list[nn.Parameter]]] = []
    together: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, owner in zip(parameters, owners_of, strict=True):
        part = local_part(parameter)
        if part.nbytes > _SMALL_BYTES:
            alone.append((owner, [parameter]))
        else:
            together.setdefault((owner, part.dtype, part.device), []).append(parameter)
    return alone + [(owner, members) for (owner, *_), members in together.items()]


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(local_part(tensor), device="meta")


def _next(tensors: Iterator[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return next(tensors)


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the owner rank of each parameter, assigned largest first, each to the rank with the least so far.

    Rank 0 gets the most in the end, so that its memory, which is planned, is an upper bound for every rank.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the best largest share.
    """
    held, found = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        rank = held.index(min(held))
        held[rank] += sizes[place]
        found[place] = rank
    by_load = sorted(range(num_ranks), key=lambda rank: (-held[rank], rank))
    return [by_load.index(rank) for rank in found]


class Zero1(BucketSums):
    """Gradients are summed as by `AllReduce`; each rank updates the parameters it owns, and broadcasts them.

    Each rank then holds 1 / ranks of the optimizer's state. The optimizer must update each parameter independently, as
    all of `torch.optim` do. torch's `ZeroRedundancyOptimizer` is not used: it constructs a new optimizer from a class
    and arguments, but here the user's optimizer is kept, given as an instance or as a function, with its groups and
    scheduler.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
    """

    capabilities = Capabilities(name="zero1", feature=Feature.ZERO1, replicas=True, tensor_parallel=True)

    def __init__(self, *, bucket_bytes: int = 25 * 2**20, initial: Initial = "broadcast") -> None:
        super().__init__(bucket_bytes, initial, overlap=True)

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Make the replicas equal and put every gradient into a bucket."""
        prepared = super().prepare(modules, model, world, on_reduction)
        return replace(prepared, shard_update=partial(ShardedUpdate, world=world))
