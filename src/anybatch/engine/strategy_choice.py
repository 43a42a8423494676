"""The choice of "auto": replicas if they fit into the device, otherwise shards.

The rule is arithmetic and needs no trace: any replica needs its weights, gradients, optimizer state and the temporary
memory of the optimizer's step, with any micro-batch size.
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
"""From the least traffic to the least memory; empty if no strategy fits."""
_EXTRA_BYTES: Mapping[Bf16Weights, int] = {"copied": 4, "split": 2, "stochastic": 0}
"""Additional bytes per bf16 weight."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and the reason for it."""

    strategy: Strategy
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBytes:
    """Memory that a replica needs during its update: a lower bound of the step's peak."""

    weights: int
    gradients: int
    update: UpdateBytes
    can_share: bool

    @property
    def least(self) -> int:
        """Bytes that sharing the update does not reduce."""
        return self.weights + self.gradients

    def on_each(self, num_shares: int) -> int:
        """Return the bytes per rank if `num_shares` ranks share the update."""
        return self.least + ceil_div(self.update.state + self.update.temporary, num_shares)


def with_device_bytes(world: World) -> World:
    """Return the world with the memory of its smallest device; a collective if there are several ranks."""
    own = limit_of(world.device) if world.device_bytes is None else world.device_bytes
    if own is None:
        return world
    return replace(world, device_bytes=int(min(row[0] for row in world.gather_numbers([float(own)]))))


def choose(
    strategy: str | Strategy,
    optimizer: Optimizer | OptimizerFunction,
    modules: nn.Module,
    world: World,
    composes: Callable[[Capabilities], bool],
    *,
    bf16_weights: Bf16Weights = "copied",
) -> StrategyChoice:
    """Return the strategy that the user chose, or the choice of "auto"; the same on all ranks."""
    if strategy != "auto":
        return StrategyChoice(choose_strategy(strategy, world))
    comes = already_sharded(modules)
    usual = choose_strategy("auto", world, already_sharded=comes)
    ranks = "is 1 rank" if world.size == 1 else f"are {world.size} ranks"
    reason = "the model is sharded already (fully_shard)" if comes else f"there {ranks}"
    limit = world.device_bytes
    # Under tensor parallelism the user decides how the model is sharded.
    if comes or limit is None or world.size == 1 or world.has_model_groups:
        return StrategyChoice(usual, f"{usual.capabilities.name}, because {reason}")
    needed = replica_bytes(optimizer, modules, bf16_weights, most=int(limit * (1.0 - HEADROOM)))
    possible = _possible(needed, optimizer, world, composes)
    name = _first_that_fits(needed, possible, limit, world.size)
    # Ranks with different library versions may differ: take the strategy with the least memory.
    name = _ORDER[max(_ORDER.index(one) for one in world.gather_objects(name))]
    if not name:
        raise DoesNotFitError(_refusal(needed, optimizer, limit), rank=world.process, phase="setup")
    return StrategyChoice(choose_strategy(name, world), f"{name}, because {_why(name, needed, limit, world)}")


def replica_bytes(
    optimizer: Optimizer | OptimizerFunction, modules: nn.Module, bf16_weights: Bf16Weights = "copied", *, most: int
) -> ReplicaBytes:
    """Return the memory that a replica needs during its update.

    An optimizer given as a function counts as AdamW with `foreach`: three copies of the updated weights. If this is
    more than `most`, the optimizer is created over parameters on the meta device and measured.
    """
    own = trainable(modules)
    # A function gets low-precision parameters in float32; an instance holds the parameters themselves.
    masters = [p for p in own.values() if is_low_precision(p)] if not isinstance(optimizer, Optimizer) else []
    low = sum(parameter.numel() for parameter in masters)
    updated = 4 * low + sum(_num_bytes(p) for p in own.values() if not (masters and is_low_precision(p)))
    found = ReplicaBytes(
        weights=_EXTRA_BYTES[bf16_weights] * low + sum(map(_num_bytes, (*modules.parameters(), *modules.buffers()))),
        gradients=gradient_bytes(own.values()),
        update=UpdateBytes(state=2 * updated, temporary=updated),
        can_share=False,
    )
    if not isinstance(optimizer, Optimizer) and found.on_each(1) <= most:
        return found
    made = optimizer if isinstance(optimizer, Optimizer) else _made_without_data(optimizer, own)
    if made is None:
        return found
    with outside_modes():
        update = update_bytes(made)
    if bf16_weights == "stochastic":
        # The state of bf16 weights is kept in bf16; this underestimates the state of float32 weights.
        update = replace(update, state=update.state // 2)
    # torch's optimizers update each parameter independently; others may not.
    return replace(found, update=update, can_share=type(made).__module__.startswith("torch.optim"))


def _made_without_data(optimizer: OptimizerFunction, parameters: dict[str, nn.Parameter]) -> Optimizer | None:
    """Return the optimizer over parameters on the meta device; None if the function cannot make it there."""
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
            made = optimizer(twins)
        except Exception:  # noqa: BLE001 (the function is called again later, and raises its error then)
            return None
    return made if isinstance(made, Optimizer) else None


def _possible(
    needed: ReplicaBytes,
    optimizer: Optimizer | OptimizerFunction,
    world: World,
    composes: Callable[[Capabilities], bool],
) -> list[str]:
    """Return the possible strategies, in order."""
    found = ["all_reduce"]
    if needed.can_share and composes(choose_strategy("zero1", world).capabilities):
        found.append("zero1")
    # Sharding replaces parameters, so an existing optimizer would keep the old ones.
    if not isinstance(optimizer, Optimizer) and composes(choose_strategy("fsdp", world).capabilities):
        found.append("fsdp")
    return found


def _first_that_fits(needed: ReplicaBytes, possible: Sequence[str], limit: int, world_size: int) -> str:
    """Return the name of the strategy; empty if it is certain that no strategy fits."""
    most = int(limit * (1.0 - HEADROOM))
    shares = {"all_reduce": 1, "zero1": world_size}
    for name in possible:
        if name == "fsdp" or needed.on_each(shares[name]) <= most:
            return name
    # With headroom and the usual size of an update the rule is pessimistic, so a step may still fit.
    return possible[-1] if needed.least <= limit else ""


def _why(name: str, needed: ReplicaBytes, limit: int, world: World) -> str:
    """Return the comparison as a clause."""
    most = int(limit * (1.0 - HEADROOM))
    whole = f"a replica's {in_bytes(needed.on_each(1))} of weights, gradients and update"
    room = f"{in_bytes(most)} ({in_bytes(limit)} with {HEADROOM:.0%} left free)"
    if needed.on_each(1) <= most:
        return f"there are {world.size} ranks, and {whole} fit into {room}"
    reason, shared = f"{whole} do not fit into {room}", needed.on_each(world.size)
    if name == "zero1":
        part = f"{in_bytes(shared)} with the update shared by {world.size} ranks"
        reason += f", but {part} do" if shared <= most else f", nor do {part}"
    # The best of the possible strategies, since a step may still fit.
    if name == "all_reduce" or (name == "zero1" and shared > most):
        reason += "; 'fsdp' needs the optimizer as a function of named parameters, and compatible arguments"
    return reason


def _refusal(needed: ReplicaBytes, optimizer: Optimizer | OptimizerFunction, limit: int) -> str:
    cure = "Use strategy='fsdp' without the arguments that do not compose with it, or train a smaller model."
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        cure = (
            f"Use strategy='fsdp', which shards them. It creates new parameters, so pass the optimizer as a function: "
            f"optimizer=lambda named: torch.optim.{kind}(named, lr=...)."
        )
    return (
        f"weights and gradients take {in_bytes(needed.least)} on each rank, but the smallest device has "
        f"{in_bytes(limit)}. {cure}"
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
