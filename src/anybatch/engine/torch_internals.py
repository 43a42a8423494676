"""Private interfaces of torch that the engine uses, each with a fallback or an error; shared ones are in `core`.

They were tested on the versions in `anybatch.core.torch_internals.SEEN`. If a name is missing, a function falls back to
public names if that is safe, and raises `UnsupportedTorchError` if the gradient could be wrong.
The last argument of a function is the object with the private name, so that a test can pass one without it.
"""

import itertools
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import CheckpointFunction

from anybatch.core.compatibility import Feature, refusal
from anybatch.core.torch_internals import lacking, needed_for
from anybatch.errors import CompositionError

with needed_for("Recognizing dropout layers"):
    from torch.nn.modules.dropout import _DropoutNd as DropoutBase

TorchDispatchMode = dispatch.TorchDispatchMode
_TRAINABLE = attrgetter("requires_grad")
_VALUES = operator.methodcaller("values")
_ACCUMULATION_HOOKS = "_post_accumulate_grad_hooks"
_SEEING_HOOKS = "Detecting hooks that would run in every micro-batch"

__all__ = [
    "DropoutBase",
    "TorchDispatchMode",
    "TrainableParts",
    "accumulation_hooks",
    "active_dispatch_modes",
    "arguments_of",
    "chained_schedulers",
    "gradients",
    "is_compiled",
    "is_in_checkpoint",
    "packing_function",
    "refused_in_backward",
    "state_maker",
    "tensor_hooks",
    "uncompiled",
    "widened",
    "without_tensor_hooks",
]


def is_in_checkpoint(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether a forward runs inside `torch.utils.checkpoint` with use_reentrant=False.

    `torch._C._autograd._top_saved_tensors_default_hooks`: checkpointing is recognized by its saved-tensor hooks.
    """
    try:
        hooks = of._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (takes no keyword)
    except AttributeError as missing:
        purpose = "norms='exact'"
        raise lacking(purpose, missing) from missing
    # By module: other saved-tensor hooks are harmless, and norms="exact" uses some to keep tensors on the host.
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def active_dispatch_modes(of: Any = dispatch) -> list[Any]:  # noqa: ANN401 (torch)
    """Return this thread's dispatch modes, such as a memory ledger, outermost first.

    `torch.utils._python_dispatch._get_current_dispatch_mode_stack`.
    """
    with needed_for("norms='exact'"):
        return list(of._get_current_dispatch_mode_stack())


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called: `_orig_mod` and `_compiled_call_impl`."""
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the original module of `torch.compile(module)`, or the module itself: `OptimizedModule._orig_mod`."""
    try:
        found: nn.Module = vars(module)["_modules"]["_orig_mod"]
    except KeyError as missing:
        if type(module).__module__.startswith("torch._dynamo"):
            purpose = "Finding the original module of torch.compile(model)"
            raise lacking(purpose, missing) from missing
        return module
    return found


class TrainableParts:
    """A snapshot of a model's modules and parameters, to detect changes in every step.

    `Module._parameters` and `_modules`, the dicts of each module: the public iterators take ten times as long.
    """

    def __init__(self, modules: nn.Module) -> None:
        with needed_for("Detecting that parameters have been frozen or replaced"):
            tables = [table for module in modules.modules() for table in (module._parameters, module._modules)]
        self._tables = list(filter(None, tables))
        # Most are empty, since leaves have no modules and activations no parameters; these are cheaper to check.
        self._empty_tables = [table for table in tables if not table]
        self._parts: list[object] = list(itertools.chain.from_iterable(map(_VALUES, self._tables)))
        self._parameters = [one for one in self._parts if isinstance(one, Tensor)]
        self._trainable = list(map(_TRAINABLE, self._parameters))

    @property
    def ids(self) -> list[int]:
        """The `id` of every trainable parameter, once for each place in the modules."""
        return [id(one) for one, trains in zip(self._parameters, self._trainable, strict=True) if trains]

    @property
    def are_unchanged(self) -> bool:
        """Whether all modules and parameters are unchanged, including `requires_grad`."""
        now = list(itertools.chain.from_iterable(map(_VALUES, self._tables)))
        return (
            not any(self._empty_tables)
            and len(now) == len(self._parts)
            and all(map(operator.is_, now, self._parts))
            and list(map(_TRAINABLE, self._parameters)) == self._trainable
        )


def tensor_hooks(parameters: Sequence[Tensor]) -> list[tuple[int, Callable[[Tensor], Tensor | None]]]:
    """Return every hook of `Tensor.register_hook` on parameters, with the number of its parameter.

    `Tensor._backward_hooks`; torch has no public name for them.
    """
    try:  # not `needed_for`, which takes longer than the rest of this function, which runs in every step
        tables = list(map(attrgetter("_backward_hooks"), parameters))
    except AttributeError as missing:
        purpose = "Running hooks on parameters once per effective batch"
        raise lacking(purpose, missing) from missing
    return _listed(tables) if any(tables) else []


def accumulation_hooks(parameters: Sequence[Tensor]) -> list[tuple[int, Callable[[Tensor], None]]]:
    """Return every hook of `register_post_accumulate_grad_hook`, with the number of its parameter.

    `Tensor._post_accumulate_grad_hooks`; torch has no public name for them.
    """
    try:
        tables = list(map(attrgetter(_ACCUMULATION_HOOKS), parameters))
    except AttributeError as missing:
        raise lacking(_SEEING_HOOKS, missing) from missing
    return _listed(tables)


def num_accumulation_hooks(parameters: Sequence[Tensor]) -> int:
    """Return the number of hooks in `accumulation_hooks`, at a tenth of its cost."""
    try:
        return sum(map(len, filter(None, map(attrgetter(_ACCUMULATION_HOOKS), parameters))))
    except AttributeError as missing:
        raise lacking(_SEEING_HOOKS, missing) from missing


def _listed(
    tables: Sequence[Mapping[int, Callable[[Tensor], Any]] | None],
) -> list[tuple[int, Callable[[Tensor], Any]]]:
    """Return every hook in tables of hooks, with the number of its table."""
    return [(number, hook) for number, found in enumerate(tables) if found for hook in found.values()]


@contextmanager
def without_tensor_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Disable the hooks of `tensor_hooks` within the context; their handles stay valid."""
    numbers = {number for number, _ in tensor_hooks(parameters)}
    taken = [(parameters[number], parameters[number]._backward_hooks) for number in numbers]
    for parameter, _ in taken:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in taken:
            parameter._backward_hooks = hooks


def arguments_of(operation: Any) -> tuple[list[str], dict[str, Any]]:  # noqa: ANN401 (an operation of torch)
    """Return the names and defaults of an operation's arguments: `OpOverload._schema`; empty for higher-order ones."""
    schema = getattr(operation, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return [one.name for one in arguments], {o.name: o.default_value for o in arguments if o.has_default_value()}


def gradients(value: Tensor, leaves: Sequence[Tensor], of: Any = torch.autograd.Variable) -> Sequence[Tensor | None]:  # noqa: ANN401 (torch)
    """Return `torch.autograd.grad(value, leaves, allow_unused=True)`, with function modes on during the backward.

    `Variable._execution_engine`. Function modes handle `torch.autograd.grad` and are disabled during it, so a
    checkpointed block would be recomputed without them. This happens if the name is missing.
    """
    engine = getattr(of, "_execution_engine", None)
    if engine is None:
        return torch.autograd.grad(value, leaves, allow_unused=True)
    keep_graph = create_graph = False
    found: Sequence[Tensor | None] = engine.run_backward(
        (value,),
        (torch.ones_like(value),),
        keep_graph,
        create_graph,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def widened(modules: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Return shallow copies of modules, with parameters and buffers in another floating-point type.

    A copy has the same class, attributes and hooks, and separate parameters, buffers and children. Attributes that its
    forward assigns stay in the copy; lists and dicts are shared. `Parameter.data` is not used: changing its type drops
    the gradient accumulator, and with it the hooks of DDP.
    """
    copies = _Copies(dtype)
    with needed_for("The check of the loss"):
        originals = [module for module in modules.modules() if uncompiled(module) is module]
        copies.known.update({id(module): object.__new__(type(module)) for module in originals})
        for module in originals:
            made = {key: copies.of(one) if isinstance(one, MethodType) else one for key, one in vars(module).items()}
            for name in ("_parameters", "_buffers", "_modules"):
                made[name] = {key: copies.of(part) for key, part in made[name].items()}
            vars(copies.known[id(module)]).update(made, _compiled_call_impl=None)
        for module in originals:
            if isinstance(module, nn.RNNBase):  # has a second list of its parameters
                copy = copies.of(module)
                vars(copy)["_flat_weights"] = [getattr(copy, name) for name in module._flat_weights_names]
    return copies.of(modules), copies.of


class _Copies:
    """Copies of modules and tensors, by the identity of the originals."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:  # noqa: ANN401 (any attribute of a module)
        """Return the copy of a module, tensor, method or partial function, and other objects unchanged."""
        if isinstance(value, nn.Module):
            return self.known.get(id(uncompiled(value)), value)
        if isinstance(value, Tensor):
            if value.is_floating_point() and id(value) not in self.known:
                wide = value.detach().to(self._dtype, copy=True)
                is_parameter = isinstance(value, nn.Parameter)
                self.known[id(value)] = nn.Parameter(wide, value.requires_grad) if is_parameter else wide
            return self.known.get(id(value), value)
        if isinstance(value, MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            return partial(self.of(value.func), *map(self.of, value.args), **value.keywords)
        return value


def state_maker(optimizer: Optimizer) -> Callable[..., object] | None:
    """Return the function that creates one parameter group's state in torch's optimizers: `Optimizer._init_group`.

    It takes the group and lists to fill. Only in torch's optimizers it is known to change nothing else. None for other
    optimizers, or if it is missing: then the first step creates the state, after the gradients.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    return getattr(optimizer, "_init_group", None)


def chained_schedulers(scheduler: object) -> Sequence[object]:
    """Return the schedulers of a `ChainedScheduler`, which lacks `last_epoch`: `_schedulers`; empty for others."""
    return getattr(scheduler, "_schedulers", ()) if isinstance(scheduler, ChainedScheduler) else ()


def packing_function(of: Any = torch) -> Callable[..., object]:  # noqa: ANN401 (torch)
    """Return the function in which modes see `nn.utils.rnn.pack_padded_sequence`: `_pack_padded_sequence`."""
    with needed_for("rng='per_sample'"):
        found: Callable[..., object] = of._pack_padded_sequence
    return found


def refused_in_backward(error: BaseException) -> CompositionError | None:
    """Return a CompositionError if an error comes from reentrant checkpointing; otherwise None.

    Reentrant checkpointing cannot be detected before, so it is recognized by the place that raised.
    """
    last = None
    # The last frame is the one that raised.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    if last is None or last.f_code is not CheckpointFunction.backward.__code__:
        return None
    return CompositionError(refusal(Feature.REENTRANT, Feature.REENTRANT, {}))
