"""The user's modules and functions: collect them, inspect them, and run them without side effects."""

import dataclasses
import dis
import inspect
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from anybatch.core.geometry import require
from anybatch.core.loss import Loss
from anybatch.core.torch_internals import kept_buffers
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.engine.accumulate import KeyedRandomness
from anybatch.errors import ParameterError
from anybatch.parallel.world import World

Model = nn.Module | Mapping[str, nn.Module]


def collect_modules(model: Model, loss: Loss) -> nn.Module:
    """Return one module that contains all modules to train: the model or models, and a loss that is a module."""
    named = dict(model) if isinstance(model, Mapping) else {"model": model}
    for name, module in named.items():
        if not isinstance(module, nn.Module):
            message = f"model {name!r} is {type(module).__name__}; pass a torch.nn.Module, or a dict of modules."
            raise ParameterError(message)
        _check_unwrapped(name, module)
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
    """Return the trainable parameters that loss functions use directly, not as part of a module, by variable name."""
    return {
        name: item
        for function in loss.functions.values()
        for name, value in referenced_by(function).items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(item, nn.Parameter) and item.requires_grad
    }


def referenced_by(function: Any) -> dict[str, Any]:  # noqa: ANN401 (any callable)
    """Return the objects that a function references, by name.

    They are the variables of its closure, the globals that it uses, its defaults and bound arguments, its object
    ("self"), and the attributes of this object unless it is a module.
    """
    objects: dict[str, Any] = {}
    while isinstance(function, partial):
        objects |= {**function.keywords, **{f"argument {index}": value for index, value in enumerate(function.args)}}
        function = function.func
    if not inspect.isroutine(function):  # a callable object
        function = function.__call__
    owner = getattr(function, "__self__", None)
    objects["self"] = owner
    if owner is not None and not isinstance(owner, nn.Module):
        objects |= getattr(owner, "__dict__", {})
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        return objects
    # Not `inspect.getclosurevars`, which mistakes names of attributes for globals, and fails at an empty cell.
    names = {
        instruction.argval for instruction in dis.get_instructions(function) if instruction.opname == "LOAD_GLOBAL"
    }
    objects |= {name: function.__globals__.get(name) for name in names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
            objects[name] = cell.cell_contents
    return objects | {name: argument.default for name, argument in inspect.signature(function).parameters.items()}


def _check_unwrapped(name: str, model: nn.Module) -> None:
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
    """Move modules to a device, unless all their tensors are on it; `.to` would raise for meta tensors."""
    if any(tensor.device != device for tensor in (*modules.parameters(), *modules.buffers())):
        modules.to(device)


def world_of(modules: nn.Module) -> World:
    """Return the world (the ranks) from the environment; a single rank uses the model's device, unless it is a CPU."""
    world = World.from_environment()
    device = next(modules.parameters()).device
    # With several ranks, each rank uses the accelerator of its local rank, not the model's device.
    return world if world.size > 1 or device.type == "cpu" else dataclasses.replace(world, device=device)


def _is_lazy(module: nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


def checked_path(name: str, value: str | Path) -> Path:
    """Return an argument as a path; refuse other types than text and paths."""
    require(isinstance(value, (str, os.PathLike)), name, value, "the path of a file or folder")
    return Path(value)


_IS_TRIAL: ContextVar[bool] = ContextVar("anybatch_is_trial", default=False)


def in_trial_run() -> bool:
    """Whether the model or loss is run in addition to the regular step, so that metrics should not count the samples.

    True while the engine checks whether the loss is declared correctly, in trials of micro-batch sizes, in the second
    pass of `ab.joint`, and in `ab.check`. False in the forward of each micro-batch whose gradient is used, and in
    evaluations. If a step is repeated after an out-of-memory error, False in both attempts.

    ```python
    def loss(model, batch):
        logits = model(batch["x"])
        if not ab.in_trial_run():
            accuracy.update(logits, batch["y"])
        return F.cross_entropy(logits, batch["y"])
    ```

    Buffers of modules and the global random generators are restored after a trial run. Attributes, lists, counters and
    files are not, since other threads and signal handlers may change them at the same time.
    """
    return _IS_TRIAL.get()


@contextmanager
def trial_run() -> Iterator[None]:
    """Context in which `in_trial_run()` is True."""
    token = _IS_TRIAL.set(True)
    try:
        yield
    finally:
        _IS_TRIAL.reset(token)


@contextmanager
def without_side_effects(
    modules: nn.Module, device: torch.device, *, functions: Iterable[object] = (), as_compiled: bool = False
) -> Iterator["SeededGenerators"]:
    """Context that restores buffers and random generators on exit, also after an error, but no Python objects.

    The code in it must not change parameters. Warnings are ignored, since the step soon runs the same code. Unless
    `as_compiled`, compiled code runs uncompiled. `functions` may use modules that are not in `modules`.
    """
    buffers = kept_buffers(nn.ModuleList([modules, *modules_of(functions)]))
    generators = SeededGenerators(device)
    with ExitStack() as stack:
        stack.enter_context(trial_run())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if (
            not as_compiled and "torch._dynamo" in sys.modules
        ):  # nothing is compiled without it, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(generators)
        stack.callback(buffers.restore)
        yield generators


def modules_of(functions: Iterable[object]) -> list[nn.Module]:
    """Return the modules that functions reference, such as a teacher in a closure, a global or an attribute."""
    objects = [value for function in functions for value in referenced_by(function).values()]
    return list(dict.fromkeys(value for value in objects if isinstance(value, nn.Module)))


class SeededGenerators:
    """Context that can seed all random generators that a model or a loss may use, and restores them on exit."""

    def __init__(self, device: torch.device) -> None:
        self._torch = KeyedRandomness(device)
        self._stack = ExitStack()

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        seed_generators(seed)
        self._torch.seed_effective_batch(seed)  # on the device, too

    def __enter__(self) -> Self:
        self._stack.enter_context(preserved_random_state())
        self._stack.enter_context(self._torch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
