"""Private interfaces of torch that the engine uses, each with its fallback or refusal; shared ones are in `core`.

All of it was seen to hold on the versions in `anybatch.core.torch_internals.SEEN`. Where a name is missing, a function
does without it where that is safe, and raises `UnsupportedTorchError` where the gradient might be wrong.
The last argument of a function is where the name is looked for, so that a test can pass something that lacks it.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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

from anybatch.core.torch_internals import lacking, needed_for

with needed_for("Telling dropout layers from others"):
    from torch.nn.modules.dropout import _DropoutNd as DropoutBase

TorchDispatchMode = dispatch.TorchDispatchMode
_TRAINABLE = attrgetter("requires_grad")
_VALUES = operator.methodcaller("values")
_ACCUMULATION_HOOKS = "_post_accumulate_grad_hooks"
_SEEING_HOOKS = "Seeing hooks that would run in every micro-batch"

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
    "state_maker",
    "tensor_hooks",
    "uncompiled",
    "widened",
    "without_tensor_hooks",
]


def is_in_checkpoint(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether a forward runs inside of `torch.utils.checkpoint` with use_reentrant=False.

    `torch._C._autograd._top_saved_tensors_default_hooks`: checkpointing is known by the hooks that it sets up.

    Raises:
        UnsupportedTorchError: torch does not show the hooks, so checkpointing could not be refused.
    """
    try:
        hooks = of._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (takes no keyword)
    except AttributeError as missing:
        purpose = "norms='exact'"
        raise lacking(purpose, missing) from missing
    # By module: other such hooks do no harm, and norms="exact" itself sets some up, to keep tensors on the host.
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def active_dispatch_modes(of: Any = dispatch) -> list[Any]:  # noqa: ANN401 (torch)
    """Return the modes that see each operation of this thread, outermost first, such as a memory ledger.

    `torch.utils._python_dispatch._get_current_dispatch_mode_stack`.

    Raises:
        UnsupportedTorchError: torch does not list them, so another thread's operations would not be seen.
    """
    with needed_for("norms='exact'"):
        return list(of._get_current_dispatch_mode_stack())


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called: `_orig_mod` and `_compiled_call_impl`.

    Raises:
        UnsupportedTorchError: it was, and the module behind it is not where it was in other versions.
    """
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile(module)`, or the module itself: `OptimizedModule._orig_mod`.

    Raises:
        UnsupportedTorchError: it is compiled, and does not say what is behind it.
    """
    try:
        found: nn.Module = vars(module)["_modules"]["_orig_mod"]
    except KeyError as missing:
        if type(module).__module__.startswith("torch._dynamo"):
            purpose = "Looking behind torch.compile(model)"
            raise lacking(purpose, missing) from missing
        return module
    return found


class TrainableParts:
    """A model's modules and parameters as they are now, to see in every step whether they still are.

    `Module._parameters` and `_modules`, each module's own dicts: to go through a model by its public iterators takes
    ten times as long.

    Args:
        modules: the model.

    Raises:
        UnsupportedTorchError: modules keep them elsewhere.
    """

    def __init__(self, modules: nn.Module) -> None:
        with needed_for("Seeing that parameters have been frozen or replaced"):
            tables = [table for module in modules.modules() for table in (module._parameters, module._modules)]
        self._tables = list(filter(None, tables))
        # Most are empty: leaves have no modules, activations no parameters. To see that they still are is cheaper.
        self._empty_tables = [table for table in tables if not table]
        self._parts = self._now()
        self._parameters = [one for one in self._parts if isinstance(one, Tensor)]
        self._trainable = list(map(_TRAINABLE, self._parameters))

    @property
    def ids(self) -> list[int]:
        """The identity of every parameter that required a gradient, once for each place in the modules."""
        return [id(one) for one, trains in zip(self._parameters, self._trainable, strict=True) if trains]

    @property
    def are_there(self) -> bool:
        """Whether every module and parameter is in its place, and requires a gradient as it did."""
        now = self._now()
        return (
            not any(self._empty_tables)
            and len(now) == len(self._parts)
            and all(map(operator.is_, now, self._parts))
            and list(map(_TRAINABLE, self._parameters)) == self._trainable
        )

    def _now(self) -> list[object]:
        return list(itertools.chain.from_iterable(map(_VALUES, self._tables)))


def tensor_hooks(parameters: Sequence[Tensor]) -> list[tuple[int, Callable[[Tensor], Tensor | None]]]:
    """Return every hook that `Tensor.register_hook` has put on parameters, with the number of its parameter.

    `Tensor._backward_hooks`; torch has no public name for them.

    Raises:
        UnsupportedTorchError: tensors keep them elsewhere.
    """
    return _hooks(parameters, "_backward_hooks", "Running hooks on parameters once per effective batch")


def accumulation_hooks(parameters: Sequence[Tensor]) -> list[tuple[int, Callable[[Tensor], None]]]:
    """Return every hook of `register_post_accumulate_grad_hook`, with the number of its parameter.

    `Tensor._post_accumulate_grad_hooks`; torch has no public name for them.

    Raises:
        UnsupportedTorchError: tensors keep them elsewhere.
    """
    return _hooks(parameters, _ACCUMULATION_HOOKS, _SEEING_HOOKS)


def num_accumulation_hooks(parameters: Sequence[Tensor]) -> int:
    """Return how many `accumulation_hooks` lists, at a tenth of its cost.

    Raises:
        UnsupportedTorchError: tensors keep them elsewhere.
    """
    try:
        return sum(map(len, filter(None, map(attrgetter(_ACCUMULATION_HOOKS), parameters))))
    except AttributeError as missing:
        raise lacking(_SEEING_HOOKS, missing) from missing


def _hooks(parameters: Sequence[Tensor], table: str, purpose: str) -> list[tuple[int, Callable[[Tensor], Any]]]:
    try:  # not `needed_for`, which takes longer than the rest: these are asked for in every step
        tables = list(map(attrgetter(table), parameters))
    except AttributeError as missing:
        raise lacking(purpose, missing) from missing
    if not any(tables):
        return []
    return [(number, hook) for number, found in enumerate(tables) if found for hook in found.values()]


@contextmanager
def without_tensor_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take the hooks that `tensor_hooks` lists off for a while; their handles stay valid.

    Raises:
        UnsupportedTorchError: tensors keep them elsewhere.
    """
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
    """Return the names of an operation's arguments, and their defaults: `OpOverload._schema`; none of higher order."""
    schema = getattr(operation, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return [one.name for one in arguments], {o.name: o.default_value for o in arguments if o.has_default_value()}


def gradients(value: Tensor, leaves: Sequence[Tensor], of: Any = torch.autograd.Variable) -> Sequence[Tensor | None]:  # noqa: ANN401 (torch)
    """Return `torch.autograd.grad(value, leaves, allow_unused=True)`, with function modes on during the backward.

    `Variable._execution_engine`. Function modes handle `torch.autograd.grad` itself and are off meanwhile, so a
    checkpointed block would run again without them, as it does where the name is missing.
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
    """Return shallow copies of modules whose parameters and buffers have another floating-point type.

    A copy has the same class, attributes and hooks, and separate parameters, buffers and children. What its forward
    assigns to an attribute stays in the copy; lists and dicts are shared. `Parameter.data` is not used: to change its
    type drops the gradient accumulator, and with it the hooks of DDP.

    Args:
        modules: the modules; compiled ones are copied as they were before.
        dtype: the type of the copies.

    Returns:
        The copy, and a function that returns the copy of a module, parameter, method or partial function in there, and
        anything else as it is.

    Raises:
        UnsupportedTorchError: modules keep their parts elsewhere.
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
            if isinstance(module, nn.RNNBase):  # it keeps its parameters in a second list
                copy = copies.of(module)
                vars(copy)["_flat_weights"] = [getattr(copy, name) for name in module._flat_weights_names]
    return copies.of(modules), copies.of


class _Copies:
    """Copies of modules and tensors, by the identity of the originals."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:  # noqa: ANN401 (whatever a module keeps)
        """Return the copy of a module, tensor, method or partial function, and anything else as it is."""
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

    It takes the group and lists to fill. Only torch's optimizers are known to leave everything else alone in it. None
    for other optimizers, and where it is missing: the state is then made in the first step, after the gradients.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    return getattr(optimizer, "_init_group", None)


def chained_schedulers(scheduler: object) -> Sequence[object]:
    """Return the schedulers of a `ChainedScheduler`, which has no `last_epoch` itself: `_schedulers`; else nothing."""
    return getattr(scheduler, "_schedulers", ()) if isinstance(scheduler, ChainedScheduler) else ()


def packing_function(of: Any = torch) -> Callable[..., object]:  # noqa: ANN401 (torch)
    """Return the function that `nn.utils.rnn.pack_padded_sequence` calls, as modes see it: `_pack_padded_sequence`.

    Raises:
        UnsupportedTorchError: it calls something else, so that dropout on packed sequences would not be noticed.
    """
    with needed_for("rng='per_sample'"):
        found: Callable[..., object] = of._pack_padded_sequence
    return found
