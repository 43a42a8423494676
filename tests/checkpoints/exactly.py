"""Bitwise comparison of two states."""

import struct
from collections import Counter, OrderedDict
from typing import Any

import torch


def exactly(value: Any) -> Any:
    """Return a value that two states share only if types, key order and every bit are equal."""
    kind = type(value)
    if kind is float:
        return float, struct.pack(">d", value)
    if kind is torch.Tensor:
        return str(value.dtype), tuple(value.shape), bytes_of(value)
    if kind in {dict, OrderedDict, Counter}:
        metadata = exactly(getattr(value, "_metadata", None))
        return kind, [(exactly(key), exactly(item)) for key, item in value.items()], metadata
    if kind in {list, tuple}:
        return kind, [exactly(item) for item in value]
    assert kind in {type(None), bool, int, str, bytes}, f"a state holds {kind}"
    return kind, value


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor as bytes, in row-major order."""
    plain = tensor.resolve_conj().resolve_neg()
    if tensor.itemsize == 1:
        plain = plain.view(torch.uint8)  # not every dtype can be copied
    array: bytes = plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    return array
