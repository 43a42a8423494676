"""Compare the arguments of ranks for building an engine or saving a checkpoint, in one small message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any
from zlib import crc32

import torch
from torch import nn

from anybatch.core.loss import Loss
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.errors import RanksDifferError
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World

_COMPARED_BY_CONTENT = ("model", "loss", "strategy", "world")
_MAX_CHARACTERS = 200
_SIMPLE = (str, int, float, bool, type(None), torch.dtype)


def refuse_other_builds(spec: TrainSpec, hardware: Hardware, loss: Loss, modules: nn.Module, world: World) -> None:
    """Refuse to build engines that differ between ranks, on all ranks.

    Functions are compared by name, so different functions with the same name pass.

    Raises:
        RanksDifferError: with the fields that differ, and their values on each rank.
    """
    found = {
        field.name: _text(getattr(one, field.name))
        for one in (spec, hardware)
        for field in fields(one)
        if field.name not in _COMPARED_BY_CONTENT
    }
    found["loss"] = _loss(loss)
    found["strategy"] = _text(hardware.strategy)
    found["device"] = world.device.type
    tensors = [*modules.named_parameters(), *modules.named_buffers()]
    found["model"] = ", ".join(f"{name} {_shape(tensor)}" for name, tensor in tensors)
    found["trainable"] = ", ".join(name for name, one in modules.named_parameters() if one.requires_grad)
    _refuse_differing("built the engine", found, world)


def refuse_other_forms(form: object, world: World) -> None:
    """Refuse to save in forms that differ between ranks, on all ranks.

    Args:
        form: a dataclass of simple values.
        world: the ranks.

    Raises:
        RanksDifferError: with the fields that differ, and their values on each rank.
    """
    if world.roll_call is not None:
        found = {one.name: _text(getattr(form, one.name)) for one in fields(form)}  # type: ignore[arg-type]
        _refuse_differing("called engine.save", found, world)


def _refuse_differing(act: str, found: Mapping[str, str], world: World) -> None:
    rows = world.gather_from_processes({name: crc32(text.encode()) for name, text in found.items()})
    names = [name for name in rows[0] if any(row.get(name) != rows[0][name] for row in rows)]
    if not names:
        return
    # All ranks have the same rows, so all join this collective.
    texts = world.gather_from_processes({name: found.get(name, "nothing") for name in names})
    meant = tuple("; ".join(f"{name}: {_around(name, text, texts)}" for name, text in row.items()) for row in texts)
    values = " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(meant))
    message = (
        f"ranks {act} with different {', '.join(names)}: {values}. Use the same values on every rank; if they come "
        "from a file or the command line, check the input of each rank."
    )
    raise RanksDifferError(message, names=tuple(names), meant=meant)


def _around(name: str, text: str, texts: Sequence[Mapping[str, str]]) -> str:
    """Return a text; if it is long, only the part where it begins to differ."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    others = [other.get(name, "") for other in texts]
    same = next((i for i, letters in enumerate(zip(*others, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, text.rfind(", ", 0, same) + 2)
    return f"... {text[start : start + _MAX_CHARACTERS]} ..."


def _text(value: Any) -> str:  # noqa: ANN401 (any argument of an engine)
    """Return a text that is equal on all ranks if the value is equal."""
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(one)}' for name, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{one.name}={_text(getattr(value, one.name))}" for one in fields(value))
        return f"{type(value).__name__}({inner})"
    if hasattr(value, "prepare") and hasattr(value, "capabilities"):
        return _options(value)
    return _name(value)


def _loss(loss: Loss) -> str:
    terms = [
        f"{name}: {'sum' if term.is_sum else 'mean'} over {term.items.name}, weight {term.weight:g}"
        for name, term in loss.kind.terms.items()
    ]
    functions = [_name(function) for function in loss.functions.values()]
    return f"{type(loss.kind).__name__} of {', '.join(functions)} ({'; '.join(terms)})"


def _options(strategy: Strategy) -> str:
    """Return the class and the arguments of a strategy, and of the strategies inside it."""
    arguments = [f"_{name}" for name in signature(type(strategy)).parameters]
    parts = {name: value for name, value in vars(strategy).items() if name in arguments or hasattr(value, "prepare")}
    return f"{type(strategy).__name__}({', '.join(f'{name[1:]}={_text(one)}' for name, one in parts.items())})"


def _name(value: Callable[..., Any] | object) -> str:
    while hasattr(value, "func"):  # a partial
        value = value.func
    return getattr(value, "__qualname__", type(value).__qualname__)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
