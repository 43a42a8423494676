"""Cache the results of operations on fake tensors.

A model of equal blocks runs the same few dozen operations thousands of times, and `FakeTensorMode` needs longer for an
operation than a CPU needs to compute it. This cache runs an operation once per set of shapes and types, and then
recreates the result from its metadata: shape, type, and the argument whose memory it shares.

The first result of each operation is recreated and compared; if they differ, the operation runs every time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.core.torch_internals import storage_key
from anybatch.memory.ledger import DEVICE, MemoryLedger, as_without_mode
from anybatch.memory.torch_internals import FakeTensor, FakeTensorMode, is_traceable_wrapper_subclass_type
from anybatch.planner.cuda_emulation import FAKE_KERNELS
from anybatch.planner.refusals import WATCHED
from anybatch.planner.torch_internals import fake_device_getter, schema_of, undispatched

# Exact types, since a subclass may define other comparisons and hashes.
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LISTS = frozenset({list, tuple, torch.Size})
_NOT_BY_SHAPE = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
"""Tags of operations that read values of tensors or change the shape of their arguments."""
_META = torch.device("meta")
_device_of = fake_device_getter()


def fake_mode() -> FakeTensorMode:
    """Return a `FakeTensorMode` that accepts real tensors too.

    Torch's cache is off: it would only receive the operations that this module does not cache, and hashing an operation
    costs as much as running it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


class _Part(NamedTuple):
    """Metadata to recreate one result."""

    base: int | None  # number of the argument whose storage the result shares; None for new storage
    size: torch.Size | None = None  # None: the result is the argument itself
    stride: tuple[int, ...] = ()
    offset: int = 0  # storage offset; for a view, relative to the offset of its base
    dtype: torch.dtype | None = None
    device: torch.device = _META


_Cached = tuple[type | None, list[Any]]
"""Type of the collection (None for a single result), and the results; `_Part` stands for a tensor."""


def _created(parts: Iterable[Any], tensors: Sequence[FakeTensor], mode: FakeTensorMode) -> Iterator[Any]:
    """Yield the results, given the tensors among the arguments."""
    for part in parts:
        if type(part) is not _Part:
            yield part
            continue
        base = None if part.base is None else tensors[part.base]
        if part.size is None:
            yield base
            continue
        with undispatched():
            if base is None:
                data = torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=_META)
            else:
                data = base.as_strided(part.size, part.stride, base.storage_offset() + part.offset)
        yield FakeTensor(mode, data, part.device)


class ResultCache:
    """Results of operations on fake tensors, shared by many traces."""

    def __init__(self) -> None:
        self.results: dict[tuple[object, ...], _Cached | None] = {}
        # By id, because hashing an operation is slow. The reference to the operation keeps its id valid.
        self._cacheable: dict[int, tuple[Any, bool]] = {}

    def accepts(self, func: Any) -> bool:  # noqa: ANN401 (torch has no public name for this type)
        """Return whether the results of an operation can be cached."""
        known = self._cacheable.get(id(func))
        if known is None:
            known = self._cacheable[id(func)] = func, _depends_on_shapes(func)
        return known[1]


class FakeLedger(MemoryLedger):
    """A `MemoryLedger` for fake tensors that caches results and needs a fifth of the time.

    Not cached: operations that read values of tensors, operations in `WATCHED`, operations of other libraries, and
    operations whose first result cannot be recreated from its metadata.
    """

    def __init__(self, mode: FakeTensorMode, *, cache: ResultCache | None = None, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        self._mode = mode
        self._cache = ResultCache() if cache is None else cache

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch need not disable its compiler around each operation, because nothing is compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation, record it and return its result."""
        # Two thirds of all calls during planning query a device, so check for this first.
        if func is DEVICE and type(args[0]) is FakeTensor:
            return _device_of(args[0])
        for kind in types:
            if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # torch calls again with its inner tensors
        kwargs = kwargs or {}
        result = self._result(FAKE_KERNELS.get(func) or as_without_mode(func, args) or func, args, kwargs)
        self._record_operation(func, args, kwargs, result)
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 (as torch)
        """Return the result of `func(*args, **kwargs)`, from the cache if possible."""
        # Results also depend on the default dtype and on inference mode.
        key: list[object] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        tensors: list[FakeTensor] = []
        is_cacheable = self._cache.accepts(func) and self._add_to_key((*args, *kwargs.values()), key, tensors)
        if not is_cacheable:
            return func(*args, **kwargs)
        full_key, results = tuple(key), self._cache.results
        entry = results.get(full_key)
        if entry is not None:
            kind, parts = entry
            created = _created(parts, tensors, self._mode)
            return next(created) if kind is None else kind(created)
        result = func(*args, **kwargs)
        # An entry may be None: a result that cannot be recreated is computed each time.
        if full_key not in results:
            results[full_key] = _entry_of(result, tensors, self._mode)
        return result

    def _add_to_key(self, values: Iterable[Any], key: list[object], tensors: list[FakeTensor]) -> bool:
        """Extend the key and the list of tensors; return whether the arguments are cacheable."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                # Torch computes values for tensors with a constant; conjugate and negated views are rare.
                if value.constant is not None or value.fake_mode is not self._mode or value.is_conj() or value.is_neg():
                    return False
                tensors.append(value)
                key += (value.shape, value.stride(), value.dtype, _device_of(value), value.layout, value.requires_grad)
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal but give different dtypes
            elif kind in _LISTS:
                key += (kind, len(value))
                if not self._add_to_key(value, key, tensors):
                    return False
            else:
                return False
        return True


def _depends_on_shapes(func: Any) -> bool:  # noqa: ANN401 (torch has no public name for this type)
    """Return whether an operation's result depends only on shapes and types, and its arguments keep their shapes."""
    if getattr(func, "namespace", "") != "aten" or func in WATCHED or not _NOT_BY_SHAPE.isdisjoint(func.tags):
        return False
    name = func.overloadpacket.__name__
    # "lift" converts real tensors to fake ones; "as_strided" depends on the storage offset of its argument.
    if name.startswith(("lift", "as_strided")):
        return False
    # In-place operations keep the shape of their argument; `out=` may change it.
    return not schema_of(func).is_mutable or name.endswith("_")


def _entry_of(result: object, tensors: Sequence[FakeTensor], mode: FakeTensorMode) -> _Cached | None:
    """Return a cache entry for a result; None if it cannot be recreated."""
    kind = type(result) if isinstance(result, list | tuple) else None
    results: Sequence[Any] = result if isinstance(result, list | tuple) else (result,)
    if kind not in {None, list, tuple}:
        return None
    parts = [value if value is None or type(value) is int else _part_of(value, tensors) for value in results]
    new = [storage_of(value) for value, part in zip(results, parts, strict=True) if getattr(part, "base", 0) is None]
    lost = any(part is None and value is not None for value, part in zip(results, parts, strict=True))
    # Two results in the same new memory cannot be recreated.
    if lost or len(set(new)) < len(new):
        return None
    # Recreate the first result and compare, so that a change in torch cannot silently change plans.
    again = zip(results, _created(parts, tensors, mode), strict=True)
    are_equal = all(a == b if type(a) is not FakeTensor else metadata_of(a) == metadata_of(b) for a, b in again)
    return (kind, parts) if are_equal else None


def _part_of(tensor: Any, tensors: Sequence[FakeTensor]) -> _Part | None:  # noqa: ANN401 (any result)
    """Return the metadata of one result; None if it cannot be recreated."""
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    for number, argument in enumerate(tensors):
        if argument is tensor:
            return _Part(number)
    bases = [number for number, argument in enumerate(tensors) if storage_of(argument) == storage_of(tensor)]
    # If arguments share memory, the base of the view is ambiguous; offsets of another dtype have another unit.
    if len(bases) > 1 or any(tensors[at].dtype is not tensor.dtype for at in bases):
        return None
    offset = int(tensor.storage_offset()) - sum(int(tensors[at].storage_offset()) for at in bases)
    base = bases[0] if bases else None
    return _Part(base, tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.fake_device)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, unique while the storage exists."""
    return storage_key(tensor.untyped_storage())


def metadata_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all metadata of a fake tensor."""
    plain = (tensor.shape, tensor.stride(), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad)
    memory = (tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.is_inference())
    return (type(tensor), *plain, *memory, tensor.is_conj(), tensor.is_neg())
