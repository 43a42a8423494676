"""Collect and restore the complete state of a run, in the same form for every strategy."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from anybatch.checkpoints.structure import TensorPart, read_stored
from anybatch.checkpoints.tensors import StoredTensor
from anybatch.core.geometry import Sizes
from anybatch.core.tree import map_tensors, tensors_of
from anybatch.data.random_state import host_random_state, restore_host_random_state
from anybatch.engine.precision import LossScaler, Target
from anybatch.engine.schedule import Stateful, WeightAverage
from anybatch.errors import CheckpointError
from anybatch.parallel.local_parts import is_dtensor
from anybatch.parallel.strategy import ParameterLayout, UpdateSharding
from anybatch.parallel.world import World

_WEIGHTS_ALONE = (
    " To use the weights with another optimizer, export them for model.load_state_dict: "
    "anybatch.checkpoints.export(checkpoint, file)."
)


Remark = tuple[str, str]
"""The code and the text of a warning, see `Notifier.warn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParts:
    """The parts of an engine that change during training.

    Seeded random numbers need no state: they follow from the seed, the step and the sample.
    """

    modules: nn.Module
    layout: ParameterLayout
    target: Target
    sharding: UpdateSharding | None
    scaler: LossScaler
    scheduler: Any
    average: WeightAverage | None
    noise: Stateful | None
    generators: tuple[torch.Generator, ...]
    further: Mapping[str, Stateful]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counters and sizes of a run."""

    num_steps: int
    data: Mapping[str, Any]
    seed: int | None
    sizes: Sizes
    resized: Mapping[str, Any] | None
    decisions: Mapping[str, str]


def collect_state(
    parts: StateParts, progress: Progress, world: World, *, only_trainable: bool, in_parts: bool = False
) -> dict[str, Any]:
    """Return the state as nested dicts of tensors and plain values.

    A collective, since tensors may be sharded, and unseeded generators differ between ranks. Tensors of replicas are
    not copied.
    """
    target, scaler = parts.target, parts.scaler
    gather = partial(_held, layout=parts.layout) if in_parts else parts.layout.gather
    model = _model_state(parts.modules, only_trainable=only_trainable)
    # Buffers such as running statistics differ between ranks, as further objects may: save only the first process's.
    is_kept = world.is_first or not in_parts
    if not is_kept:
        model = _without_buffers(model, parts.modules)
    return {
        "num_steps": progress.num_steps,
        **progress.data,
        "seed": progress.seed,
        "sizes": dataclasses.asdict(progress.sizes),
        "resized": progress.resized,
        "decisions": dict(progress.decisions),
        "model": map_tensors(model, gather),
        "optimizer_class": _class_name(target.optimizer),
        "generators": world.gather_objects([generator.get_state() for generator in parts.generators])
        if parts.generators
        else None,
        "host_random": world.gather_objects(host_random_state()) if parts.generators else None,
        "further": {name: dict(found.state_dict()) for name, found in parts.further.items()} if is_kept else {},
        "optimizer": map_tensors(_optimizer_state(target.optimizer, parts.sharding, world, in_parts=in_parts), gather),
        "master_weights": [gather(weight.detach()) for weight in target.updated]
        if target.update == "master_weights"
        else None,
        "missing_bits": {number: gather(bits) for number, bits in target.beside.items()}
        if target.update == "split"
        else None,
        "scheduler": parts.scheduler.state_dict() if parts.scheduler is not None and is_kept else None,
        "scaler": scaler.scaler.state_dict() if scaler.enabled else None,
        "noise": dict(parts.noise.state_dict()) if parts.noise is not None and is_kept else None,
        "average": None
        if parts.average is None
        else {_uncompiled_name(name): gather(weight) for name, weight in parts.average.weights.items()},
    }


def _held(tensor: torch.Tensor, layout: ParameterLayout) -> Any:  # noqa: ANN401 (a tensor, or a TensorPart)
    """Return this process's part of a tensor."""
    offset = layout.offset(tensor)
    return tensor if offset is None else TensorPart(layout.local(tensor), tuple(tensor.shape), offset)


def _without_buffers(state: Mapping[str, Any], modules: nn.Module) -> dict[str, Any]:
    """Return a model's state with buffers on the meta device, except DTensors."""
    own = {_uncompiled_name(name) for name, _ in modules.named_parameters(remove_duplicate=False)}

    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_dtensor(tensor) else torch.empty_like(tensor, device="meta")

    return {name: value if name in own else map_tensors(value, elsewhere) for name, value in state.items()}


def restore_state(parts: StateParts, state: Mapping[str, Any], world: World) -> list[Remark]:
    """Restore a collected state; change nothing unless all of it fits."""
    _check_model(parts.modules, state["model"])
    remarks = _check_optimizer(parts.target, state["optimizer"], state.get("optimizer_class"))
    remarks += _check_further(parts.further, state.get("further", {}))
    # Compare everything before loading, so that a checkpoint that does not fit changes nothing.
    for name, own in (
        ("master_weights", parts.target.update == "master_weights"),
        ("missing_bits", parts.target.update == "split"),
        ("scheduler", parts.scheduler is not None),
        ("scaler", parts.scaler.enabled),
        ("average", parts.average is not None),
    ):
        if own != (state.get(name) is not None):
            message = (
                f"the checkpoint {'lacks' if own else 'has'} {name!r} and this engine {'has' if own else 'lacks'} it. "
                "Use the arguments of the saved run (precision, bf16_weights, scheduler, average_decay, optimizer)."
            )
            raise CheckpointError(message)
    # Read everything before loading, so that a read error changes nothing either.
    place, own_model = partial(_placed, layout=parts.layout), parts.modules.state_dict()
    own_names = {_uncompiled_name(name): name for name in own_model}
    model = {
        own_names[name]: place(value, own_model[own_names[name]])
        for name, value in _by_uncompiled_name(state["model"]).items()
    }
    # A copy, because an optimizer keeps the tensors that it loads and changes them in place.
    optimizer = _scattered(copy.deepcopy(dict(state["optimizer"])), parts)
    saved_beside = state["master_weights"] or state.get("missing_bits") or {}
    beside = [(kept, place(saved_beside[number], kept)) for number, kept in parts.target.beside.items()]
    averaged = _by_uncompiled_name(state["average"] or {})
    averages = {
        name: place(averaged[_uncompiled_name(name)], weight)
        for name, weight in (parts.average.weights.items() if parts.average is not None else ())
    }
    small = {
        name: read_stored(state.get(name))
        for name in ("scheduler", "scaler", "noise", "further", "host_random", "generators")
    }
    parts.modules.load_state_dict({**own_model, **model})
    parts.target.load_optimizer(optimizer)
    with torch.no_grad():
        for kept, saved in beside:
            kept.copy_(saved)
    if parts.scheduler is not None:
        parts.scheduler.load_state_dict(dict(small["scheduler"]))
    if parts.scaler.enabled:
        parts.scaler.scaler.load_state_dict(dict(small["scaler"]))
    if parts.average is not None:
        parts.average.load(averages)
    # Training does not depend on the noise: a resumed run may start or stop measuring it.
    if parts.noise is not None and small["noise"] is not None:
        parts.noise.load_state_dict(small["noise"])
    for name, found in parts.further.items():
        found.load_state_dict(copy.deepcopy(small["further"][name]))
    if parts.generators and (saved := small["host_random"]) and len(saved) == world.size:
        restore_host_random_state(saved[world.rank])
    return remarks + _restore_generators(parts.generators, small["generators"], world)


def _placed(value: Any, like: Any, layout: ParameterLayout) -> Any:  # noqa: ANN401 (a tensor, or a layer's extra state)
    """Return a whole tensor, sharded like another one; from a file, read only this rank's part."""
    if isinstance(value, StoredTensor) and isinstance(like, torch.Tensor):
        offset = layout.offset(like)
        if offset is None:
            return value.read()
        return layout.with_local(value.read(offset, layout.local(like).shape).to(like.device), like)
    if isinstance(value, torch.Tensor):
        return layout.scatter(value, like)
    return read_stored(value)


def _model_state(modules: nn.Module, *, only_trainable: bool) -> dict[str, Any]:
    state = _by_uncompiled_name(modules.state_dict())
    frozen = _frozen(modules) if only_trainable else frozenset()
    return {name: value for name, value in state.items() if name not in frozen}


def _frozen(modules: nn.Module) -> frozenset[str]:
    named = modules.named_parameters(remove_duplicate=False)
    return frozenset(_uncompiled_name(name) for name, parameter in named if not parameter.requires_grad)


def _by_uncompiled_name(state: Mapping[str, Any]) -> dict[str, Any]:
    return {_uncompiled_name(name): value for name, value in state.items()}


def _uncompiled_name(name: str) -> str:
    """Return the name of a parameter or buffer without the wrappers of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def _optimizer_state(
    optimizer: Optimizer, sharding: UpdateSharding | None, world: World, *, in_parts: bool
) -> dict[str, Any]:
    """Return an optimizer's state; the whole state on rank 0 for a `ZeroRedundancyOptimizer`."""
    if sharding is not None:
        return sharding.state_dict_in_parts() if in_parts else sharding.state_dict()
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if consolidate is None:
        return optimizer.state_dict()
    with world.collective():
        consolidate(to=0)
    return optimizer.state_dict() if world.is_first else {"state": {}, "param_groups": []}


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _restore_generators(
    generators: Sequence[torch.Generator], saved: "Sequence[Sequence[torch.Tensor]] | None", world: World
) -> list[Remark]:
    """Restore this rank's generators; return a warning if that is impossible."""
    if not generators:
        return []
    if saved is None or len(saved) != world.size or len(saved[world.rank]) != len(generators):
        found = "no generator state" if saved is None else f"generator states of {len(saved)} ranks"
        message = (
            f"random numbers do not continue: the checkpoint has {found}, this run has {world.size}. With rng=None "
            "dropout and other random layers will differ from an uninterrupted run."
        )
        return [("random_numbers_not_resumed", message)]
    for generator, state in zip(generators, saved[world.rank], strict=True):
        generator.set_state(state)
    return []


def _scattered(saved: dict[str, Any], parts: StateParts) -> dict[str, Any]:
    """Return an optimizer's state with each tensor sharded like its parameter."""
    parameters = [parameter for group in parts.target.optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        for name, value in values.items():
            # Tensors of another shape, such as step counts, are not sharded.
            like = getattr(value, "shape", None) == parameters[number].shape
            values[name] = _placed(value, parameters[number], parts.layout) if like else read_stored(value)
    return {name: value if name == "state" else read_stored(value) for name, value in saved.items()}


def _check_model(modules: nn.Module, saved: Mapping[str, Any]) -> None:
    own, saved = _by_uncompiled_name(modules.state_dict()), _by_uncompiled_name(saved)
    frozen = _frozen(modules)
    # Saved with `only_trainable`: the model already has its frozen parameters.
    if not frozen & saved.keys():
        own = {name: value for name, value in own.items() if name not in frozen}
    missing, foreign = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    shapes = [
        f"{name}: {tuple(saved[name].shape)} saved, {tuple(value.shape)} here"
        for name, value in own.items()
        if name in saved and isinstance(value, torch.Tensor) and value.shape != saved[name].shape
    ]
    if missing or foreign or shapes:
        reasons = [
            f"{len(missing)} tensors are not in the checkpoint ({', '.join(missing[:3])}, ...)" * bool(missing),
            f"{len(foreign)} of its tensors are not in the model ({', '.join(foreign[:3])}, ...)" * bool(foreign),
            f"{len(shapes)} have another shape ({'; '.join(shapes[:3])})" * bool(shapes),
        ]
        message = (
            f"the checkpoint has another model: {'; '.join(filter(None, reasons))}. Build the same model as for the "
            "checkpoint, or start in another folder."
        )
        raise CheckpointError(message)


def _check_further(own: Mapping[str, Stateful], saved: Mapping[str, Any]) -> list[Remark]:
    """Compare the names of further objects; return a warning about saved objects that this run lacks."""
    missing = sorted(set(own) - set(saved))
    if missing:
        message = (
            f"the checkpoint lacks the state of {', '.join(map(repr, missing))} from engine.save_also; it has "
            f"{', '.join(map(repr, saved)) or 'none'}. Load first, and call save_also afterwards."
        )
        raise CheckpointError(message)
    left = sorted(set(saved) - set(own))
    if not left:
        return []
    message = (
        f"the saved state of {', '.join(map(repr, left))} was not loaded. Call engine.save_also({left[0]}=...) before "
        "engine.load."
    )
    return [("state_not_taken_up", message)]


def _check_optimizer(target: Target, saved: Mapping[str, Any], saved_class: str | None) -> list[Remark]:
    """Compare optimizers; return a warning if the classes differ but have the same settings."""
    # By numbers, because an optimizer's state identifies parameters by position.
    own = [len(group["params"]) for group in target.optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if own != theirs:
        message = (
            f"the checkpoint's optimizer has parameter groups of {theirs} parameters, this one of {own}. Build the "
            f"same optimizer as for the checkpoint.{_WEIGHTS_ALONE}"
        )
        raise CheckpointError(message)
    own_class = _class_name(target.optimizer)
    if saved_class == own_class:
        return []
    here, there = (set(groups["param_groups"][0]) for groups in (target.optimizer.state_dict(), saved))
    # New versions of torch only add settings to a class; if both sides have extra ones, the optimizers differ.
    if here - there and there - here:
        message = (
            f"the checkpoint has another kind of optimizer: it was saved with {saved_class or 'one'} (settings "
            f"{', '.join(sorted(there - here))}), and this engine has {own_class} ({', '.join(sorted(here - there))}). "
            f"Build the same optimizer as for the checkpoint.{_WEIGHTS_ALONE}"
        )
        raise CheckpointError(message, code="other_optimizer")
    if saved_class is None:
        return []
    message = (
        f"the checkpoint has the optimizer {saved_class}, and the run continues with {own_class}, which has the same "
        "settings. It will differ from an uninterrupted run."
    )
    return [("another_optimizer_class", message)]


def state_of_first_rank(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the collected state of rank 0 on every rank; broadcasts tensors one by one."""
    tensors = list(tensors_of(state)) if world.is_first else []
    # Tensors on the meta device describe the tensors that follow.
    form = map_tensors(state, lambda tensor: torch.empty_like(tensor, device="meta")) if world.is_first else None
    form, devices = world.gather_objects((form, [tensor.device.type for tensor in tensors]))[0]
    found = iter(range(len(devices)))

    def receive(described: torch.Tensor) -> torch.Tensor:
        number = next(found)
        if world.is_first:
            sent = tensors[number].detach().to(world.device).contiguous()
        else:
            sent = torch.empty(described.shape, dtype=described.dtype, device=world.device)
        with world.collective():
            work = dist.broadcast(sent, src=world.first_process, async_op=True)
            assert work is not None
            world.wait(work)
        return sent.to(devices[number])

    received: dict[str, Any] = map_tensors(form, receive)
    return received
