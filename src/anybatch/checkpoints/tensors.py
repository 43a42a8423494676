"""Named tensors as one file in the safetensors format, written and read one window at a time.

The format: the length of a header as 8 bytes, the header as JSON (for each name its dtype, shape, and first and last
byte), the bytes of all tensors. Source: https://github.com/huggingface/safetensors, "Format". Everything is
little-endian. In a file of parts, the header has the offset of each part in its tensor, as in the files of
`torch.distributed.checkpoint`, whose reader accepts ours. A tensor passes through a window of 16 MiB between its device
and the file, so neither direction needs a second copy of it; only a non-contiguous tensor is copied to be written.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, Final

import torch

STANDARD_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in the format. `as_standard` converts all other dtypes."""

_DTYPES: Final = {name: dtype for dtype, name in STANDARD_DTYPES.items()}
_LENGTH_BYTES = 8
_PARTS: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"
_WINDOW_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A planned tensor file: its header, its tensors in order, and its length."""

    head: bytes
    tensors: "tuple[torch.Tensor | StoredTensor, ...]"
    num_bytes: int

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file; each block is valid until the next one."""
        yield self.head
        # One window for all tensors, so that the host needs no copy of a model on an accelerator.
        window = bytearray(_WINDOW_BYTES)
        for tensor in self.tensors:
            yield from _copy_blocks(window, tensor.read() if isinstance(tensor, StoredTensor) else tensor)


def _copy_blocks(window: bytearray, tensor: torch.Tensor) -> Iterator[memoryview]:
    staging = torch.frombuffer(window, dtype=torch.uint8)
    for piece in _flat_bytes(tensor).split(len(window)):
        staging[: len(piece)].copy_(piece)
        yield memoryview(window)[: len(piece)]


def file_layout(
    tensors: "Mapping[str, torch.Tensor | StoredTensor]",
    *,
    offsets: Mapping[str, tuple[int, ...]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> TensorFile:
    """Plan a file of `tensors` of standard dtypes; `offsets` are the positions of parts in their tensors."""
    assert sys.byteorder == "little", "checkpoints are little-endian, and so must be the machine"
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    if offsets is not None:
        parts = {name: {_OFFSETS: list(offsets[name])} for name in tensors}
        header["__metadata__"][_PARTS] = json.dumps(parts, separators=(",", ":"))
    # widest first, so that every tensor begins at a multiple of its items' width
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype = STANDARD_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the first tensor begins at a multiple of eight bytes, as readers expect that use mmap.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return TensorFile(head, tuple(tensor for _, tensor in ordered), len(head) + end)


@dataclass(frozen=True, slots=True, eq=False)
class _StoredPart:
    """A part of a tensor in an open file: the position of its bytes in the file, and its offset in the tensor."""

    file: BufferedReader
    position: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor:  # not a dataclass, which tree functions would treat as a container
    """A tensor on the disk, in one or several parts, readable while its files are open."""

    def __init__(self, dtype: torch.dtype, parts: Sequence[_StoredPart], stored_as: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._stored_dtype = dtype if stored_as is None else stored_as
        self._parts = tuple(parts)
        extent = _extent(parts)
        self.shape = torch.Size(extent if self._stored_dtype == dtype else extent[:-1])

    def __deepcopy__(self, memo: object) -> "StoredTensor":
        return self

    def of_dtype(self, dtype: torch.dtype) -> "StoredTensor":
        """Return this tensor with its original `dtype`, which `as_standard` has changed."""
        return StoredTensor(dtype, self._parts, self._stored_dtype)

    @property
    def key(self) -> object:
        """A key that is equal for two references to the same tensor."""
        return id(self._parts), self.dtype

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Read the tensor, or the part of this `offset` and `shape`, into new CPU memory."""
        begin = tuple(offset or (0,) * len(self.shape))
        size = tuple(self.shape if shape is None else shape)
        if self._stored_dtype != self.dtype:  # as bytes, with one more axis
            begin, size = (*begin, 0), (*size, self.dtype.itemsize)
        box = torch.empty(size, dtype=self._stored_dtype)
        for part in self._parts:
            _read_overlap(part, begin, box)
        return box if self._stored_dtype == self.dtype else box.view(self.dtype).reshape(box.shape[:-1])


def _extent(parts: Sequence[_StoredPart]) -> tuple[int, ...]:
    """Return the shape of the tensor that the parts form."""
    ends = [[o + n for o, n in zip(part.offset, part.shape, strict=True)] for part in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _read_overlap(part: _StoredPart, offset: tuple[int, ...], box: torch.Tensor) -> None:
    """Read the intersection of a part and a box into the box, in whole rows of the part."""
    # A scalar is one row of one element.
    shape, start, begin = part.shape or (1,), part.offset or (0,), offset or (0,)
    target = box.view(1) if box.dim() == 0 else box
    starts = [max(b, s) for b, s in zip(begin, start, strict=True)]
    stops = [min(b + n, s + m) for b, n, s, m in zip(begin, target.shape, start, shape, strict=True)]
    if any(first >= stop for first, stop in zip(starts, stops, strict=True)):
        return
    row_bytes = math.prod(shape[1:]) * box.dtype.itemsize
    num_rows = max(1, _WINDOW_BYTES // row_bytes)
    window = bytearray(min(num_rows, stops[0] - starts[0]) * row_bytes)
    columns = _slices(starts[1:], stops[1:], start[1:])
    target_columns = _slices(starts[1:], stops[1:], begin[1:])
    part.file.seek(part.position + (starts[0] - start[0]) * row_bytes)
    for row in range(starts[0], stops[0], num_rows):
        rows = min(num_rows, stops[0] - row)
        if part.file.readinto(memoryview(window)[: rows * row_bytes]) != rows * row_bytes:
            message = f"{part.file.name} ends within a tensor"
            raise ValueError(message)
        read = torch.frombuffer(window, dtype=torch.uint8)[: rows * row_bytes].view(box.dtype)
        overlap = read.view(rows, *shape[1:])[(slice(None), *columns)]
        target[(slice(row - begin[0], row - begin[0] + rows), *target_columns)] = overlap


def _slices(starts: Sequence[int], stops: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for start, stop, at in zip(starts, stops, origin, strict=True))


def stored_tensors(files: Sequence[BufferedReader]) -> dict[str, StoredTensor]:
    """Return the tensors of verified open files; reads only headers."""
    assert sys.byteorder == "little", "checkpoints are little-endian, and so must be the machine"
    tensors: dict[str, tuple[torch.dtype, list[_StoredPart]]] = {}
    for file in files:
        for name, dtype, part in _parts_in(file):
            known = tensors.setdefault(name, (dtype, []))
            known[1].append(part)
            if known[0] != dtype:
                message = f"tensor {name!r} is of dtype {known[0]} in one file and of {dtype} in another"
                raise ValueError(message)
    for name, (_, parts) in tensors.items():
        num_stored, num_elements = sum(math.prod(part.shape) for part in parts), math.prod(_extent(parts))
        if num_stored != num_elements:
            message = f"tensor {name!r} has {num_elements} numbers, and its parts have {num_stored}"
            raise ValueError(message)
    return {name: StoredTensor(dtype, parts) for name, (dtype, parts) in tensors.items()}


def _parts_in(file: BufferedReader) -> Iterator[tuple[str, torch.dtype, _StoredPart]]:
    """Yield the name, the dtype and the position of each tensor, or part of a tensor, in a file."""
    header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    start = file.tell()
    parts = json.loads(header.pop("__metadata__").get(_PARTS, "{}"))
    num_bytes = file.seek(0, os.SEEK_END) - start
    position = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        # Only a file of another program can have gaps or overlaps; reading them would give wrong values.
        if begin != position or end - begin != dtype.itemsize * math.prod(shape):
            message = f"tensor {name!r} of dtype {dtype} and shape {shape} does not match its bytes {begin} to {end}"
            raise ValueError(message)
        if end > num_bytes:
            message = f"the file ends within tensor {name!r}"
            raise ValueError(message)
        offset = tuple(parts[name][_OFFSETS]) if parts else (0,) * len(shape)
        yield name, dtype, _StoredPart(file, start + begin, offset, shape)
        position = end


def as_standard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a standard dtype with the same bits: any other dtype as bytes, with one more axis."""
    if tensor.dtype in STANDARD_DTYPES:
        return tensor
    return _resolved(tensor).contiguous().unsqueeze(-1).view(torch.uint8)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, as a view if it is contiguous."""
    # as_strided: a contiguous tensor of one item may have any stride, which view(uint8) would refuse
    return _resolved(tensor).contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its conjugate and negative bits applied to its values."""
    return tensor.detach().resolve_conj().resolve_neg()
