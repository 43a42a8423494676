"""Named tensors as one file in the safetensors format, written and read one window at a time.

The format: the length of a header as 8 bytes, the header as JSON (for each name its dtype, shape, and begin and end in
what follows), the bytes of all tensors. Source: https://github.com/huggingface/safetensors, "Format". Everything is
little-endian. A tensor passes through a window of 16 MiB between its device and the file, so that neither way holds a
second copy of it; only a tensor whose memory is not contiguous is copied, by itself, while it is written.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
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
"""Names of the dtypes that the format knows. Others go through `as_standard`."""

_DTYPES: Final = {name: dtype for dtype, name in STANDARD_DTYPES.items()}
_LENGTH_BYTES = 8
_WINDOW_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A tensor file that has been laid out and not been written yet.

    Attributes:
        head: the header, and its length before it.
        tensors: what follows, in this order.
        num_bytes: length of the file.
    """

    head: bytes
    tensors: tuple[torch.Tensor, ...]
    num_bytes: int

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the file; each block is valid until the next one is asked for."""
        yield self.head
        # One window for all tensors: a model on an accelerator is written without a second copy of it on the host.
        window = bytearray(_WINDOW_BYTES)
        for tensor in self.tensors:
            yield from _through(window, tensor)


def _through(window: bytearray, tensor: torch.Tensor) -> Iterator[memoryview]:
    staging = torch.frombuffer(window, dtype=torch.uint8)
    for piece in _flat_bytes(tensor).split(len(window)):
        staging[: len(piece)].copy_(piece)
        yield memoryview(window)[: len(piece)]


def lay_out(tensors: Mapping[str, torch.Tensor]) -> TensorFile:
    """Return the file that holds `tensors`, which are of standard dtypes."""
    assert sys.byteorder == "little", "checkpoints are little-endian, and so must be the machine"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # widest first, so that every tensor begins at a multiple of its items' width
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype = STANDARD_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded, so that the first tensor begins at a multiple of eight bytes, as readers that map the file expect.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return TensorFile(head, tuple(tensor for _, tensor in ordered), len(head) + end)


def read_tensors(file: BufferedReader) -> dict[str, torch.Tensor]:
    """Read every tensor of an open file, whose digest has been checked, into memory of its own on the CPU.

    Raises:
        ValueError: the file is not laid out as `lay_out` does.
    """
    assert sys.byteorder == "little", "checkpoints are little-endian, and so must be the machine"
    header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    del header["__metadata__"]
    window = bytearray(_WINDOW_BYTES)
    staging = torch.frombuffer(window, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    position = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        # The digest is right, so this is a file of another writer; its gaps or overlaps would be read as values.
        if begin != position or end - begin != dtype.itemsize * math.prod(shape):
            message = f"tensor {name!r} of dtype {dtype} and shape {shape} is said to be at bytes {begin} to {end}"
            raise ValueError(message)
        tensors[name] = torch.empty(shape, dtype=dtype)
        for piece in _flat_bytes(tensors[name]).split(_WINDOW_BYTES):
            if file.readinto(memoryview(window)[: len(piece)]) != len(piece):
                message = f"the file ends within tensor {name!r}"
                raise ValueError(message)
            piece.copy_(staging[: len(piece)])
        position = end
    return tensors


def as_standard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a standard dtype with the same bits: any other dtype as bytes, with one axis more."""
    if tensor.dtype in STANDARD_DTYPES:
        return tensor
    return _resolved(tensor).contiguous().unsqueeze(-1).view(torch.uint8)


def from_standard(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `as_standard` for a tensor that was of `dtype`."""
    return tensor.view(dtype).reshape(tensor.shape[:-1])


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order: its own memory where that is contiguous."""
    # as_strided: a contiguous tensor of one item may have any stride, which view(uint8) would not take
    return _resolved(tensor).contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values, not their conjugates or negatives."""
    return tensor.detach().resolve_conj().resolve_neg()
