"""Split, accumulate, update: `p.grad` after each micro-batch, and the gradient of the full batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.listings.split_sum import cut, make_model, running_sums

PARTS = (4, 2, 8)
UNIT = 1e-4
"""Unit of the integers of a strip; differences are floats."""


def run(emit: Emit) -> Data:
    """Return the gradient of the full batch, and for each split the running sums and the final difference."""
    wholes = {dtype: next(running_sums([64], dtype)) for dtype in (torch.float32, torch.float64)}
    cuts: list[dict[str, Any]] = []
    for num_parts in PARTS:
        for even in (True, False):
            emit({"kind": "guide.progress", "done": len(cuts), "of": 2 * len(PARTS), "what": "cuts"})
            cuts.append(one_cut(cut(num_parts, even=even), wholes))
    return {
        "num_samples": 64,
        "unit": UNIT,
        "parameters": [[name, p.numel()] for name, p in make_model(torch.float32).named_parameters()],
        "whole": in_units(wholes[torch.float32]),
        "cuts": cuts,
    }


def one_cut(sizes: list[int], wholes: Mapping[torch.dtype, Tensor]) -> dict[str, Any]:
    """Return the running sums for micro-batches of these sizes; for uneven sizes, also with the wrong division."""
    right = list(running_sums(sizes, torch.float32))
    last = list(running_sums(sizes, torch.float64))[-1]
    difference = right[-1] - wholes[torch.float32]
    sums = {
        "sizes": sizes,
        "sums": [in_units(total) for total in right],
        "difference": [rounded(float(x)) for x in difference],
        "largest_difference": rounded(float(difference.abs().max())),
        "largest_difference_float64": rounded(float((last - wholes[torch.float64]).abs().max())),
    }
    if len(set(sizes)) > 1:
        wrong = list(running_sums(sizes, torch.float32, exact=False))
        sums["wrong_sums"] = [in_units(total) for total in wrong]
        sums["wrong_relative_difference"] = rounded(relative(wrong[-1], wholes[torch.float32]))
        sums["wrong_largest_difference"] = rounded(float((wrong[-1] - wholes[torch.float32]).abs().max()))
    return sums


def in_units(row: Tensor) -> list[int]:
    """Return numbers as multiples of the unit, for drawing."""
    return [round(float(x) / UNIT) for x in row]


def rounded(value: float) -> float:
    """Return three significant digits."""
    return float(f"{value:.3g}")


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the correct value."""
    return float((actual - expected).norm() / expected.norm())


EXPERIMENT = Experiment(
    name="split_sum",
    question="Is the sum of the micro-batches' gradients the gradient of the batch?",
    run=run,
    seconds=0.5,
    tolerance=1e-2,
    # Rounding errors, which differ between processors.
    noisy=("difference", "largest_difference", "largest_difference_float64"),
)
