"""Cache the results of operations on fake tensors.

A model of equal blocks runs the same few dozen operations thousands of times, and `FakeTensorMode` needs longer for one
than a CPU needs to compute it. This cache runs an operation once per set of shapes and types, and then recreates the
result from its metadata: shape, type, and the argument whose memory it shares.

The cache relies on private details of `FakeTensor`. Operations run in `FakeTensorMode` instead if a private name is
missing, if the version of torch is untested, or if the first result cannot be recreated exactly. Plans are then the
same, but take four times as long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.core.torch_internals import SEEN, storage_key
from anybatch.memory.ledger import DEVICE, MemoryLedger, OperationObserver, PoolSelector
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
"""Tags of operations that read numbers or change the shape of their arguments."""
_UNDESCRIBED = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Operations that save memory for their backward that torch's meta kernel does not show."""
_READ = operation("_local_scalar_dense.default")
_MOVE_THE_BEGINNING = known_operations(
    (
        *("select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default", "unbind.int", "diagonal.default"),
        *("view.default", "_unsafe_view.default", "_reshape_alias.default", "unfold.default", "expand.default"),
        *("transpose.int", "t.default", "permute.default", "unsqueeze.default", "squeeze.default", "squeeze.dim"),
        *("squeeze.dims", "detach.default", "alias.default"),
    )
)
"""Views whose offset relative to their argument does not depend on the argument's own offset."""
_FROM_THE_START = known_operations(("as_strided_copy.default", "as_strided_scatter.default"))
"""Operations that are not views but whose results depend on the storage offset of their arguments."""
_SELECT = operation("select.int")
_PLACES: Mapping[Any, int] = {_SELECT: 2, operation("select_backward.default"): 3}
"""The position of the last argument, if it is only the index of a row."""
_META = torch.device("meta")
_device_of = fake_device_getter()


def results_can_be_remade(version: str = torch.__version__, parts: Sequence[Any] = ()) -> bool:
    """Return whether the cache is tested on this version of torch and finds the private names it needs.

    Args:
        version: version of torch, such as "2.13.0+cpu".
        parts: the private functions needed; empty to use those of this torch.
    """
    return ".".join(version.split(".")[:2]) in SEEN and makes_fake_tensors(parts)


class FakeLedger(MemoryLedger):
    """A `MemoryLedger` for fake tensors that caches results and needs a quarter of the time.

    Args:
        mode: the fake mode of the tensors, entered before this ledger.
        on_operation: called after each operation.
        pool: returns the number of the allocator pool to use; None for pool 0 only.
        cache: cache shared with other traces; None for a new one.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        *,
        on_operation: OperationObserver | None = None,
        pool: PoolSelector | None = None,
        cache: "ResultCache | None" = None,
    ) -> None:
        super().__init__(on_operation=on_operation, pool=pool)
        self._run = CachedOperations(mode, cache)

    def cached_result(self) -> object | None:
        """Return the cache entry of the last result; None if the operation was run."""
        return self._run.entry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled, so torch need not disable its compiler around each operation."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any result)
        """Run an operation, record it and return its result.

        Raises:
            NotImplementedError: the memory that the operation saves is unknown without running it.
        """
        # Two thirds of all calls during planning query a device, so check for this first.
        if func is DEVICE and type(args[0]) is FakeTensor:
            return _device_of(args[0])
        for kind in types:
            if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # torch calls again with its inner tensors
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        self._see(func, args, kwargs, result)
        return result


def fake_mode() -> FakeTensorMode:
    """Return a `FakeTensorMode` that accepts real tensors too.

    Its built-in cache is off: it would only see operations missed by ours, and hashing costs as much as running them.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


@dataclass(frozen=True, slots=True)
class _TensorMetadata:
    """Metadata to recreate one result.

    Attributes:
        base: the number of the argument whose storage it shares; None for new storage.
        size: shape.
        stride: strides.
        offset: storage offset; for a view, relative to the offset of its base.
        dtype: element type.
        device: emulated device.
        is_conjugate: whether the conjugate bit is set.
        is_negative: whether the negative bit is set.
        attributes: the Python attributes set by torch.
        is_strided_view: whether it can be created with `as_strided` from its base.
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
    """An argument that the operation returns unchanged.

    Attributes:
        number: its position among the tensor arguments.
    """

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _CachedResult:
    """The result of an operation.

    Attributes:
        kind: `tuple` or `list`; None for a single result.
        parts: the results; integers and None are stored directly.
    """

    kind: type | None
    parts: tuple[_TensorMetadata | _Argument | int | None, ...]


@dataclass(frozen=True, slots=True)
class _CachedOperation:
    """An operation and its results.

    Attributes:
        func: the operation; the reference keeps its id valid.
        is_cacheable: whether its results depend only on shapes, types and plain arguments.
        by_offset: whether its results depend on the storage offsets of its arguments.
        place: the position of the argument that is only the index of a row; None if there is none.
        results: results by key; None for a result that cannot be recreated.
    """

    func: Any
    is_cacheable: bool
    by_offset: bool = True
    place: int | None = None
    results: dict[tuple[object, ...], _CachedResult | None] = field(default_factory=dict)


class ResultCache:
    """Results of operations on fake tensors, shared by many traces.

    Args:
        enabled: False runs every operation, with the same results in four times the time; None for
            `results_can_be_remade()`.
    """

    def __init__(self, *, enabled: bool | None = None) -> None:
        self.enabled = results_can_be_remade() if enabled is None else enabled
        # By id: hashing an operation runs in Python and would double the time of a look-up.
        self._operations: dict[int, _CachedOperation] = {}

    def of(self, func: Any) -> _CachedOperation:  # noqa: ANN401 (torch's type has no name in public)
        """Return the cached results of an operation.

        Raises:
            NotImplementedError: the memory that the operation saves is unknown without running it.
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
    """Runs an operation on fake tensors once per set of shapes, types and plain arguments.

    Not cached: operations that read numbers, operations in `WATCHED`, operations of other libraries, and operations
    whose first result cannot be recreated from its metadata.

    Args:
        mode: the fake mode of the tensors.
        cache: existing results; None for a new cache.

    Attributes:
        entry: the cache entry of the last result; None if the operation was run.
    """

    def __init__(self, mode: FakeTensorMode, cache: ResultCache | None = None) -> None:
        self._mode = mode
        self._cache = ResultCache() if cache is None else cache
        self.entry: _CachedResult | None = None

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 (as torch)
        """Return the result of `func(*args, **kwargs)`.

        Raises:
            NotImplementedError: the memory that the operation saves is unknown without running it.
        """
        known = self._cache.of(func)
        self.entry = None
        if not self._cache.enabled:
            return func(*args, **kwargs)
        if func is _READ and self._is_constant(args[0]):
            # The program wrote this number itself, so it is known without dispatch.
            with undispatched():
                return func(args[0].constant)
        # The same arguments give other results under another default dtype or in inference mode.
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
        # An entry may be None: a result that cannot be recreated is computed each time.
        if whole not in known.results:
            known.results[whole] = self._entry_of(result, tensors, shift)
        return result

    def _is_constant(self, tensor: Any) -> bool:  # noqa: ANN401 (any argument)
        """Return whether the program wrote the numbers of a tensor of this mode itself."""
        return type(tensor) is FakeTensor and tensor.constant is not None and tensor.fake_mode is self._mode

    def _add_to_key(
        self, values: Iterable[Any], key: list[object], tensors: list[FakeTensor], *, by_offset: bool
    ) -> bool:
        """Extend the key and the list of tensors; return whether the arguments are cacheable."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False  # torch computes with known numbers
                tensors.append(value)
                key += (value.shape, value.stride(), value.dtype, _device_of(value))
                key += (value.layout, value.requires_grad, value.is_conj(), value.is_neg())
                if by_offset:
                    key.append(value.storage_offset())
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal but give different dtypes
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
        """Create a tensor like `FakeTensor.__new__`, but without its checks.

        The metadata describes row 0; `shift` is the offset of the row in elements.
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
        """Return a cache entry for a result; None if it cannot be recreated."""
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
        # If arguments share memory, the base of the view is ambiguous.
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
            # Recreate the first result and compare, so that a change in torch cannot silently change plans.
            again = metadata_of(self._made(part, tensors, shift))
        except (TypeError, RuntimeError, AttributeError):  # this torch creates such tensors differently
            return None
        return part if again == metadata_of(tensor) else None


def _depends_on_shapes(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether an operation's result depends only on shapes and types, and its arguments keep theirs."""
    if getattr(func, "namespace", "") != "aten" or func in WATCHED or not _NOT_BY_SHAPE.isdisjoint(func.tags):
        return False
    name = func.overloadpacket.__name__
    if name.startswith("lift"):  # converts real tensors to fake ones
        return False
    # In-place operations keep the shape of their argument; `out=` may change it.
    return not schema_of(func).is_mutable or name.endswith("_")


def _depends_on_offsets(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    """Return whether results depend on the storage offsets of the arguments, beyond a constant shift."""
    return func in _FROM_THE_START or (is_view(func) and func not in _MOVE_THE_BEGINNING)


def _row(func: Any, args: tuple[Any, ...], place: int) -> tuple[int, tuple[Any, ...]]:  # noqa: ANN401 (as torch)
    """Return the offset of a row in elements, and the arguments without its index.

    Keep an invalid index, so that the operation raises its own error.
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
    """Return the key of a tensor's storage, unique while the storage exists."""
    return storage_key(tensor.untyped_storage())


def metadata_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all metadata of a fake tensor."""
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
