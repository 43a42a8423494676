"""Collect and restore the complete state of a run, in the same form for every strategy."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.checkpoints.structure import TensorPart, read_stored
from anybatch.checkpoints.tensors import StoredTensor
from anybatch.core.tree import map_tensors
from anybatch.data.random_state import host_random_state, restore_host_random_state
from anybatch.engine.precision import LossScaler, UpdateTarget
from anybatch.engine.schedule import Stateful, WeightAverage
from anybatch.errors import CheckpointError
from anybatch.parallel.dtensors import is_dtensor
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

    `generators` is empty if random numbers are seeded: these numbers follow from the seed, the step and the sample.
    `also_saved` has the objects of `Engine.save_also`.
    """

    modules: nn.Module
    layout: ParameterLayout
    target: UpdateTarget
    sharding: UpdateSharding | None
    scaler: LossScaler
    scheduler: Any
    average: WeightAverage | None
    noise: Stateful | None
    generators: tuple[torch.Generator, ...]
    also_saved: Mapping[str, Stateful]


def collect_state(
    parts: StateParts, progress: Mapping[str, Any], world: World, *, only_trainable: bool, in_parts: bool = False
) -> dict[str, Any]:
    """Return the state as nested dicts of tensors and plain values; `progress` has the counters and sizes of the run.

    All ranks must call it, since tensors may be sharded, and unseeded generators differ between ranks. Tensors that
    every rank has in full are not copied. With `in_parts`, each rank returns only its parts of sharded tensors.
    """
    target, scaler = parts.target, parts.scaler
    gather = partial(_local_part, layout=parts.layout) if in_parts else parts.layout.gather
    model = _model_state(parts.modules, only_trainable=only_trainable)
    # Buffers (such as running statistics) and objects of `save_also` may differ: only the first process saves them.
    is_kept = world.is_first or not in_parts
    if not is_kept:
        model = _without_buffers(model, parts.modules)
    return {
        **progress,
        "model": map_tensors(model, gather),
        "optimizer_class": _class_name(target.optimizer),
        "generators": world.gather_objects([generator.get_state() for generator in parts.generators])
        if parts.generators
        else None,
        "host_random": world.gather_objects(host_random_state()) if parts.generators else None,
        "further": {name: dict(item.state_dict()) for name, item in parts.also_saved.items()} if is_kept else {},
        "optimizer": map_tensors(_optimizer_state(target.optimizer, parts.sharding, world, in_parts=in_parts), gather),
        "master_weights": [gather(weight.detach()) for weight in target.updated]
        if target.update == "master_weights"
        else None,
        "missing_bits": {number: gather(bits) for number, bits in target.extra_weights.items()}
        if target.update == "split"
        else None,
        "scheduler": parts.scheduler.state_dict() if parts.scheduler is not None and is_kept else None,
        "scaler": scaler.scaler.state_dict() if scaler.enabled else None,
        "noise": dict(parts.noise.state_dict()) if parts.noise is not None and is_kept else None,
        "average": None
        if parts.average is None
        else {_uncompiled_name(name): gather(weight) for name, weight in parts.average.weights.items()},
    }


def _local_part(tensor: torch.Tensor, layout: ParameterLayout) -> Any:  # noqa: ANN401 (a tensor, or a TensorPart)
    """Return this process's part of a sharded tensor, and other tensors unchanged."""
    offset = layout.offset(tensor)
    return tensor if offset is None else TensorPart(layout.local(tensor), tuple(tensor.shape), offset)


def _without_buffers(state: Mapping[str, Any], modules: nn.Module) -> dict[str, Any]:
    """Return a model's state with buffers moved to the meta device, so that only the first process writes them."""
    parameters = {_uncompiled_name(name) for name, _ in modules.named_parameters(remove_duplicate=False)}

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if is_dtensor(tensor) else torch.empty_like(tensor, device="meta")

    return {name: value if name in parameters else map_tensors(value, without_data) for name, value in state.items()}


def restore_state(parts: StateParts, state: Mapping[str, Any], world: World) -> list[Remark]:
    """Restore a collected state, and return warnings for the user; if any part does not fit, change nothing."""
    _check_model(parts.modules, state["model"])
    remarks = _check_optimizer(parts.target, state["optimizer"], state.get("optimizer_class"))
    remarks += _check_also_saved(parts.also_saved, state.get("further", {}))
    # Compare everything before loading, so that a checkpoint that does not fit changes nothing.
    for name, title, is_needed in (
        ("master_weights", "float32 master weights", parts.target.update == "master_weights"),
        ("missing_bits", "low bits of bf16 weights", parts.target.update == "split"),
        ("scheduler", "a scheduler", parts.scheduler is not None),
        ("scaler", "an fp16 loss scaler", parts.scaler.enabled),
        ("average", "a weight average", parts.average is not None),
    ):
        if is_needed != (state.get(name) is not None):
            first, second = ("this engine", "the checkpoint") if is_needed else ("the checkpoint", "this engine")
            message = (
                f"{first} has {title}, but {second} does not. "
                "Use the arguments of the saved run (precision, bf16_weights, scheduler, average_decay, optimizer)."
            )
            raise CheckpointError(message)
    # Read everything before loading, so that a read error changes nothing either.
    shard, model_state = partial(_sharded_like, layout=parts.layout), parts.modules.state_dict()
    names = {_uncompiled_name(name): name for name in model_state}
    model = {
        names[name]: shard(value, model_state[names[name]])
        for name, value in _by_uncompiled_name(state["model"]).items()
    }
    # A copy, because an optimizer keeps the tensors that it loads and changes them in place.
    optimizer = _optimizer_sharded(copy.deepcopy(dict(state["optimizer"])), parts)
    extra = state["master_weights"] or state.get("missing_bits") or {}
    extra_weights = [(weight, shard(extra[number], weight)) for number, weight in parts.target.extra_weights.items()]
    averaged = _by_uncompiled_name(state["average"] or {})
    averages = {
        name: shard(averaged[_uncompiled_name(name)], weight)
        for name, weight in (parts.average.weights.items() if parts.average is not None else ())
    }
    small = {
        name: read_stored(state.get(name))
        for name in ("scheduler", "scaler", "noise", "further", "host_random", "generators")
    }
    parts.modules.load_state_dict({**model_state, **model})
    parts.target.load_optimizer(optimizer)
    with torch.no_grad():
        for weight, saved_weight in extra_weights:
            weight.copy_(saved_weight)
    if parts.scheduler is not None:
        parts.scheduler.load_state_dict(dict(small["scheduler"]))
    if parts.scaler.enabled:
        parts.scaler.scaler.load_state_dict(dict(small["scaler"]))
    if parts.average is not None:
        parts.average.load(averages)
    # Training does not depend on the noise scale: a resumed run may start or stop measuring it.
    if parts.noise is not None and small["noise"] is not None:
        parts.noise.load_state_dict(small["noise"])
    for name, item in parts.also_saved.items():
        item.load_state_dict(copy.deepcopy(small["further"][name]))
    if parts.generators and (saved := small["host_random"]) and len(saved) == world.size:
        restore_host_random_state(saved[world.rank])
    return remarks + _restore_generators(parts.generators, small["generators"], world)


def _sharded_like(value: Any, like: Any, layout: ParameterLayout) -> Any:  # noqa: ANN401 (may be a layer's extra state)
    """Shard a whole tensor like the tensor `like`; from a file, read only this rank's part."""
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
    """Restore this rank's generators; return a warning if the checkpoint does not have their states."""
    if not generators:
        return []
    if saved is None or len(saved) != world.size or len(saved[world.rank]) != len(generators):
        states = "no generator state" if saved is None else f"generator states of {len(saved)} ranks"
        message = (
            f"random numbers do not continue: the checkpoint has {states}, this run has {world.size} ranks. Because "
            "the engine has rng=None, dropout and other random layers will differ from an uninterrupted run."
        )
        return [("random_numbers_not_resumed", message)]
    for generator, state in zip(generators, saved[world.rank], strict=True):
        generator.set_state(state)
    return []


def _optimizer_sharded(saved: dict[str, Any], parts: StateParts) -> dict[str, Any]:
    """Shard each tensor of an optimizer's state like its parameter, and return the state."""
    parameters = [parameter for group in parts.target.optimizer.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        for name, value in values.items():
            # Tensors with another shape than the parameter, such as step counts, are not sharded.
            is_alike = getattr(value, "shape", None) == parameters[number].shape
            values[name] = _sharded_like(value, parameters[number], parts.layout) if is_alike else read_stored(value)
    return {name: value if name == "state" else read_stored(value) for name, value in saved.items()}


def _check_model(modules: nn.Module, saved: Mapping[str, Any]) -> None:
    model, saved = _by_uncompiled_name(modules.state_dict()), _by_uncompiled_name(saved)
    frozen = _frozen(modules)
    # Saved with `only_trainable`: the model already has its frozen parameters.
    if not frozen & saved.keys():
        model = {name: value for name, value in model.items() if name not in frozen}
    missing, foreign = sorted(set(model) - set(saved)), sorted(set(saved) - set(model))
    shapes = [
        f"{name}: {tuple(saved[name].shape)} saved, {tuple(value.shape)} here"
        for name, value in model.items()
        if name in saved and isinstance(value, torch.Tensor) and value.shape != saved[name].shape
    ]
    reasons = [
        f"{verb} {len(names)} tensors ({'; '.join(names[:3])})"
        for verb, names in (("lacks", missing), ("has", foreign), ("has other shapes of", shapes))
        if names
    ]
    if reasons:
        message = (
            f"the checkpoint is from a different model: compared with this model, it {', and '.join(reasons)}. Build "
            "the same model as for the checkpoint, or start in another folder."
        )
        raise CheckpointError(message)


def _check_also_saved(registered: Mapping[str, Stateful], saved: Mapping[str, Any]) -> list[Remark]:
    """Compare the names of objects of `save_also`; return a warning about saved objects that are not registered."""
    missing = sorted(set(registered) - set(saved))
    if missing:
        message = (
            f"the checkpoint lacks the state of {', '.join(map(repr, missing))} from engine.save_also; it has "
            f"{', '.join(map(repr, saved)) or 'none'}. Load first, and call save_also afterwards."
        )
        raise CheckpointError(message)
    unused = sorted(set(saved) - set(registered))
    if not unused:
        return []
    message = (
        f"the saved state of {', '.join(map(repr, unused))} was not loaded. Call engine.save_also({unused[0]}=...) "
        "before engine.load."
    )
    return [("state_not_taken_up", message)]


def _check_optimizer(target: UpdateTarget, saved: Mapping[str, Any], saved_class: str | None) -> list[Remark]:
    """Compare optimizers; return a warning if the classes differ but have the same settings."""
    # Compares the sizes of groups, because an optimizer's state identifies parameters only by position.
    sizes = [len(group["params"]) for group in target.optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != saved_sizes:
        message = (
            f"the checkpoint's optimizer has parameter groups of sizes {saved_sizes}, but this optimizer has groups of "
            f"sizes {sizes}. Build the same optimizer as for the checkpoint.{_WEIGHTS_ALONE}"
        )
        raise CheckpointError(message)
    new_class = _class_name(target.optimizer)
    if saved_class == new_class:
        return []
    new, old = (set(groups["param_groups"][0]) for groups in (target.optimizer.state_dict(), saved))
    # New versions of an optimizer add settings, so kinds differ only if each side has settings that the other lacks.
    if new - old and old - new:
        message = (
            f"the checkpoint has another kind of optimizer: it was saved with {saved_class or 'an unknown class'} "
            f"(settings {', '.join(sorted(old - new))}), and this engine has {new_class} "
            f"({', '.join(sorted(new - old))}). Build the same optimizer as for the checkpoint.{_WEIGHTS_ALONE}"
        )
        raise CheckpointError(message, code="other_optimizer")
    if saved_class is None:  # checkpoints of earlier versions have no class
        return []
    message = (
        f"the checkpoint has the optimizer {saved_class}, but the run continues with {new_class}, which has the same "
        "settings. The run will differ from an uninterrupted run."
    )
    return [("another_optimizer_class", message)]
