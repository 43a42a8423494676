"""Reads numbers of records from their device."""

import contextlib

import torch

from anybatch.core.records import Flag, Scalar


def read_number(value: Scalar | Flag) -> float | None:
    """Return a number, waiting for its device; None if the device failed (the error is reported elsewhere)."""
    with contextlib.suppress(RuntimeError):
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    return None
