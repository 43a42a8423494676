"""A cache for operations on tensors without data: their results depend on shapes and types, which repeat.

A model of equal blocks runs the same few dozen operations thousands of times, and `FakeTensorMode` takes longer to work
out the result of one than a CPU takes to compute it. Here a result is worked out once, and made again from its
metadata: shape, type, and the argument whose memory it shares.

That relies on how torch makes a `FakeTensor`, which it does not promise to keep. Where a name is missing, on a version
of torch on which it was not seen to hold, and for each result that does not come out the same when it is made the first
time, operations are run by `FakeTensorMode` itself: plans are the same, and take four times as long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.core.torch_internals import SEEN, storage_key
from anybatch.memory.ledger import DEVICE, KernelWorkspaces, MemoryLedger, OperationObserver, PoolSelector
from anybatch.memory.torch_internals import FakeTensor, FakeTensorMode, is_traceable_wrapper_subclass_type, is_view
from anybatch.planner.torch_internals import (
    fake_device_getter,
    keys_of,
    known_operations,
    makes_fake_tensors,
    operation,
    schema_of,
    set_conjugate,
    set_negative,
    subclass_of,
    undispatched,
    warn_of_data,
)
from anybatch.planner.trace.data_reads import WATCHED

# Exact types, since a subclass may compare and hash in its own way.
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LISTS = frozenset({list, tuple, torch.Size})
_NOT_BY_SHAPE = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
"""Tags of operations that look at numbers, or that change the shape of their arguments."""
_UNDESCRIBED = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Operations that keep memory for their backward of which torch's description of them says nothing."""
_READ = operation("_local_scalar_dense.default")
_MOVE_THE_BEGINNING = known_operations(
    (
        *("select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default", "unbind.int", "diagonal.default"),
        *("view.default", "_unsafe_view.default", "_reshape_alias.default", "unfold.default", "expand.default"),
        *("transpose.int", "t.default", "permute.default", "unsqueeze.default", "squeeze.default", "squeeze.dim"),
        *("squeeze.dims", "detach.default", "alias.default"),
    )
)
"""Views that begin as far behind their argument's beginning wherever that is; others count bytes, or from the start."""
_FROM_THE_START = known_operations(("as_strided_copy.default", "as_strided_scatter.default"))
"""Operations that are no views, and whose results depend on where their arguments begin in memory."""
_SELECT = operation("select.int")
_PLACES: Mapping[Any, int] = {_SELECT: 2, operation("select_backward.default"): 3}
"""The argument, by its number and the last, that says only which row of a tensor a result is of."""
_META = torch.device("meta")
_device_of = fake_device_getter()


def results_can_be_remade(version: str = torch.__version__, parts: Sequence[Any] = ()) -> bool:
    """Return whether results made from their metadata are those of `FakeTensorMode` on this version of torch.

    Args:
        version: of torch, as "2.13.0+cpu".
        parts: what such results are made with; empty for what this torch has.
    """
    return ".".join(version.split(".")[:2]) in SEEN and makes_fake_tensors(parts)


class FakeLedger(MemoryLedger):
    """A ledger for tensors without data that takes results from a cache.

    It records the same as a `MemoryLedger`, in a quarter of the time.

    Args:
        mode: the mode the tensors live in, entered below this ledger.
        on_operation: called after each operation.
        pool: returns the number of the allocator's pool that memory comes from; None: all from pool 0.
        kernels: returns the workspaces of an operation's kernel.
        cache: results of other traces too; None for an empty one.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        on_operation: OperationObserver | None = None,
        pool: PoolSelector | None = None,
        kernels: KernelWorkspaces | None = None,
        cache: "ResultCache | None" = None,
    ) -> None:
        super().__init__(on_operation=on_operation, pool=pool, kernels=kernels)
        self._run = CachedOperations(mode, cache)

    def cached_result(self) -> object | None:
        """Return the entry that the last result was made from, one for each set of arguments; None if it was run."""
        return self._run.entry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to switch its compiler off and on around each operation: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the operation returns)
        """Return the result of an operation, and record it.

        Raises:
            NotImplementedError: the memory that the operation holds cannot be known without running it.
        """
        # Two thirds of all calls while planning ask for a device, so this comes before everything else.
        if func is DEVICE and type(args[0]) is FakeTensor:
            return _device_of(args[0])
        for kind in types:
            if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # its parts come next
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        self._see(func, args, kwargs, result)
        return result


def fake_mode() -> FakeTensorMode:
    """Return a mode for tensors without data that may meet others.

    Its own cache is off: it would see new operations only, and hashing their arguments takes as long as running them.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


@dataclass(frozen=True, slots=True)
class _TensorMetadata:
    """A result, but for its mode and its memory.

    Attributes:
        base: the number of the argument whose memory it shares; None if it has its own.
        size: its lengths.
        stride: its strides.
        offset: where it begins in its memory; of a view, in elements behind the beginning of that argument.
        dtype: its type.
        device: that it says it is on.
        is_conjugate: whether it is a conjugate view of its memory.
        is_negative: the same of negation.
        attributes: the Python attributes that torch has set on it.
        is_strided_view: whether it is a view of the same numbers, with other strides at most.
    """

    base: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conjugate: bool
    is_negative: bool
    attributes: Mapping[str, object]
    is_strided_view: bool


@dataclass(frozen=True, slots=True)
class _Argument:
    """One of the arguments, returned as it is.

    Attributes:
        number: its place among the tensors.
    """

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _CachedResult:
    """The result of an operation.

    Attributes:
        kind: `tuple` or `list`; None for a single result.
        parts: the results, one by one; a number or None stands for itself.
    """

    kind: type | None
    parts: tuple[_TensorMetadata | _Argument | int | None, ...]


@dataclass(frozen=True, slots=True)
class _CachedOperation:
    """An operation and its results.

    Attributes:
        func: the operation, which is not freed as long as it is known by its identity.
        is_cacheable: whether its results depend on shapes, types and numbers alone.
        by_offset: whether they depend on where in memory its arguments begin.
        place: the number of the argument that says only which row is taken; None for no such argument.
        results: by everything they depend on; None where the first result cannot be made again.
    """

    func: Any
    is_cacheable: bool
    by_offset: bool = True
    place: int | None = None
    results: dict[tuple[object, ...], _CachedResult | None] = field(default_factory=dict)


class ResultCache:
    """Results of operations on tensors without data. Keys hold all that a result depends on, so it serves many traces.

    Args:
        enabled: False runs each operation, which takes four times as long and gives the same. None: it is used where
            `results_can_be_remade`.
    """

    def __init__(self, *, enabled: bool | None = None) -> None:
        self.enabled = results_can_be_remade() if enabled is None else enabled
        # By identity: torch's operations hash themselves in Python, which takes as long as the rest of a look-up.
        self._operations: dict[int, _CachedOperation] = {}

    def of(self, func: Any) -> _CachedOperation:  # noqa: ANN401 (torch's type has no name in public)
        """Return the results of an operation so far.

        Raises:
            NotImplementedError: the memory that it holds cannot be known without running it.
        """
        found = self._operations.get(id(func))
        if found is None:
            if func in _UNDESCRIBED:
                message = f"torch does not say what {func} keeps for its backward"
                raise NotImplementedError(message)
            found = self._operations[id(func)] = _CachedOperation(
                func, _depends_on_shapes(func), by_offset=_depends_on_offsets(func), place=_PLACES.get(func)
            )
        return found


class CachedOperations:
    """Runs an operation on tensors without data once for each set of shapes, types and numbers among its arguments.

    Always run are operations that look at numbers or that are watched for, those of other libraries, and those whose
    first result does not come out the same when it is made from its metadata.

    Args:
        mode: the mode the tensors live in.
        cache: the results so far; None for none.

    Attributes:
        entry: the cached result that the last one was made from; None if the operation was run.
    """

    def __init__(self, mode: FakeTensorMode, cache: ResultCache | None = None) -> None:
        self._mode = mode
        self._cache = ResultCache() if cache is None else cache
        self.entry: _CachedResult | None = None

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 (as torch)
        """Return the result of `func(*args, **kwargs)`.

        Raises:
            NotImplementedError: the memory that the operation holds cannot be known without running it.
        """
        known = self._cache.of(func)
        self.entry = None
        if not self._cache.enabled:
            return func(*args, **kwargs)
        if func is _READ and self._is_constant(args[0]):
            # A number that the program has written itself: reading it is no read of data, and needs no dispatch.
            with undispatched():
                return func(args[0].constant)
        # The default type and inference mode change the result of the same operation on the same arguments.
        key: list[object] = [torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        tensors: list[FakeTensor] = []
        shift, of_key = (0, args) if known.place is None else _row(func, args, known.place)
        if (
            not known.is_cacheable
            or not self._add_to_key(of_key, key, tensors, by_offset=known.by_offset)
            or (kwargs and not self._add_to_key(kwargs.values(), key, tensors, by_offset=known.by_offset))
        ):
            return func(*args, **kwargs)
        whole = tuple(key)
        entry = known.results.get(whole)
        if entry is not None:
            self.entry = entry
            if entry.kind is None:
                return self._remade(entry.parts[0], tensors, shift)
            return entry.kind([self._remade(part, tensors, shift) for part in entry.parts])
        result = func(*args, **kwargs)
        # An entry may be None: a result that could not be made again once is computed each time.
        if whole not in known.results:
            known.results[whole] = self._entry_of(result, tensors, shift)
        return result

    def _is_constant(self, tensor: Any) -> bool:  # noqa: ANN401 (any argument)
        """Return whether the program itself has written the numbers of a tensor of this mode."""
        return type(tensor) is FakeTensor and tensor.constant is not None and tensor.fake_mode is self._mode

    def _add_to_key(
        self, values: Iterable[Any], key: list[object], tensors: list[FakeTensor], *, by_offset: bool
    ) -> bool:
        """Append all that results depend on, and the tensors; return whether that is possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False  # its numbers are known, and torch computes with them
                tensors.append(value)
                key += (value.shape, value.stride(), value.dtype, _device_of(value))
                key += (value.layout, value.requires_grad, value.is_conj(), value.is_neg())
                if by_offset:
                    key.append(value.storage_offset())
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal, and give other types
            elif kind in _LISTS:
                key += (kind, len(value))
                if not self._add_to_key(value, key, tensors, by_offset=by_offset):
                    return False
            else:
                return False
        return True

    def _remade(
        self, part: _TensorMetadata | _Argument | int | None, tensors: Sequence[FakeTensor], shift: int
    ) -> FakeTensor | int | None:
        if isinstance(part, _TensorMetadata):
            return self._made(part, tensors, shift)
        return tensors[part.number] if isinstance(part, _Argument) else part

    def _made(self, part: _TensorMetadata, tensors: Sequence[FakeTensor], shift: int) -> FakeTensor:
        """Make a tensor in the way of `FakeTensor.__new__`, without the questions whose answers are known.

        A view begins `shift` elements further than the row 0 that it is described for.
        """
        with undispatched():
            if part.base is None:
                empty = torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=_META)
            else:
                base = tensors[part.base]
                begin = base.storage_offset() + part.offset + shift
                if part.is_strided_view:
                    empty = base.as_strided(part.size, part.stride, begin)
                else:
                    empty = torch.empty(0, dtype=part.dtype, device=_META)
                    empty.set_(base.untyped_storage(), begin, part.size, part.stride)
            options = {"dispatch_device": True, "device_for_backend_keys": part.device}
            tensor: FakeTensor = subclass_of(FakeTensor, empty, False, **options)  # noqa: FBT003 (takes no keyword)
            if part.is_conjugate:
                set_conjugate(tensor, True)  # noqa: FBT003 (takes no keyword)
            if part.is_negative:
                set_negative(tensor, True)  # noqa: FBT003 (the same)
        warn_of_data(tensor)
        vars(tensor).update(part.attributes, fake_mode=self._mode)
        return tensor

    def _entry_of(self, result: object, tensors: Sequence[FakeTensor], shift: int) -> _CachedResult | None:
        """Return what such a result is made from; None if it cannot be made."""
        kind = type(result) if isinstance(result, list | tuple) else None
        if kind not in {None, list, tuple}:
            return None
        results: Sequence[Any] = result if isinstance(result, list | tuple) else (result,)
        parts: list[_TensorMetadata | _Argument | int | None] = []
        own_storages: set[int] = set()
        for one in results:
            if one is None or type(one) is int:
                parts.append(one)
                continue
            part = self._part_of(one, tensors, shift)
            if part is None:
                return None
            if type(part) is _TensorMetadata and part.base is None:
                if storage_of(one) in own_storages:
                    return None  # two results in the same new memory
                own_storages.add(storage_of(one))
            parts.append(part)
        return _CachedResult(kind, tuple(parts))

    def _part_of(
        self,
        tensor: Any,  # noqa: ANN401 (any result)
        tensors: Sequence[FakeTensor],
        shift: int,
    ) -> _TensorMetadata | _Argument | None:
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
            return None
        for number, one in enumerate(tensors):
            if one is tensor:
                return _Argument(number)
        bases = [number for number, one in enumerate(tensors) if storage_of(one) == storage_of(tensor)]
        attributes = {name: value for name, value in vars(tensor).items() if name != "fake_mode"}
        # Arguments that share memory leave open which of them the result is a view of.
        if len(bases) > 1 or any(
            value is not None and type(value) is not torch.device for value in attributes.values()
        ):
            return None
        begin = int(tensor.storage_offset())
        turned = [one.is_conj() or one.is_neg() for one in (tensor, *(tensors[at] for at in bases))]
        part = _TensorMetadata(
            base=bases[0] if bases else None,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=begin - int(tensors[bases[0]].storage_offset()) - shift if bases else begin,
            dtype=tensor.dtype,
            device=tensor.fake_device,
            is_conjugate=tensor.is_conj(),
            is_negative=tensor.is_neg(),
            attributes=attributes,
            is_strided_view=any(tensors[at].dtype is tensor.dtype for at in bases) and not any(turned),
        )
        try:
            # The first result is made a second time and compared: a change in torch must not change plans unnoticed.
            again = metadata_of(self._made(part, tensors, shift))
        except (TypeError, RuntimeError, AttributeError):  # torch makes such tensors in another way by now
            return None
        return part if again == metadata_of(tensor) else None


def _depends_on_shapes(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether an operation gives the same for the same shapes and types, and leaves those of its arguments."""
    if getattr(func, "namespace", "") != "aten" or func in WATCHED or not _NOT_BY_SHAPE.isdisjoint(func.tags):
        return False
    name = func.overloadpacket.__name__
    if name.startswith("lift"):  # makes tensors without data of others
        return False
    # An operation in place returns its argument as it is; one with `out=` may give it another shape.
    return not schema_of(func).is_mutable or name.endswith("_")


def _depends_on_offsets(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether results depend on where in memory the arguments begin, other than by beginning as far behind."""
    return func in _FROM_THE_START or (is_view(func) and func not in _MOVE_THE_BEGINNING)


def _row(func: Any, args: tuple[Any, ...], place: int) -> tuple[int, tuple[Any, ...]]:  # noqa: ANN401 (as torch)
    """Return by how many elements a row begins behind the first one, and the arguments without its number.

    What is no number of a row is left among the arguments, so that the operation itself refuses it.
    """
    of, dim, index = args[place - 2], args[place - 1], args[place] if len(args) > place else None
    sizes = of.shape if func is _SELECT else of
    if type(index) is not int or type(dim) is not int or not -len(sizes) <= dim < len(sizes):
        return 0, args
    length = sizes[dim]
    if type(length) is not int or not -length <= index < length:
        return 0, args
    return (index % length * of.stride(dim) if func is _SELECT else 0), args[:place]


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that a tensor's storage has for as long as it lives."""
    return storage_key(tensor.untyped_storage())


def metadata_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return everything that a tensor without data has."""
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        str(keys_of(tensor)),
        vars(tensor),
    )
