"""Private interfaces of torch that training or several folders use.

The docstring of a function gives the private name that it uses. Each name was verified on the versions in `SEEN`; `make
matrix` verifies it again. If a name is missing, the function uses public names if that is safe, or raises
`UnsupportedTorchError`; no gradient is ever wrong. Other folders have a separate `torch_internals.py`.

The argument `of` of a function is the object in which it looks up the private name; tests pass an object without it.
"""

import itertools
import operator
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import _utils, get_worker_info

from anybatch.core.compatibility import Feature, refusal
from anybatch.errors import CompositionError, UnsupportedTorchError

SEEN: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch on which all private names were verified."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Convert an ImportError or AttributeError in this context to an `UnsupportedTorchError` that names the purpose."""
    try:
        yield
    except (ImportError, AttributeError) as missing:
        raise lacking(purpose, missing) from missing


def lacking(purpose: str, missing: Exception) -> UnsupportedTorchError:
    """Return the error for a purpose that needs another version of torch; `missing` is the original error."""
    return UnsupportedTorchError(
        f"{purpose} needs a part of torch that version {torch.__version__} lacks ({missing}). Install torch "
        f"{', '.join(SEEN)}, or a newer anybatch."
    )


with needed_for("Detecting normalisation layers"):
    # The only common bases of all BatchNorm and InstanceNorm layers: lazy, synchronised and user-defined. A list of the
    # public classes would miss user-defined layers, and a missed layer makes a gradient wrong without an error.
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

BatchNormBase = _BatchNorm
InstanceNormBase = _InstanceNorm


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it is alive; tensors that share memory have the same number.

    Uses `UntypedStorage._cdata`, its address in C++; if missing, the id of the Python object, which torch keeps while
    the storage is alive. `data_ptr` does not work: it is 0 for every tensor without data.
    """
    try:
        return int(storage._cdata)
    except AttributeError:
        return id(storage)


def dense_values(tensor: Tensor) -> Tensor:
    """Return the stored values of a sparse tensor, without a copy; return a dense tensor unchanged.

    Uses `Tensor._values`; if missing, `values()`, which does not support repeated indices.

    Raises:
        UnsupportedTorchError: the tensor has repeated indices, and torch has no `_values`.
    """
    if not tensor.is_sparse:
        return tensor
    try:
        return tensor._values()
    except AttributeError as missing:
        if tensor.is_coalesced():
            return tensor.values()
        purpose = "Reading a sparse tensor that is not coalesced"
        raise lacking(purpose, missing) from missing


def sparse_bytes(tensor: Tensor) -> int:
    """Return the bytes of a sparse tensor: values and indices, including repeated ones.

    Uses `Tensor._values` and `_indices`; if missing, returns the smaller number of bytes after coalescing.
    """
    try:
        return tensor._values().nbytes + tensor._indices().nbytes
    except AttributeError:
        merged = tensor.coalesce()
        return merged.values().nbytes + merged.indices().nbytes


def is_in_backward(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether autograd is running a backward in this thread: `torch._C._current_graph_task_id`."""
    try:
        return int(of._current_graph_task_id()) >= 0
    except AttributeError as missing:
        purpose = "Distinguishing a backward from a forward"
        raise lacking(purpose, missing) from missing


def num_changes(tensors: Iterable[Tensor | None], purpose: str) -> list[int]:
    """Return the number of in-place changes of each tensor since it was created (`Tensor._version`); skip None."""
    try:  # not `needed_for`: this runs twice in every micro-batch
        return [tensor._version for tensor in tensors if tensor is not None]
    except AttributeError as missing:
        raise lacking(purpose, missing) from missing


def change_each(operation: str, tensors: Sequence[Tensor], *arguments: Any, of: Any = torch) -> None:  # noqa: ANN401 (torch)
    """Apply an in-place method such as "add" to each tensor, with `torch._foreach_add_` if it exists.

    An argument is a list with one value for each tensor, or a single value for all tensors.
    """
    if (change_all := getattr(of, f"_foreach_{operation}_", None)) is not None:
        change_all(tensors, *arguments)
        return
    for number, tensor in enumerate(tensors):
        values = [argument[number] if isinstance(argument, Sequence) else argument for argument in arguments]
        getattr(tensor, f"{operation}_")(*values)


def _is_copy_target(source: Tensor, target: Tensor) -> bool:
    return source.shape == target.shape and source.dtype == target.dtype and source.device == target.device


class BufferKeeper:
    """A snapshot of the values of all buffers; each new snapshot overwrites the previous one in the same memory.

    It costs nothing for a model without buffers. Modules that are added later are ignored. Uses `Module._buffers`
    without a fallback: buffers are restored by writing to these dicts, and `named_buffers` takes as long as a forward.
    """

    def __init__(self, modules: nn.Module) -> None:
        with needed_for("Restoring buffers after a failed step"):
            self._owners = [module._buffers for module in modules.modules()]
        self._before: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._values: list[Tensor] = []
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Take a snapshot of the current values."""
        self._before = [(owner, dict(owner)) for owner in self._owners if owner]
        self._values = [value for _, named in self._before for value in named.values() if value is not None]
        # A forward may replace a buffer by a new tensor (`self.running_mean = ...`), whose shape may differ.
        if not (len(self._values) == len(self._copies) and all(map(_is_copy_target, self._values, self._copies))):
            self._copies = [torch.empty_like(value) for value in self._values]
        if self._values:
            with torch.no_grad():
                change_each("copy", self._copies, self._values)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the last snapshot, even if a module has replaced, added or removed a buffer."""
        # Clear first, to remove buffers that the forward has added.
        for owner in self._owners:
            owner.clear()
        for owner, named in self._before:
            owner.update(named)
        if self._values:
            change_each("copy", self._values, self._copies)


def kept_buffers(modules: nn.Module) -> BufferKeeper:
    """Return a snapshot of all buffers' current values."""
    keeper = BufferKeeper(modules)
    keeper.keep()
    return keeper


def outside_modes(of: Any = dispatch) -> AbstractContextManager[object]:  # noqa: ANN401 (torch)
    """Return a context in which all dispatch modes are off, such as a memory budget or a mode of the user.

    Uses `torch.utils._python_dispatch._disable_current_modes`. The modes must not count the tensors of a plan.
    """
    with needed_for("Planning a micro-batch size within a run"):
        context: AbstractContextManager[object] = of._disable_current_modes()
    return context


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Returns two contexts for a checkpointed block: for the forward, and for the recomputation in the backward."""


def checkpointed_forward(
    module: nn.Module,
    contexts: Contexts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Any = torch.utils.checkpoint,  # noqa: ANN401 (torch)
) -> Generator[None, None, None]:
    """Return a generator around a checkpointed forward: advance it once, run the forward, and advance it to its end.

    Uses `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, which `checkpoint(use_reentrant=False)` runs;
    the random state is preserved, and other options have the defaults of `checkpoint`. `module` runs again in the
    backward.
    """
    # In torch's order: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
    options = (True, contexts, "default", False, True)
    try:
        running: Generator[None, None, None] = of._checkpoint_without_reentrant_generator(
            module, *options, *args, **kwargs
        )
    except (AttributeError, TypeError) as missing:
        purpose = "Exact(method='checkpoint')"
        raise lacking(purpose, missing) from missing
    return running


def hide_worker(of: Any = _utils) -> bool:  # noqa: ANN401 (torch)
    """Make `get_worker_info` return None in this worker, as in the main process; return whether that worked.

    Sets `torch.utils.data._utils.worker._worker_info`. It then calls the public function, and returns False for a
    version of torch that stores the worker elsewhere.
    """
    worker = getattr(of, "worker", None)
    if worker is not None:
        worker._worker_info = None
    return get_worker_info() is None


with needed_for("Recognizing dropout layers"):
    from torch.nn.modules.dropout import _DropoutNd

DropoutBase = _DropoutNd
TorchDispatchMode = dispatch.TorchDispatchMode
_TRAINABLE = attrgetter("requires_grad")
_VALUES = operator.methodcaller("values")
_ACCUMULATION_HOOKS = "_post_accumulate_grad_hooks"
_SEEING_HOOKS = "Detecting hooks that would run in every micro-batch"


def is_in_checkpoint(of: Any = torch._C) -> bool:  # noqa: ANN401 (torch)
    """Whether a forward runs inside `torch.utils.checkpoint` with use_reentrant=False.

    Uses `torch._C._autograd._top_saved_tensors_default_hooks`: checkpointing is recognized by its saved-tensor hooks.
    """
    try:
        hooks = of._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (takes no keyword)
    except AttributeError as missing:
        purpose = "norms='exact'"
        raise lacking(purpose, missing) from missing
    # Compare the module: norms="exact" also uses saved-tensor hooks, and hooks other than torch's are harmless.
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def active_dispatch_modes(of: Any = dispatch) -> list[Any]:  # noqa: ANN401 (torch)
    """Return the active `TorchDispatchMode` objects of this thread, outermost first.

    Uses `torch.utils._python_dispatch._get_current_dispatch_mode_stack`.
    """
    with needed_for("norms='exact'"):
        return list(of._get_current_dispatch_mode_stack())


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called: `_orig_mod` and `_compiled_call_impl`."""
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the original module of `torch.compile(module)`, or the module itself: `OptimizedModule._orig_mod`."""
    try:
        original: nn.Module = vars(module)["_modules"]["_orig_mod"]
    except KeyError as missing:
        if type(module).__module__.startswith("torch._dynamo"):
            purpose = "Finding the original module of torch.compile(model)"
            raise lacking(purpose, missing) from missing
        return module
    return original


class TrainableParts:
    """A snapshot of a model's modules and parameters, to detect changes in every step.

    Reads the dicts `Module._parameters` and `_modules`, because torch's public iterators take ten times as long.
    """

    def __init__(self, modules: nn.Module) -> None:
        with needed_for("Detecting that parameters have been frozen or replaced"):
            tables = [table for module in modules.modules() for table in (module._parameters, module._modules)]
        self._tables = list(filter(None, tables))
        # Most dicts are empty, since most modules lack submodules or parameters; these are cheaper to check.
        self._empty_tables = [table for table in tables if not table]
        self._parts: list[object] = list(itertools.chain.from_iterable(map(_VALUES, self._tables)))
        self._parameters = [part for part in self._parts if isinstance(part, Tensor)]
        self._trainable = list(map(_TRAINABLE, self._parameters))

    @property
    def ids(self) -> list[int]:
        """The `id` of every trainable parameter; a parameter that several modules share is listed several times."""
        return [id(weight) for weight, trains in zip(self._parameters, self._trainable, strict=True) if trains]

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
    """Return every hook of `Tensor.register_hook` on parameters, with the index of its parameter.

    Uses `Tensor._backward_hooks`; torch has no public name for them.
    """
    try:  # not `needed_for`: this runs in every step, and `needed_for` takes longer than the other lines
        tables = list(map(attrgetter("_backward_hooks"), parameters))
    except AttributeError as missing:
        purpose = "Running hooks on parameters once per effective batch"
        raise lacking(purpose, missing) from missing
    return _listed(tables) if any(tables) else []


def accumulation_hooks(parameters: Sequence[Tensor]) -> list[tuple[int, Callable[[Tensor], None]]]:
    """Return every hook of `register_post_accumulate_grad_hook`, with the index of its parameter.

    Uses `Tensor._post_accumulate_grad_hooks`; torch has no public name for them.
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
    """Return every hook in tables of hooks, with the index of its table."""
    return [(number, hook) for number, table in enumerate(tables) if table for hook in table.values()]


@contextmanager
def without_tensor_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Disable the hooks of `tensor_hooks` within the context; their handles stay valid."""
    numbers = {number for number, _ in tensor_hooks(parameters)}
    disabled = [(parameters[number], parameters[number]._backward_hooks) for number in numbers]
    for parameter, _ in disabled:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in disabled:
            parameter._backward_hooks = hooks


def arguments_of(operation: Any) -> tuple[list[str], dict[str, Any]]:  # noqa: ANN401 (an operation of torch)
    """Return the names and defaults of an operation's arguments: `OpOverload._schema`; empty if it has none."""
    schema = getattr(operation, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return [a.name for a in arguments], {a.name: a.default_value for a in arguments if a.has_default_value()}


def gradients(value: Tensor, leaves: Sequence[Tensor], of: Any = torch.autograd.Variable) -> Sequence[Tensor | None]:  # noqa: ANN401 (torch)
    """Return `torch.autograd.grad(value, leaves, allow_unused=True)`, with function modes active in the backward.

    Uses `Variable._execution_engine`; if missing, `torch.autograd.grad`, which disables the active `TorchFunctionMode`,
    so that a checkpointed block is recomputed without the mode.
    """
    engine = getattr(of, "_execution_engine", None)
    if engine is None:
        return torch.autograd.grad(value, leaves, allow_unused=True)
    keep_graph = create_graph = False
    results: Sequence[Tensor | None] = engine.run_backward(
        (value,),
        (torch.ones_like(value),),
        keep_graph,
        create_graph,
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return results


def widened(modules: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Callable[[Any], Any]]:
    """Return (copies of modules, function that returns the copy of an object), with tensors of a floating-point type.

    A copy has the same class, attributes and hooks, and separate parameters, buffers and children. Attributes that its
    forward assigns stay in the copy; lists and dicts are shared with the original. To change the
    type of `Parameter.data` would remove the parameter's gradient accumulator, and with it the hooks of DDP.
    """
    copies = _Copies(dtype)
    with needed_for("The check of the loss"):
        originals = [module for module in modules.modules() if uncompiled(module) is module]
        copies.known.update({id(module): object.__new__(type(module)) for module in originals})
        for module in originals:
            state = {key: copies.of(v) if isinstance(v, MethodType) else v for key, v in vars(module).items()}
            for name in ("_parameters", "_buffers", "_modules"):
                state[name] = {key: copies.of(part) for key, part in state[name].items()}
            vars(copies.known[id(module)]).update(state, _compiled_call_impl=None)
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
    """Return the function of one of torch's optimizers that creates a group's state: `Optimizer._init_group`.

    The function takes the parameter group, and lists to fill. Return None for other optimizers, whose function may have
    other effects, or if the name is missing: then the optimizer's first step creates the state.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    return getattr(optimizer, "_init_group", None)


def chained_schedulers(scheduler: object) -> Sequence[object]:
    """Return the schedulers in a `ChainedScheduler`, which has no `last_epoch`: `_schedulers`; () for any other."""
    return getattr(scheduler, "_schedulers", ()) if isinstance(scheduler, ChainedScheduler) else ()


def packing_function(of: Any = torch) -> Callable[..., object]:  # noqa: ANN401 (torch)
    """Return the function that modes intercept in `nn.utils.rnn.pack_padded_sequence`: `_pack_padded_sequence`."""
    with needed_for("rng='per_sample'"):
        function: Callable[..., object] = of._pack_padded_sequence
    return function


def refused_in_backward(error: BaseException) -> CompositionError | None:
    """Return a CompositionError if an error comes from reentrant checkpointing; otherwise None.

    Reentrant checkpointing cannot be detected earlier, so it is recognized by the function that raised the error.
    """
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame
    if last is None or last.f_code is not CheckpointFunction.backward.__code__:
        return None
    return CompositionError(refusal(Feature.REENTRANT, Feature.REENTRANT, {}))


def layer_versions(state: Mapping[Any, Any]) -> Any:  # noqa: ANN401 (nested dicts, as torch makes them)
    """Return the layer versions in a module's state dict, `OrderedDict._metadata`; None if missing.

    Without versions, layers load the state as their first version.
    """
    return getattr(state, "_metadata", None)


def set_layer_versions(state: OrderedDict[Any, Any], versions: object) -> None:
    """Restore the layer versions of a state dict for `Module.load_state_dict`."""
    vars(state)["_metadata"] = versions
