"""Which strategy "auto" is: replicas as long as they fit into the device, and shards where they do not.

The rule is arithmetic, and takes no trace: a replica cannot do without its weights, gradients, optimizer state and
what the optimizer's step takes for a while, whatever its micro-batches are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.dtypes import is_low_precision
from anybatch.core.geometry import ceil_div
from anybatch.core.headroom import HEADROOM
from anybatch.core.torch_internals import outside_modes
from anybatch.core.units import in_bytes
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.engine.update.optimizer_state import UpdateBytes, update_bytes
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.errors import DoesNotFitError
from anybatch.memory.device_memory import limit_of
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.model_groups import comes_sharded
from anybatch.parallel.registry import choose_strategy
from anybatch.parallel.strategy import Capabilities, Strategy, trainable
from anybatch.parallel.world import World

_ORDER = ("all_reduce", "zero1", "fsdp", "")
"""From the least traffic to the least memory; the last is none of them."""
_BESIDE: Mapping[Bf16Weights, int] = {"copied": 4, "split": 2, "stochastic": 0}
"""Bytes beside each weight in bf16."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy, and why it was chosen.

    Attributes:
        strategy: the strategy.
        reason: a clause, with the strategy's name; empty for one that the user has named.
    """

    strategy: Strategy
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBytes:
    """Memory that every step of a replica holds at once, in its update: a lower bound of the step's peak.

    Attributes:
        weights: of the model with its buffers, and float32 copies of bf16 and fp16 parameters that are updated.
        gradients: one copy.
        update: the optimizer's state, and what its step takes for a while.
        can_share: each parameter is known to be updated by itself, so that ranks may share the update out.
    """

    weights: int
    gradients: int
    update: UpdateBytes
    can_share: bool

    @property
    def least(self) -> int:
        """Bytes that no sharing of the update makes fewer."""
        return self.weights + self.gradients

    def on_each(self, num_shares: int) -> int:
        """Return the bytes on each rank, where the update is shared out over so many."""
        return self.least + ceil_div(self.update.state + self.update.temporary, num_shares)


def with_device_bytes(world: World) -> World:
    """Return the world that knows what its smallest device has; a collective where there are several ranks.

    Args:
        world: one that knows the memory of this rank's device already is believed, so that one can be rehearsed.
    """
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
    """Return the strategy that was named, or what "auto" is; the same on all ranks.

    Args:
        strategy: as of `Hardware`.
        optimizer: as of `TrainSpec`. A function is called once more, with parameters without data, where replicas may
            not fit.
        modules: everything that trains.
        world: the ranks, see `with_device_bytes`.
        composes: function (capabilities) -> whether a strategy can do what is asked for.
        bf16_weights: as of `TrainSpec`.

    Raises:
        UserError: an unknown name.
        DoesNotFitError: no strategy that this optimizer leaves can fit, on all ranks.
    """
    if strategy != "auto":
        return StrategyChoice(choose_strategy(strategy, world))
    comes = comes_sharded(modules)
    usual = choose_strategy("auto", world, comes_sharded=comes)
    ranks = "is 1 rank" if world.size == 1 else f"are {world.size} ranks"
    reason = "the model came sharded, by fully_shard" if comes else f"there {ranks}"
    limit = world.device_bytes
    # Under tensor parallelism how a model is shared out is the user's own affair.
    if comes or limit is None or world.size == 1 or world.has_model_groups:
        return StrategyChoice(usual, f"{usual.capabilities.name}, because {reason}")
    needed = replica_bytes(optimizer, modules, bf16_weights, most=int(limit * (1.0 - HEADROOM)))
    possible = _possible(needed, optimizer, world, composes)
    name = _first_that_fits(needed, possible, limit, world.size)
    # Ranks that count otherwise, because their libraries differ, go by the one that counts most.
    name = _ORDER[max(_ORDER.index(one) for one in world.gather_objects(name))]
    if not name:
        raise DoesNotFitError(_refusal(needed, optimizer, limit), rank=world.process, phase="setup")
    return StrategyChoice(choose_strategy(name, world), f"{name}, because {_why(name, needed, limit, world)}")


def replica_bytes(
    optimizer: Optimizer | OptimizerFunction, modules: nn.Module, bf16_weights: Bf16Weights = "copied", *, most: int
) -> ReplicaBytes:
    """Return what a replica holds in its update.

    An optimizer that is yet to be made is taken for AdamW with `foreach`, three copies of what it updates. Only where
    these are more than `most` is it made over parameters without data, and looked at.

    Args:
        optimizer: as of `TrainSpec`.
        modules: everything that trains.
        bf16_weights: as of `TrainSpec`.
        most: bytes there are.
    """
    own = trainable(modules)
    # A function gets low-precision parameters in float32; an instance holds the parameters themselves.
    masters = [p for p in own.values() if is_low_precision(p)] if not isinstance(optimizer, Optimizer) else []
    low = sum(parameter.numel() for parameter in masters)
    updated = 4 * low + sum(_num_bytes(p) for p in own.values() if not (masters and is_low_precision(p)))
    found = ReplicaBytes(
        weights=_BESIDE[bf16_weights] * low + sum(map(_num_bytes, (*modules.parameters(), *modules.buffers()))),
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
        # State in float32 is kept in bf16; of weights in float32 beside them it is counted too small.
        update = replace(update, state=update.state // 2)
    # torch's own update each parameter by itself; of others that is not known, and some go by all of them at once.
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
        except Exception:  # noqa: BLE001 (whatever it is, the function is called again, and raises its own then)
            return None
    return made if isinstance(made, Optimizer) else None


def _possible(
    needed: ReplicaBytes,
    optimizer: Optimizer | OptimizerFunction,
    world: World,
    composes: Callable[[Capabilities], bool],
) -> list[str]:
    """Return the strategies that come into question, in order."""
    found = ["all_reduce"]
    if needed.can_share and composes(choose_strategy("zero1", world).capabilities):
        found.append("zero1")
    # Not with an optimizer that is made already, whose parameters sharding would replace.
    if not isinstance(optimizer, Optimizer) and composes(choose_strategy("fsdp", world).capabilities):
        found.append("fsdp")
    return found


def _first_that_fits(needed: ReplicaBytes, possible: Sequence[str], limit: int, world_size: int) -> str:
    """Return the name of the strategy to take, or of none if it is certain that none fits."""
    most = int(limit * (1.0 - HEADROOM))
    shares = {"all_reduce": 1, "zero1": world_size}
    for name in possible:
        if name == "fsdp" or needed.on_each(shares[name]) <= most:
            return name
    # The rule keeps headroom free and takes the update for what it usually is, so a step may fit all the same.
    return possible[-1] if needed.least <= limit else ""


def _why(name: str, needed: ReplicaBytes, limit: int, world: World) -> str:
    """Return, as a clause, what was compared with what."""
    most = int(limit * (1.0 - HEADROOM))
    whole = f"a replica's {in_bytes(needed.on_each(1))} of weights, gradients and update"
    room = f"{in_bytes(most)} ({in_bytes(limit)} with {HEADROOM:.0%} left free)"
    if needed.on_each(1) <= most:
        return f"there are {world.size} ranks, and {whole} fit into {room}"
    said, shared = f"{whole} do not fit into {room}", needed.on_each(world.size)
    if name == "zero1":
        part = f"{in_bytes(shared)} with the update shared out over {world.size} ranks"
        said += f", and {part} do" if shared <= most else f", and neither do {part}"
    # Named again as the best there is, for a step may fit all the same.
    if name == "all_reduce" or (name == "zero1" and shared > most):
        said += "; 'fsdp' would need the optimizer as a function of named parameters, and nothing that it refuses"
    return said


def _refusal(needed: ReplicaBytes, optimizer: Optimizer | OptimizerFunction, limit: int) -> str:
    cure = "Name strategy='fsdp' and leave out what does not compose with it, or train a smaller model."
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        cure = (
            f"strategy='fsdp' shards them over ranks, and needs the optimizer as a function, since it makes new "
            f"parameters: optimizer=lambda named: torch.optim.{kind}(named, lr=...)."
        )
    return (
        f"weights and gradients take {in_bytes(needed.least)} on each rank, and the smallest device has "
        f"{in_bytes(limit)}: not one sample can be trained on. {cure}"
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
