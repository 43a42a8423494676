"""Calls a loop as its user would, on the probe model (see `probe`). Only in subprocesses: it changes torch globally."""

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from anybatch.data.random_state import seed_generators
from anybatch.diagnostics.loop_check.probe import (
    LoopTrace,
    ProbeData,
    ProbeLoader,
    Recorder,
    RowModel,
    TargetKind,
    make_data,
)
from anybatch.errors import LoopError
from anybatch.parallel.launchers import set_launch_variables
from anybatch.parallel.torch_internals import HashStore

MICRO_BATCH_SIZE, ACCUMULATION_STEPS, NUM_EPOCHS, NUM_SAMPLES = 4, 3, 2, 31
"""On 1 rank and on 2, the last micro-batch and the last window (the micro-batches of a step) are not full."""
SMALL_GAIN, LARGE_GAIN = 2.0**-20, 2.0**20
"""Factors that make gradients so small that they are never clipped, or so large that they are always clipped."""
ROLES: Mapping[str, str] = {
    "model": (
        r"model|net(work)?|module|ddp_model|agent|policy|generator|discriminator|critic|actor|encoder|decoder"
        r"|(net|model)_?[dgst]|(ema|student|teacher|target|online)(_?(model|net(work)?))?|model_(ema|student|teacher)"
    ),
    "loader": r"(train_?|training_)?(data_?)?(loader|dl)(_train)?|(train_)?batches|(train|data)_iter|rollouts",
    "get_batch": r"(get|next|sample)_(train_)?batch|get_next_batch",
    "dataset": r"(train_)?dataset|train_?set|(train_)?data",
    "optimizer": r"opt|optim(izer)?(_?([a-rt-z]|\w+([eo]r|nt|ic)))?|(\w|\w+([eo]r|nt|ic))_opt(im(izer)?)?",
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
"""Role of a parameter -> regular expression for its name. A required parameter without a role is an error; an optional
parameter without a role keeps its default. Only models and optimizers may be several."""
_SETTINGS = frozenset({"accumulation_steps", "epochs", "max_steps", "micro_batch_size", "max_norm", "device", "scaler"})
"""Roles that the attributes of a settings object may have."""
_GUESSES: tuple[tuple[str, Any], ...] = (
    ("interval|freq|every|_steps|iters|patience", 1_000_000),
    ("gpu|resume|ema", None),
    ("dir|path|file|folder|output|name", "judged"),
    ("lr|learning_rate", 0.1),
    ("world_size|num_", 1),
)
"""Parts of names of unknown settings, and values that disable logging, evaluation and saving. Other settings are 0."""
_TRAINER, _ENGINE = "transformers.trainer", "anybatch.engine.engine"
_RANK_NAMES = frozenset(
    {"DistributedDataParallel", "no_sync", "DistributedSampler", "all_reduce", "get_rank", "get_world_size"}
)


def role_of(name: str) -> str:
    """Return the role of a parameter or setting with this name; "" if unknown."""
    return next((role for role, names in ROLES.items() if re.fullmatch(names, name.lower())), "")


def _roles_in_signature(function: Callable[..., Any], names_used: frozenset[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    unknown = []
    for name, parameter in inspect.signature(function).parameters.items():
        role, is_required = role_of(name), parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_new = role not in roles.values() or (is_required and role in {"model", "optimizer"})
        if role and is_new and (is_required or role != "max_steps"):
            roles[name] = role
        elif is_required:
            unknown.append(name)
    name = getattr(function, "__name__", "the loop")
    if _TRAINER in names_used and "model" not in roles.values():
        message = f"{name} trains with a Trainer of transformers: check it with ab.check(trainer)."
        raise LoopError(message, code="uses_trainer")
    if _ENGINE in names_used:
        message = (
            f"{name} uses ab.Engine, whose first step checks the loss. For more, use ab.check(model, loss, batch)."
        )
        raise LoopError(message, code="uses_engine")
    if unknown or not ("model" in roles.values() and {"loader", "dataset", "get_batch"} & set(roles.values())):
        unclear = f"has unknown parameters: {', '.join(unknown)}"
        needs = f"needs a model, and a loader or a data set, and has {', '.join(roles) or 'no parameter'}"
        message = (
            f"{name} {unclear if unknown else needs}. Rename parameters, give them "
            f"defaults, or wrap the loop: def loop(model, loader, optimizer, accumulation_steps): return {name}(...). "
            f"Recognised names are {', '.join(ROLES)}, and common variants of them."
        )
        raise LoopError(message, parameters=tuple(unknown or roles))
    return roles


def _names_used(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names and keys used in a function and in its module's functions and classes.

    Aliases also have their real names. The module of transformers' Trainer is included if they use one.
    """
    names = set(inspect.signature(function).parameters)
    inner = inspect.unwrap(function)
    scope: Mapping[str, Any] = getattr(inner, "__globals__", {})
    pending, seen = [getattr(inner, "__code__", None)], set[CodeType]()
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        names.update(code.co_names, (text for text in code.co_consts if isinstance(text, str) and text.isidentifier()))
        imported = {getattr(scope.get(name), "__name__", name).partition(".")[0] for name in code.co_names}
        if imported & {"transformers", "trl"} and any(n.endswith("Trainer") and n not in scope for n in code.co_names):
            names.add(_TRAINER)
        if "anybatch" in imported and "Engine" in code.co_names:
            names.add(_ENGINE)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]  # nested functions
        for value in (scope[name] for name in code.co_names if name in scope):
            if inspect.isclass(value) or inspect.isfunction(value):
                names.add(value.__name__)
                names.update({base.__module__ for base in getattr(value, "__mro__", ())} & {_TRAINER, _ENGINE})
            if inspect.isfunction(value) and value.__globals__ is scope:
                pending.append(value.__code__)
            if inspect.isclass(value) and value.__module__ == inner.__module__:
                pending += [method.__code__ for method in vars(value).values() if inspect.isfunction(method)]
    return frozenset(names)


class GuessedSettings:
    """A settings object: attributes with a known role have the role's value; other values are guessed and recorded."""

    def __init__(self, values: Mapping[str, Any], guesses: dict[str, Any]) -> None:
        vars(self).update(_values=values, _guesses=guesses)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any setting)
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self:
            return self._values[role_of(name)]
        guess = next((value for pattern, value in _GUESSES if re.search(pattern, name.lower())), 0)
        return self._guesses.setdefault(name, guess)

    __getitem__ = __getattr__

    def __contains__(self, name: str) -> bool:
        return role_of(name) in _SETTINGS

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 (any setting)
        """Return a setting with a known role, or the default."""
        return getattr(self, name) if name in self else default


class JudgedLoop:
    """A loop, the arguments that it needs by its signature and the names in its code, and the data that it runs on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            message = f"a loop is a function like train(model, loader, optimizer, accumulation_steps), not {function}."
            raise LoopError(message)
        names = _names_used(function)
        roles = _roles_in_signature(function, names)
        streams = {name for name in names if role_of(name) == "get_batch"}
        if "loader" not in roles.values() and streams - roles.keys():  # a data set that returns batches is a loader
            roles = {name: "loader" if role == "dataset" else role for name, role in roles.items()}
        settings = {role_of(name) for name in names} & _SETTINGS if "settings" in roles.values() else set()
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.function = function
        self.name: str = getattr(function, "__name__", "the loop")
        self.file: str | None = None if code is None else code.co_filename  # None for a callable object
        self.roles: Mapping[str, str] = roles  # parameter name -> role, for all parameters that are recognised
        self.models = [name for name, role in roles.items() if role == "model"]
        self.needed = {*roles.values(), *settings}  # all roles, as parameters or as attributes of a settings object
        self.has_accumulation_steps = "accumulation_steps" in self.needed
        self.takes_loader = bool({"loader", "get_batch"} & self.needed)  # receives micro-batches, not a data set
        self.is_stream = bool(streams)  # requests one batch at a time, so it sees no end of an epoch
        self.uses_ranks = bool(names & _RANK_NAMES)
        # The loop calls no_sync, a method of the wrapper, but does not wrap the model itself.
        self.expects_wrapper = "no_sync" in names and "DistributedDataParallel" not in names
        self.uses_scaler = any("scaler" in name.lower() for name in names)
        self.is_for_tokens = bool(names & {"input_ids", "tokens", "attention_mask"})
        self.kind: TargetKind = "classes"
        self.dtype = torch.float64
        self.num_outputs = 1  # values that a model returns
        self.watched = 0  # the model whose gradients are recorded, if there are several

    def changed(self, **values: Any) -> "JudgedLoop":  # noqa: ANN401 (attributes)
        """Return a copy with other values of the last four attributes."""
        copied = copy.copy(self)
        vars(copied).update(values)
        return copied

    @property
    def data(self) -> ProbeData:
        """The data of all samples."""
        return make_data(self.kind, is_padded=not self.is_stream, dtype=self.dtype)

    @property
    def ids(self) -> range:
        """The ids of an epoch's samples; if the loop requests one batch at a time, they fill whole windows."""
        window = MICRO_BATCH_SIZE * ACCUMULATION_STEPS
        return range(NUM_SAMPLES // window * window if self.is_stream else NUM_SAMPLES)

    def run(
        self,
        ids: Sequence[int] | None = None,
        *,
        size: int = MICRO_BATCH_SIZE,
        steps: int = ACCUMULATION_STEPS,
        epochs: int = NUM_EPOCHS,
        gain: float = SMALL_GAIN,
        loss_scale: float = 1.0,
        seed: int = 0,
    ) -> LoopTrace:
        """Run the loop on the samples `ids` (None: all) in micro-batches of `size`, and return the trace.

        A function without a parameter for epochs is called once per epoch.
        """
        needed, recorder = self.needed, Recorder(self.file, gain, epochs)
        torch.set_grad_enabled(True)  # an earlier run may have changed these settings
        torch.set_default_dtype(torch.float32)
        seed_generators(seed)
        data, watched, models = self.data, self.models[self.watched], dict[str, RowModel]()
        for name in self.models:
            other = recorder if name == watched else Recorder(None, gain)
            models[name] = RowModel(data, gain, other, self.num_outputs, is_watched=name == watched)
            models[name].gain_of_made = 2.0 if re.search("disc|critic|d$", name.lower()) else 1.0
        loader = ProbeLoader(data, self.ids if ids is None else ids, size, recorder)
        with _scaled_by(loss_scale), _CudaIsCpu(), recorder:
            optimizers = self._optimizers(models)
            values = self._values(models[watched], next(iter(optimizers.values())), loader, steps, epochs)
            values["settings"] = GuessedSettings(values, recorder.trace.guesses)
            values |= {**optimizers} | {name: values["model"] if name == watched else models[name] for name in models}
            recorder.watch(models[watched].table, list(optimizers.values()) if "optimizer" in needed else [])
            for epoch in range(1 if {"epochs", "max_steps"} & needed else epochs):
                self._call({**values, "epoch": epoch})
                recorder.trace.call_ends.append(len(recorder.trace.forwards))
        return recorder.trace

    def _optimizers(self, models: Mapping[str, RowModel]) -> Mapping[str, torch.optim.Optimizer]:
        """Return an optimizer for each such parameter: of the model with its suffix or prefix, or of all models."""
        names = [name for name, role in self.roles.items() if role == "optimizer"] or ["optimizer"]
        trained = [name for name in models if not re.search("ema|teacher|target", name.lower())] or list(models)
        optimizers = {}
        for name in names:
            word = re.sub("optim(izer)?|opt|_", "", name.lower())
            own = [each for each in trained if word and re.sub("net(work)?|model|_", "", each.lower()).startswith(word)]
            # Any learning rate will do: the outputs of the models do not depend on their parameters.
            optimizers[name] = torch.optim.SGD([models[each].table for each in own or trained], lr=0.1)
        return optimizers

    def _values(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: ProbeLoader, steps: int, epochs: int
    ) -> dict[str, Any]:
        """Return the value of each role."""
        return {
            "model": DistributedDataParallel(model) if self.expects_wrapper else model,
            "loader": loader,
            "get_batch": loader.next_batch,
            "dataset": loader.dataset,
            "optimizer": optimizer,
            "accumulation_steps": steps,
            "criterion": {"values": nn.MSELoss, "scores": nn.BCELoss}.get(self.kind, nn.CrossEntropyLoss)(),
            # The rate falls in every step, so that a schedule that runs too fast is detected.
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
            "scaler": torch.amp.GradScaler("cpu"),
            "device": torch.device("cpu"),
            "epochs": epochs,
            "max_steps": -(-len(loader) // steps) * epochs,
            "micro_batch_size": loader.batch_size,
            "max_norm": 1.0,
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        }

    def _call(self, values: Mapping[str, Any]) -> None:
        """Call the loop with the value of each role."""
        bound = inspect.signature(self.function).bind_partial()
        bound.arguments.update({name: values.get(name, values[role]) for name, role in self.roles.items()})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.function(*bound.args, **bound.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (any error of the user's code)
            if isinstance(error, SystemExit) and error.code in {None, 0}:
                return
            trace = error.__traceback__  # tb_next drops this frame, so that the traceback begins in the user's loop
            lines = traceback.format_exception(type(error), error, None if trace is None else trace.tb_next)
            raise LoopError("".join(lines).rstrip(), cause=type(error).__name__) from None


class _CudaIsCpu(TorchFunctionMode):
    """Keeps tensors and modules on the CPU when the loop moves them to an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run a function of torch with its devices replaced."""
        if func in {Tensor.cuda, Tensor.pin_memory}:
            return args[0]
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:  # noqa: ANN401 (any argument)
    device = str(value) if isinstance(value, str | torch.device) else ""
    return torch.device("cpu") if device.split(":")[0] in {"cuda", "mps", "xpu"} else value


def _scaled_by(loss_scale: float) -> Any:  # noqa: ANN401 (a patch of unittest.mock)
    """Return a patch that gives this scale to all gradient scalers that the loop makes."""
    make = torch.amp.GradScaler.__init__

    def make_on_cpu(scaler: Any, device: str = "cpu", init_scale: float = 0.0, **kwargs: Any) -> None:  # noqa: ANN401, ARG001
        make(scaler, "cpu", loss_scale, **kwargs)

    return mock.patch.object(torch.amp.GradScaler, "__init__", make_on_cpu)


def prepare_process(*, in_group: bool) -> None:
    """Replace functions of torch that need a driver or a launcher; with `in_group`, join a process group."""

    def nothing(*_args: object, **_kwargs: object) -> int:
        return 0

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # imports torch's compiler, which fails after the replacements below
    for name in ("synchronize", "set_device", "reset_peak_memory_stats", "init", "current_device"):
        setattr(torch.cuda, name, nothing)
    if in_group:
        if not dist.is_initialized():  # a loop for several ranks also runs alone, to measure unit gradients
            set_launch_variables(0, 1)
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        vars(dist).update(init_process_group=nothing, destroy_process_group=nothing)
