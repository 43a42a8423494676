"""The parameters of a loop, recognised by their names."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

from anybatch.errors import LoopError

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "model": r"model|net|network|module|ddp_model",
        "loader": r"(train_?|training_)?(data_?)?(loader|dl)(_train)?|(train_)?batches|(train|data)_iter",
        "get_batch": r"(get|next|sample)_(train_)?batch|get_next_batch",
        "dataset": r"(train_)?dataset|train_?set|(train_)?data",
        "optimizer": r"optimizer|optim|opt",
        "settings": r"args|cfg|config|conf|hparams|hps|params|flags|settings",
        "accumulation_steps": r"\w*accum\w*|grad_acc(_steps)?|update_freq|k",
        "criterion": r"criterion|loss_(fn|func|function)",
        "scheduler": r"(lr_)?sched(uler)?",
        "scaler": r"(grad_)?scaler",
        "device": r"device",
        "epochs": r"(num_|n_|max_|num_train_)?epochs|max_epoch",
        "epoch": r"epoch",
        "max_steps": r"(max|max_train|num|n|total)_steps|max_iters",
        "micro_batch_size": r"(micro_|per_device_)?batch_size",
        "max_norm": r"max_(grad_)?norm|(grad_)?clip|clip_(grad_)?norm|clip_grad",
        "rank": r"(local_)?rank",
        "world_size": r"world_size",
    }
)
"""Role -> names that it may have, as a regular expression; the role itself is one of them."""

_SETTINGS = frozenset({"accumulation_steps", "epochs", "max_steps", "micro_batch_size", "max_norm", "device", "scaler"})
"""Roles that the attributes of a settings object may have."""

_RANK_WORDS = frozenset(
    {"DistributedDataParallel", "no_sync", "DistributedSampler", "all_reduce", "get_rank", "get_world_size"}
)
_GUESSES: tuple[tuple[str, Any], ...] = (
    ("interval|freq|every|_steps|iters|patience", 1_000_000),
    ("gpu|resume|ema", None),
    ("dir|path|file|folder|output|name", "judged"),
    ("lr|learning_rate", 0.1),
    ("world_size|num_", 1),
)
"""Words in the names of unknown settings, and values that turn logging, evaluation and saving off. Others are 0."""
_SECTIONS = frozenset({"train", "training", "optim", "solver", "data", "model", "trainer", "optimization"})


@dataclass(frozen=True, slots=True)
class LoopParameters:
    """The arguments that a loop needs."""

    roles: Mapping[str, str]  # parameter name -> role, for all parameters that are recognised
    needed: frozenset[str]  # all roles, as parameters or as attributes of a settings object
    is_stream: bool  # asks for one batch at a time, so that none is the last
    uses_ranks: bool  # uses torch.distributed
    expects_wrapper: bool  # expects a model that DistributedDataParallel wraps already
    uses_scaler: bool  # uses a GradScaler

    def bind(self, function: Callable[..., Any], values: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the arguments to call the loop with, from the value of each role."""
        bound = inspect.signature(function).bind_partial()
        bound.arguments.update({name: values[role] for name, role in self.roles.items()})
        return bound


def read_parameters(function: Callable[..., Any]) -> LoopParameters:
    """Read the arguments that a loop needs from its signature and from the names it uses."""
    roles = _roles_in_signature(function)
    words = _names_used(function)
    streams = {word for word in words if role_of(word) == "get_batch"}
    if "loader" not in roles.values() and streams - roles.keys():  # a data set that hands out batches is a loader
        roles = {name: "loader" if role == "dataset" else role for name, role in roles.items()}
    asked = {role_of(word) for word in words} & _SETTINGS if "settings" in roles.values() else set()
    wraps = "DistributedDataParallel" in words
    return LoopParameters(
        roles=roles,
        needed=frozenset(roles.values()) | asked,
        is_stream=bool(streams),
        uses_ranks=bool(words & _RANK_WORDS),
        expects_wrapper="no_sync" in words and not wraps,  # only a wrapped model has no_sync
        uses_scaler=any("scaler" in word.lower() for word in words),
    )


def role_of(name: str) -> str:
    """Return the role of a parameter or setting, or ""."""
    return next((role for role, names in ROLES.items() if re.fullmatch(names, name.lower())), "")


def _roles_in_signature(function: Callable[..., Any]) -> dict[str, str]:
    if not callable(function):
        message = f"a loop is a function such as train(model, loader, optimizer, accumulation_steps), not {function!r}."
        raise LoopError(message)
    roles: dict[str, str] = {}
    unknown = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role, is_required = role_of(name), parameter.default is parameter.empty
        if role and role not in roles.values() and (is_required or role != "max_steps"):
            roles[name] = role
        elif is_required:
            unknown.append(name)
    name = getattr(function, "__name__", "the loop")
    known = f"Recognised names are {', '.join(ROLES)}, and common variants of them."
    if unknown:
        message = (
            f"{name} has unknown parameters: {', '.join(unknown)}. Rename them, give them defaults, or wrap the loop: "
            f"def loop(model, loader, optimizer, accumulation_steps): return {name}(...). {known}"
        )
        raise LoopError(message, parameters=tuple(unknown))
    if "model" not in roles.values() or not {"loader", "dataset", "get_batch"} & set(roles.values()):
        message = (
            f"{name} needs a parameter for a model and one for a loader or a data set; it has: "
            f"{', '.join(roles) or 'none'}. {known}"
        )
        raise LoopError(message, parameters=tuple(roles))
    return roles


def _names_used(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names in a function, in functions of its module that it calls, and the real names of aliases."""
    words = set(inspect.signature(function).parameters)
    inner = inspect.unwrap(function)
    scope: Mapping[str, Any] = getattr(inner, "__globals__", {})
    waiting, seen = [getattr(inner, "__code__", None)], set[CodeType]()
    while waiting:
        code = waiting.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        words.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]  # nested functions
        for value in (scope[name] for name in code.co_names if name in scope):
            if inspect.isclass(value) or inspect.isfunction(value):
                words.add(value.__name__)
            if inspect.isfunction(value) and value.__globals__ is scope:
                waiting.append(value.__code__)
    return frozenset(words)


class GuessedSettings:
    """A settings object: attributes with a known role have its value; others are guessed and recorded."""

    def __init__(self, values: Mapping[str, Any], guesses: dict[str, Any]) -> None:
        vars(self).update(_values=values, _guesses=guesses)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any setting)
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self:
            return self._values[role_of(name)]
        if name.lower() in _SECTIONS:
            return self
        guess = next((value for words, value in _GUESSES if re.search(words, name.lower())), 0)
        return self._guesses.setdefault(name, guess)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 (any setting)
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return role_of(name) in _SETTINGS

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 (any setting)
        """Return a setting with a known role, or the default."""
        return getattr(self, name) if name in self else default
