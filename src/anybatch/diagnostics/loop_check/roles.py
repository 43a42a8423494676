"""Roles of a loop's parameters, recognised by their names."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from anybatch.errors import UserError

ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("model", "net", "network", "module", "ddp_model"),
        "loader": (
            *("loader", "dataloader", "data_loader", "train_loader", "train_dataloader", "trainloader", "batches"),
            *("data_iter", "train_dl", "dl", "train_iter", "dataloader_train", "train_batches", "training_loader"),
        ),
        "batch_function": ("get_batch", "next_batch", "get_train_batch", "sample_batch"),
        "dataset": ("dataset", "train_dataset", "train_set", "trainset", "train_data", "data"),
        "optimizer": ("optimizer", "optim", "opt"),
        "settings": ("args", "cfg", "config", "conf", "hparams", "hps", "params", "flags", "settings"),
        "accumulation_steps": (
            *("accumulation_steps", "grad_accum", "gradient_accumulation_steps", "k", "accum_steps", "accum_iter"),
            *("grad_accum_steps", "grad_accumulation_steps", "num_accumulation_steps", "accumulate_grad_batches"),
            *(
                "gradient_accumulation",
                "grad_acc_steps",
                "grad_acc",
                "update_freq",
                "accumulate",
                "iters_to_accumulate",
            ),
            *(
                "accum_grad",
                "accumulate_steps",
                "grad_accumulate",
                "accum_grad_iters",
                "accumulation",
                "accum_grad_batches",
            ),
        ),
        "criterion": ("criterion", "loss_fn", "loss_func", "loss_function"),
        "scheduler": ("scheduler", "lr_scheduler", "sched"),
        "scaler": ("scaler", "grad_scaler"),
        "device": ("device",),
        "epochs": ("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "max_epoch"),
        "epoch": ("epoch",),
        "max_steps": ("max_steps", "num_steps", "total_steps", "max_iters", "max_train_steps", "n_steps"),
        "micro_batch_size": ("micro_batch_size", "batch_size", "per_device_batch_size"),
        "max_norm": ("max_norm", "max_grad_norm", "grad_clip", "clip_norm", "clip", "clip_grad", "clip_grad_norm"),
        "rank": ("rank", "local_rank"),
        "world_size": ("world_size",),
    }
)
"""The names that each role may have, in upper or lower case."""

_SETTINGS = frozenset({"accumulation_steps", "epochs", "max_steps", "micro_batch_size", "max_norm", "device", "scaler"})
"""Roles that the attributes of a settings object may have."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_RANK_WORDS = frozenset(
    {"DistributedDataParallel", "no_sync", "DistributedSampler", "all_reduce", "get_rank", "get_world_size"}
)


@dataclass(frozen=True, slots=True)
class LoopParameters:
    """The arguments that a loop needs.

    Attributes:
        roles: parameter name -> role, for all parameters whose names are understood.
        ranks: whether it is written for several ranks.
        wrapped: whether it expects a model that DistributedDataParallel is round already.
        words: all names that it uses.
    """

    roles: Mapping[str, str]
    ranks: bool
    wrapped: bool
    words: frozenset[str] = frozenset()

    def __contains__(self, role: str) -> bool:
        # What is not a parameter of its own may be one of the settings that the loop asks for by name.
        asked = "settings" in self.roles.values() and any(_ROLE_OF.get(word.lower()) == role for word in self.words)
        return role in self.roles.values() or (asked and role in _SETTINGS)

    @property
    def all_roles(self) -> frozenset[str]:
        """The roles that it needs, as parameters or as settings."""
        return frozenset(role for role in ROLES if role in self)

    @property
    def is_stream(self) -> bool:
        """Whether it asks for one batch after the other, so that there is no last one."""
        return "batch_function" in self.roles.values() or bool(self.words & set(ROLES["batch_function"]))

    def bind(self, function: Callable[..., Any], values: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the arguments to call the loop with."""
        bound = inspect.signature(function).bind_partial()
        for name, role in self.roles.items():
            bound.arguments[name] = values[role]
        return bound


def read_parameters(function: Callable[..., Any]) -> LoopParameters:
    """Read the arguments that a loop needs from its signature and from the names it uses.

    Raises:
        UserError: a parameter without default is not understood, or there is no model or nothing to train it on.
    """
    if not callable(function):
        message = f"a loop is a function such as train(model, loader, optimizer, accumulation_steps), not {function!r}."
        raise UserError(message)
    roles: dict[str, str] = {}
    unknown = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        role = _ROLE_OF.get(name.lower())
        if role == "max_steps" and parameter.default is not parameter.empty:
            continue  # what ends a loop early is left out where it can be
        if role is not None and role not in roles.values():
            roles[name] = role
        elif parameter.default is parameter.empty:
            unknown.append(name)
    name = getattr(function, "__name__", "the loop")
    if unknown:
        message = (
            f"{name} has the parameters {', '.join(map(repr, unknown))}, and it is not clear what for. Rename them to "
            f"one of the names below, give them defaults, or wrap the loop: def loop(model, loader, optimizer, "
            f"accumulation_steps): return {name}(...).\n{_known_names()}"
        )
        raise UserError(message)
    if "model" not in roles.values() or not {"loader", "dataset", "batch_function"} & set(roles.values()):
        message = (
            f"{name} takes {', '.join(map(repr, roles)) or 'nothing'}; a loop to judge takes at least a model "
            f"and a loader (or a data set).\n{_known_names()}"
        )
        raise UserError(message)
    words, values = _names_used(function)
    if "loader" not in roles.values() and words & set(ROLES["batch_function"]) - roles.keys():
        # A data set that hands out one batch after the other is a loader.
        roles = {name: "loader" if role == "dataset" else role for name, role in roles.items()}
    wraps = DistributedDataParallel in values or "DistributedDataParallel" in words
    ranks = bool(words & _RANK_WORDS) or wraps or DistributedSampler in values
    ranks = ranks or bool({dist.all_reduce, dist.get_rank, dist.get_world_size} & values)
    # Only a wrapped model has no_sync, so a loop that uses it without wrapping expects one.
    return LoopParameters(roles, ranks, wrapped=ranks and "no_sync" in words and not wraps, words=words)


class AskedSettings:
    """An object with the settings that a loop asks for: those that are known by name, and guesses, which are kept.

    Args:
        values: what each role is.
        guesses: is filled with what was asked for beside them, and what was answered.
    """

    def __init__(self, values: Mapping[str, Any], guesses: dict[str, Any]) -> None:
        vars(self).update(_values=values, _guesses=guesses)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any setting)
        if name.startswith("__"):
            raise AttributeError(name)
        role = _role_of_setting(name)
        if role is not None:
            return self._values[role]
        return self._guesses.setdefault(name, _guess(name.lower(), self))

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 (any setting)
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return _role_of_setting(name) is not None

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 (any setting)
        """Return a setting that is known, or the default."""
        return self[name] if name in self else default  # noqa: SIM401 (this is `get`)


def _role_of_setting(name: str) -> str | None:
    """Return the role of a setting; what accumulates has more names than anybody lists, and one word in all of them."""
    role = _ROLE_OF.get(name.lower(), "accumulation_steps" if "accum" in name.lower() else "")
    return role if role in _SETTINGS else None


def _guess(name: str, settings: AskedSettings) -> Any:  # noqa: ANN401 (any setting)
    """Return what lets a loop go its plain way: intervals that are never over, switches that are off, a folder."""
    if name in _SECTIONS:
        return settings
    for words, value in _GUESSES:
        if any(word in name for word in words):
            return value
    return False


_SECTIONS = frozenset({"train", "training", "optim", "solver", "data", "model", "trainer", "optimization"})
_GUESSES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("interval", "freq", "every", "_steps", "iters", "patience"), 1_000_000),
    (("gpu", "resume", "ema"), None),
    (("dir", "path", "file", "folder", "output", "name"), "judged"),
    (("lr", "learning_rate"), 0.1),
    (("smoothing", "decay", "alpha", "beta", "eps", "dropout", "warmup", "start"), 0.0),
    (("seed", "rank", "workers"), 0),
    (("world_size", "num_"), 1),
)
"""Words in the name of a setting, and its value."""


def method_of(owner: type, name: str) -> Callable[..., Any]:
    """Return a method as a function that also takes what its class is made with.

    The object is made once for each model that it is called with, so that it lives as long as a run of the loop.
    """
    method = inspect.getattr_static(owner, name)
    if isinstance(method, staticmethod | classmethod):
        bound: Callable[..., Any] = getattr(owner, name)
        return bound
    made = inspect.signature(owner).parameters
    called = dict(list(inspect.signature(method).parameters.items())[1:])
    last: list[tuple[dict[str, Any], Any]] = []

    @functools.wraps(method)
    def loop(**given: Any) -> Any:  # noqa: ANN401 (what the method returns)
        arguments = {each: given[each] for each in made if each in given}
        if not last or any(last[-1][0][each] is not value for each, value in arguments.items() if each == "model"):
            last[:] = [(arguments, owner(**arguments))]
        return getattr(last[-1][1], name)(**{each: given[each] for each in called if each in given})

    keyword = inspect.Parameter.KEYWORD_ONLY
    every = {**made, **called}
    kept = [
        one.replace(kind=keyword) for one in every.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    loop.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return loop


def _known_names() -> str:
    return "\n".join(f"  {role.replace('_', ' ')}: {', '.join(names)}" for role, names in ROLES.items())


def _names_used(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[Any]]:
    """Return the names in a function, and in functions of its own module that it calls, with what they stand for."""
    words: set[str] = set(inspect.signature(function).parameters)
    values: set[Any] = set()
    # Helpers of the same module count as part of the loop; libraries do not.
    waiting, seen = [inspect.unwrap(function)], set()
    while waiting:
        current = waiting.pop()
        code, names = getattr(current, "__code__", None), getattr(current, "__globals__", {})
        if code is None or code in seen:
            continue
        seen.add(code)
        found = _names_in(code)
        words |= found
        for value in (names[name] for name in found if name in names):
            if inspect.isfunction(value) and value.__globals__ is names:
                waiting.append(value)
            elif inspect.isclass(value) or inspect.isfunction(value):
                values.add(value)
    return frozenset(words), frozenset(values)


def _names_in(code: CodeType) -> frozenset[str]:
    # Nested functions have code of their own.
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
