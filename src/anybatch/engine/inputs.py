"""Derive modules, device and paths from the user's arguments."""

import dataclasses
import dis
import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from anybatch.core.loss import Loss
from anybatch.core.whole_numbers import refuse_unless
from anybatch.errors import ParameterError
from anybatch.parallel.world import World

Model = nn.Module | Mapping[str, nn.Module]


def collect_modules(model: Model, loss: Loss) -> nn.Module:
    """Return one module that contains all trained modules: the model or models, and a loss with parameters.

    Args:
        model: as in `Engine`.
        loss: the declared loss; functions that are modules are trained too.

    Raises:
        ParameterError: no trainable parameters, a module wrapped for data parallelism, or parameters without data.
    """
    named = dict(model) if isinstance(model, Mapping) else {"model": model}
    for name, module in named.items():
        if not isinstance(module, nn.Module):
            message = f"model {name!r} is {type(module).__name__}; pass a torch.nn.Module, or a dict of modules."
            raise ParameterError(message)
        _refuse_wrapped(name, module)
    for name, function in loss.functions.items():
        if isinstance(function, nn.Module):
            named[name] = function
    # A single model is not wrapped, so that names in checkpoints and messages are the user's.
    modules = model if isinstance(model, nn.Module) and len(named) == 1 else nn.ModuleDict(named)
    lazy = next((name for name, module in modules.named_modules() if _is_lazy(module)), None)
    if lazy is not None:
        message = (
            f"module {lazy!r} is lazy, and its parameters have no shape yet. Run one forward before "
            "creating the optimizer and the engine: model(batch)."
        )
        raise ParameterError(message)
    if not any(parameter.requires_grad for parameter in modules.parameters()):
        total = sum(1 for _ in modules.parameters())
        message = (
            f"the model has no trainable parameters ({total} in all, none with requires_grad=True). "
            "Unfreeze some, or evaluate without an engine."
        )
        raise ParameterError(message)
    for name, tensor in modules.named_parameters():
        if tensor.is_meta:
            message = f"parameter {name!r} is on the meta device and has no data. Materialise the model first."
            raise ParameterError(message)
    return modules


def captured_parameters(loss: Loss) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that loss functions hold outside of modules, by their names there."""
    return {
        name: one
        for function in loss.functions.values()
        for name, value in held_by(function).items()
        for one in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(one, nn.Parameter) and one.requires_grad
    }


def held_by(function: Any) -> dict[str, Any]:  # noqa: ANN401 (any callable)
    """Return the objects that a function can reach directly, by name.

    These are the variables of its closure, the globals that it uses, its defaults and bound arguments, its object
    ("self"), and the attributes of this object unless it is a module.

    Args:
        function: a function, method, partial function or callable object.
    """
    held: dict[str, Any] = {}
    while isinstance(function, partial):
        held |= {**function.keywords, **{f"argument {number}": one for number, one in enumerate(function.args)}}
        function = function.func
    if not inspect.isroutine(function):  # a callable object
        function = function.__call__
    owner = getattr(function, "__self__", None)
    held["self"] = owner
    if owner is not None and not isinstance(owner, nn.Module):
        held |= getattr(owner, "__dict__", {})
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        return held
    names = {one.argval for one in dis.get_instructions(function) if one.opname == "LOAD_GLOBAL"}
    held |= {name: function.__globals__.get(name) for name in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
            held[name] = cell.cell_contents
    return held | {name: one.default for name, one in inspect.signature(function).parameters.items()}


def _refuse_wrapped(name: str, model: nn.Module) -> None:
    for inner, module in model.named_modules():
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            where = f"module {inner!r} of model {name!r}" if inner else f"model {name!r}"
            message = (
                f"{where} is already wrapped in {type(module).__name__}. Pass its .module: the engine reduces "
                "gradients, once per step (strategy='ddp' uses DistributedDataParallel, strategy='data_parallel' uses "
                "DataParallel)."
            )
            raise ParameterError(message)


def move_modules(modules: nn.Module, device: torch.device) -> None:
    """Move modules to a device unless all tensors are there, since tensors on the meta device cannot be moved."""
    if any(tensor.device != device for tensor in (*modules.parameters(), *modules.buffers())):
        modules.to(device)


def world_of(modules: nn.Module) -> World:
    """Return the world from the environment; a single rank uses the model's device if it is an accelerator."""
    world = World.from_environment()
    device = next(modules.parameters()).device
    # With several ranks, each uses the accelerator of its local rank, not the model's device.
    return world if world.size > 1 or device.type == "cpu" else dataclasses.replace(world, device=device)


def _is_lazy(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(map(is_lazy, own))


def checked_path(name: str, value: str | Path) -> Path:
    """Return an argument as a path.

    Raises:
        UserError: it is not a path.
    """
    refuse_unless(isinstance(value, (str, os.PathLike)), name, value, "the path of a file or folder")
    return Path(value)
