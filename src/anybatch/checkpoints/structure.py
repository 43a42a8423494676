"""Converts a nested state to JSON data and named tensors, and back, exactly.

JSON's own types are stored unchanged: null, true and false, finite floats, integers of 64 bits, text, lists, and
objects for dicts whose keys are text. Everything else is an object with a first key that begins with "$":

```text
{"$tensor": name}                   the tensor of that name; with "dtype" if it is stored as bytes
{"$int": "0x..."}                   an integer of more than 64 bits
{"$float": "nan 7ff8000000000000"}  NaN and the infinities, with their bits
{"$text": hex}, {"$bytes": hex}     text that is not Unicode (UTF-8 with surrogates), and bytes
{"$tuple": [...]}                   a tuple
{"$dict": [[key, value], ...]}      a dict with other keys; in the same way "$ordered_dict" and "$counter"
```
"""

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch

from anybatch.checkpoints.tensors import STANDARD_DTYPES, StoredTensor, as_standard
from anybatch.core.torch_internals import layer_versions, set_layer_versions
from anybatch.errors import NewerCheckpointError, UserError

_ALLOWED = (
    "A state has dicts, lists, tuples, numbers, text, bytes, None and tensors, but no subclasses of these. Convert "
    "them with dict(...), tuple(...), int(...), float(...), dataclasses.asdict(...) or torch.from_numpy(...)."
)
# Below Python's recursion limit, so that a state that contains itself raises an error with its location.
_MAX_DEPTH = 100
# The signed 64-bit integers that JSON readers of other languages support.
_MAX_INT_BITS = 63
_MAPPINGS: Final = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
Keys = tuple[Any, ...]
"""The keys and list positions that lead from a state to a value in it."""


class TensorPart:  # not a dataclass, which tree functions would treat as a container
    """One process's part of a tensor, or all of it; `shape` is the shape of the whole tensor."""

    def __init__(self, part: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        self.part, self.shape, self.offset = part, shape, offset


@dataclass(frozen=True, slots=True, eq=False)
class PackedState:
    """A packed state: JSON data, and this process's tensors by name; tied tensors have one entry."""

    structure: Any
    parts: Mapping[str, TensorPart]


def pack(state: Mapping[Any, Any], *, has_others: bool) -> PackedState:
    """Pack a state of whole tensors and `TensorPart`s without copying them; refuse other values.

    With `has_others`, a tensor without data (on device "meta") belongs to another process.
    """
    packer = _Packer(has_others=has_others)
    structure = packer.pack(state, ())
    return PackedState(structure, {name: local for name, local in packer.parts.items() if not local.part.is_meta})


def read_stored(value: Any, known: dict[object, torch.Tensor] | None = None) -> Any:  # noqa: ANN401 (a nested state)
    """Return a loaded state with every `StoredTensor` read; a shared tensor is read once."""
    known = {} if known is None else known
    if isinstance(value, StoredTensor):
        if value.key not in known:
            known[value.key] = value.read()
        return known[value.key]
    if isinstance(value, (list, tuple)):
        return type(value)(read_stored(item, known) for item in value)
    if not isinstance(value, Mapping):
        return value
    read = type(value)({key: read_stored(item, known) for key, item in value.items()})  # type: ignore[call-arg]
    if (versions := layer_versions(value)) is not None:
        set_layer_versions(read, versions)  # type: ignore[arg-type]
    return read


def unpack(structure: Any, tensors: Mapping[str, StoredTensor]) -> Any:  # noqa: ANN401 (a nested state)
    """Restore the structure of a packed state around its stored tensors."""
    if isinstance(structure, list):
        return [unpack(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    tag = next(iter(structure), "")
    # A dict with a key that begins with $ is written as pairs under a tag, so this is an ordinary dict.
    if not tag.startswith("$"):
        return {key: unpack(value, tensors) for key, value in structure.items()}
    if tag == "$tensor":
        return _unpack_tensor(structure, tensors)
    if tag in _ATOMS:
        return _ATOMS[tag](structure[tag])
    return _CONTAINERS[tag]([unpack(item, tensors) for item in structure[tag]], unpack(structure.get("metadata"), {}))


class _Packer:
    """Names the tensors of a state while packing it."""

    def __init__(self, *, has_others: bool) -> None:
        self.parts: dict[str, TensorPart] = {}
        self._has_others = has_others
        self._names: dict[Any, str] = {}

    def pack(self, value: Any, keys: Keys) -> Any:  # noqa: ANN401 (a nested state)
        if len(keys) > _MAX_DEPTH:
            message = (
                f"{_location(keys[:4])}... is nested more than {_MAX_DEPTH} levels deep or contains itself. Flatten it."
            )
            raise UserError(message)
        kind = type(value)  # exactly: a subclass could not be restored as such
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        if kind is list:
            return self._items(value, keys)
        if kind is tuple:
            return {"$tuple": self._items(value, keys)}
        if kind in _MAPPINGS:
            return self._mapping(value, keys)
        tensor = value.part if kind is TensorPart else value
        _require(isinstance(tensor, torch.Tensor), keys, _typename(kind), _ALLOWED)
        _check_supported(tensor, keys, has_others=self._has_others)
        part = value if kind is TensorPart else TensorPart(tensor, tuple(tensor.shape), (0,) * tensor.dim())
        return self._tensor(part, keys)

    def _items(self, values: Iterable[Any], keys: Keys) -> list[Any]:
        return [self.pack(value, (*keys, position)) for position, value in enumerate(values)]

    def _mapping(self, values: Mapping[Any, Any], keys: Keys) -> dict[str, Any]:
        for key in values:
            fix = "Its keys must be text or integers: use str(key), or a list of pairs."
            _require(type(key) in {str, int}, keys, f"a dict with the key {key!r} of {_typename(type(key))}", fix)
        pairs = [(key, self.pack(value, (*keys, key))) for key, value in values.items()]
        # A usual dict is written as a JSON object; other dicts become lists of pairs, which keep key types and order.
        if type(values) is dict and all(type(key) is str and _is_unicode(key) and key[:1] != "$" for key in values):
            return dict(pairs)
        tagged: dict[str, Any] = {_MAPPINGS[type(values)]: [[_LEAVES[type(key)](key), value] for key, value in pairs]}
        metadata = layer_versions(values)
        if metadata is not None:
            tagged["metadata"] = self.pack(metadata, (*keys, "_metadata"))
        return tagged

    def _tensor(self, local: TensorPart, keys: Keys) -> dict[str, str]:
        tensor = local.part
        memory = _memory(tensor)
        # Tied weights are written once, and share memory again after loading.
        if memory not in self._names:
            self._names[memory] = name = self._free_name(keys)
            standard = as_standard(tensor)
            more = standard.shape[tensor.dim() :]
            self.parts[name] = TensorPart(standard, (*local.shape, *more), (*local.offset, *(0 for _ in more)))
        reference = {"$tensor": self._names[memory]}
        if tensor.dtype not in STANDARD_DTYPES:
            reference["dtype"] = str(tensor.dtype).removeprefix("torch.")
        return reference

    def _free_name(self, keys: Keys) -> str:
        wanted = name = ".".join(map(str, keys)).encode(errors="backslashreplace").decode()
        number = 1
        while name in self.parts or name == "__metadata__":  # reserved by the format
            number += 1
            name = f"{wanted}~{number}"
        return name


def _memory(tensor: torch.Tensor) -> Any:  # noqa: ANN401 (a key)
    """Return a key that two tensors share only if they are the same view of the same memory."""
    # Empty tensors may share an address, and tensors without data have none.
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    view = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.dtype, *view)


def _check_supported(tensor: torch.Tensor, keys: Keys, *, has_others: bool) -> None:
    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter}
    _require(plain, keys, _typename(type(tensor)), "Make it a plain tensor first: full_tensor() gathers a sharded one.")
    _require(
        not tensor.is_quantized, keys, f"a tensor of {tensor.dtype}", "Store its int_repr(), scale and zero point."
    )
    dense = tensor.layout is torch.strided and not tensor.is_nested
    _require(dense, keys, f"a tensor of layout {tensor.layout}", "Use to_dense(), or store its indices and values.")
    _require(has_others or not tensor.is_meta, keys, "a tensor without data (device 'meta')", "Give it data first.")


def _require(holds: bool, keys: Keys, what: str, remedy: str) -> None:  # noqa: FBT001 (a condition, as in assert)
    if not holds:
        message = f"{_location(keys)} is {what}, which a checkpoint cannot restore unchanged. {remedy}"
        raise UserError(message)


def _location(keys: Keys) -> str:
    return "state" + "".join(f"[{key!r}]" for key in keys)


def _typename(kind: type) -> str:
    return f"type {kind.__module__}.{kind.__qualname__}"


def _pack_int(value: int) -> int | dict[str, str]:
    # hexadecimal, because Python limits the length of decimal integers
    return value if value.bit_length() <= _MAX_INT_BITS else {"$int": hex(value)}


def _pack_float(value: float) -> float | dict[str, str]:
    # JSON has no NaN or infinity. NaNs differ in their bits, which are stored after the readable name.
    return value if math.isfinite(value) else {"$float": f"{value} {struct.pack('>d', value).hex()}"}


def _unpack_float(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text.split()[1]))
    return float(value)


def _pack_text(value: str) -> str | dict[str, str]:
    return value if _is_unicode(value) else {"$text": value.encode(errors="surrogatepass").hex()}


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in file names that are not UTF-8
        return False
    return True


def _unpack_tensor(reference: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    tensor = tensors[reference["$tensor"]]
    if "dtype" not in reference:
        return tensor
    dtype = getattr(torch, reference["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        message = (
            f"it holds tensors of dtype {reference['dtype']!r}, which torch {torch.__version__} lacks. Update torch."
        )
        raise NewerCheckpointError(message)
    return tensor.of_dtype(dtype)


def _unpack_ordered_dict(pairs: list[Any], metadata: object) -> OrderedDict[Any, Any]:
    values = OrderedDict(pairs)
    if metadata is not None:
        set_layer_versions(values, metadata)
    return values


_LEAVES: Final[Mapping[type, Callable[[Any], Any]]] = {
    NoneType: lambda value: value,
    bool: lambda value: value,
    int: _pack_int,
    float: _pack_float,
    str: _pack_text,
    bytes: lambda value: {"$bytes": value.hex()},
}
_ATOMS: Final[Mapping[str, Callable[[str], Any]]] = {
    "$int": lambda text: int(text, 16),
    "$float": _unpack_float,
    "$text": lambda text: bytes.fromhex(text).decode(errors="surrogatepass"),
    "$bytes": bytes.fromhex,
}
_CONTAINERS: Final[Mapping[str, Callable[[list[Any], Any], Any]]] = {
    "$tuple": lambda items, _: tuple(items),
    "$dict": lambda pairs, _: dict(pairs),
    "$ordered_dict": _unpack_ordered_dict,
    "$counter": lambda pairs, _: Counter(dict(pairs)),
}
