"""The choice of `strategy="auto"`: replicas (each rank has the whole model) if they fit, otherwise shards.

With any micro-batch size, a replica needs memory for its weights, gradients, optimizer state, and the temporary tensors
of the optimizer's step. These numbers follow from the shapes of the parameters, so the choice runs no step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import ceil_div
from anybatch.core.tensors import is_low_precision
from anybatch.core.torch_internals import outside_modes
from anybatch.core.units import HEADROOM, in_bytes
from anybatch.engine.bf16_weights import Bf16Weights
from anybatch.engine.optimizer_memory import UpdateBytes, update_bytes
from anybatch.engine.precision import OptimizerFunction
from anybatch.errors import DoesNotFitError
from anybatch.memory.device_memory import limit_of
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.replicas import already_sharded
from anybatch.parallel.strategy import Capabilities, Strategy, choose_strategy, trainable
from anybatch.parallel.world import World

_ORDER = ("all_reduce", "zero1", "fsdp", "")
"""Strategies in order of decreasing memory and increasing communication; "" if no strategy fits."""
_EXTRA_BYTES: Mapping[Bf16Weights, int] = {"copied": 4, "split": 2, "stochastic": 0}
"""Additional bytes per bf16 weight, for each value of `bf16_weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBytes:
    """Bytes that a replica needs during its update: a lower bound of the step's peak."""

    weights: int
    gradients: int
    update: UpdateBytes
    can_share: bool  # whether each rank can update a part of the weights, as in ZeRO-1

    @property
    def replicated_bytes(self) -> int:
        """Bytes of weights and gradients, which every rank needs even if ranks share the update."""
        return self.weights + self.gradients

    def per_rank(self, num_sharing: int) -> int:
        """Return the bytes per rank if `num_sharing` ranks share the update."""
        return self.replicated_bytes + ceil_div(self.update.state + self.update.temporary, num_sharing)


def with_device_bytes(world: World) -> World:
    """Return the world with the memory of its smallest device; a collective if there are several ranks."""
    limit = limit_of(world.device) if world.device_bytes is None else world.device_bytes
    if limit is None:
        return world
    return replace(world, device_bytes=int(min(row[0] for row in world.gather_numbers([float(limit)]))))


def choose(
    strategy: str | Strategy,
    optimizer: Optimizer | OptimizerFunction,
    modules: nn.Module,
    world: World,
    is_allowed: Callable[[Capabilities], bool],
    *,
    bf16_weights: Bf16Weights = "copied",
) -> tuple[Strategy, str]:
    """Return the strategy that the user chose, or the choice of "auto" and its reason; the same on all ranks."""
    if strategy != "auto":
        return choose_strategy(strategy, world), ""
    is_sharded = already_sharded(modules)
    default = choose_strategy("auto", world, already_sharded=is_sharded)
    ranks = "is 1 rank" if world.size == 1 else f"are {world.size} ranks"
    reason = "the model is sharded already (fully_shard)" if is_sharded else f"there {ranks}"
    limit = world.device_bytes
    if is_sharded or limit is None or world.size == 1:
        return default, f"{default.capabilities.name}, because {reason}"
    needed = replica_bytes(optimizer, modules, bf16_weights, limit=int(limit * (1.0 - HEADROOM)))
    possible = _possible(needed, optimizer, world, is_allowed)
    name = _first_that_fits(needed, possible, limit, world.size)
    # The choices of ranks with different library versions may differ: take the choice that needs the least memory.
    name = _ORDER[max(_ORDER.index(choice) for choice in world.gather_objects(name))]
    if not name:
        raise DoesNotFitError(_refusal(needed, optimizer, limit), rank=world.rank, phase="setup")
    return choose_strategy(name, world), f"{name}, because {_why(name, needed, limit, world)}"


def replica_bytes(
    optimizer: Optimizer | OptimizerFunction, modules: nn.Module, bf16_weights: Bf16Weights = "copied", *, limit: int
) -> ReplicaBytes:
    """Return the bytes that a replica needs during its update.

    An optimizer given as a function is estimated as AdamW with `foreach`: three copies of the updated weights. If the
    estimate exceeds `limit` bytes, the optimizer is created over parameters on the meta device and measured.
    """
    parameters = trainable(modules)
    # A function gets low-precision parameters in float32; an instance has the parameters themselves.
    masters = [p for p in parameters.values() if is_low_precision(p)] if not isinstance(optimizer, Optimizer) else []
    num_low = sum(parameter.numel() for parameter in masters)
    updated = 4 * num_low + sum(_num_bytes(p) for p in parameters.values() if not (masters and is_low_precision(p)))
    extra, tensors = _EXTRA_BYTES[bf16_weights] * num_low, (*modules.parameters(), *modules.buffers())
    estimate = ReplicaBytes(
        weights=extra + sum(map(_num_bytes, tensors)),
        gradients=gradient_bytes(parameters.values()),
        update=UpdateBytes(state=2 * updated, temporary=updated),
        can_share=False,
    )
    if not isinstance(optimizer, Optimizer) and estimate.per_rank(1) <= limit:
        return estimate
    created = optimizer if isinstance(optimizer, Optimizer) else _created_without_data(optimizer, parameters)
    if created is None:
        return estimate
    with outside_modes():
        update = update_bytes(created)
    if bf16_weights == "stochastic":
        # The state of bf16 weights is stored in bf16; this underestimates the state of float32 weights.
        update = replace(update, state=update.state // 2)
    # torch's optimizers update each parameter independently; other optimizers may not.
    return replace(estimate, update=update, can_share=type(created).__module__.startswith("torch.optim"))


def _created_without_data(optimizer: OptimizerFunction, parameters: dict[str, nn.Parameter]) -> Optimizer | None:
    """Return the optimizer over parameters on the meta device; None if the function fails with such parameters."""
    with outside_modes():
        twins = [
            (
                name,
                nn.Parameter(
                    torch.empty(p.shape, dtype=torch.float32 if is_low_precision(p) else p.dtype, device="meta")
                ),
            )
            for name, p in parameters.items()
        ]
        try:
            created = optimizer(twins)
        except Exception:  # noqa: BLE001 (the function is called again later, and raises its error then)
            return None
    return created if isinstance(created, Optimizer) else None


def _possible(
    needed: ReplicaBytes,
    optimizer: Optimizer | OptimizerFunction,
    world: World,
    is_allowed: Callable[[Capabilities], bool],
) -> list[str]:
    """Return the strategies that the arguments allow, in the order of `_ORDER`."""
    names = ["all_reduce"]
    if needed.can_share and is_allowed(choose_strategy("zero1", world).capabilities):
        names.append("zero1")
    # Sharding replaces parameters, so an existing optimizer would keep the old ones.
    if not isinstance(optimizer, Optimizer) and is_allowed(choose_strategy("fsdp", world).capabilities):
        names.append("fsdp")
    return names


def _first_that_fits(needed: ReplicaBytes, possible: Sequence[str], limit: int, world_size: int) -> str:
    """Return the name of the first strategy that fits in `limit` bytes; "" if it is certain that none fits."""
    available = int(limit * (1.0 - HEADROOM))
    num_sharing = {"all_reduce": 1, "zero1": world_size}
    for name in possible:
        if name == "fsdp" or needed.per_rank(num_sharing[name]) <= available:
            return name
    # The rule subtracts headroom and assumes a typical optimizer, so a step may still fit.
    return possible[-1] if needed.replicated_bytes <= limit else ""


def _why(name: str, needed: ReplicaBytes, limit: int, world: World) -> str:
    """Return the reason for the choice, as a clause."""
    available = int(limit * (1.0 - HEADROOM))
    replica = f"a replica's {in_bytes(needed.per_rank(1))} of weights, gradients and update"
    room = f"{in_bytes(available)} ({in_bytes(limit)} with {HEADROOM:.0%} left free)"
    if needed.per_rank(1) <= available:
        return f"there are {world.size} ranks, and {replica} fit into {room}"
    reason, shared = f"{replica} do not fit into {room}", needed.per_rank(world.size)
    if name == "zero1":
        reason += f"; {in_bytes(shared)} with the update shared by {world.size} ranks"
    # No possible strategy is certain to fit, and this one needs the least memory.
    if name == "all_reduce" or (name == "zero1" and shared > available):
        reason += "; 'fsdp' needs the optimizer as a function of named parameters, and compatible arguments"
    return reason


def _refusal(needed: ReplicaBytes, optimizer: Optimizer | OptimizerFunction, limit: int) -> str:
    hint = "Use strategy='fsdp' without the arguments that cannot be combined with it, or train a smaller model."
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        hint = (
            f"Use strategy='fsdp', which shards them. It creates new parameters, so pass the optimizer as a function: "
            f"optimizer=lambda named: torch.optim.{kind}(named, lr=...)."
        )
    return (
        f"weights and gradients take {in_bytes(needed.replicated_bytes)} on each rank, but the smallest device has "
        f"{in_bytes(limit)}. {hint}"
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
