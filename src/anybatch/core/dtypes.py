"""Chapter 16: dtypes of sums: never narrower than float32, and as wide as the device supports."""

import functools
from typing import Final

import torch
from torch import Tensor

_LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


def is_low_precision(tensor: Tensor) -> bool:
    """Whether sums of this dtype need a wider one: a bf16 sum stalls after some hundred terms."""
    return tensor.dtype in _LOW_PRECISION


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for summing and sending gradients of a parameter: float32 for bf16 and fp16, else its own."""
    return torch.float32 if is_low_precision(tensor) else tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Return a bf16 or fp16 tensor as float32, and any other tensor without a copy."""
    return tensor.float() if is_low_precision(tensor) else tensor


@functools.cache  # reading a device's type takes longer
def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which losses, counts and statistics are summed: float64, which only mps devices lack."""
    return torch.float32 if device.type == "mps" else torch.float64
