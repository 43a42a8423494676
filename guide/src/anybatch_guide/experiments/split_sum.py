"""Split, accumulate, update: `p.grad` after each micro-batch, the gradient of the full batch, and the updates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from anybatch_guide.claims.measuring import relative
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import significant
from anybatch_guide.listings.split_sum import make_model, micro_batch_sizes, running_sums

PARTS = (4, 2, 8)
LEARNING_RATE = 2.0
"""A learning rate high enough to see how the weights move."""
UNIT = 1e-4
"""Numbers to draw are stored as integer multiples of this unit; differences are stored as floats."""


def run(emit: Emit) -> Data:
    """Return the full gradient, the weights, and for each split the running sums, the difference and the update."""
    full_gradients = {dtype: next(running_sums([64], dtype)) for dtype in (torch.float32, torch.float64)}
    cuts: list[dict[str, Any]] = []
    for num_parts in PARTS:
        for even in (True, False):
            emit_progress(emit, len(cuts), 2 * len(PARTS), "cuts")
            cuts.append(cut_data(micro_batch_sizes(num_parts, even=even), full_gradients))
    return {
        "unit": UNIT,
        "parameters": [[name, p.numel()] for name, p in make_model(torch.float32).named_parameters()],
        "whole": in_units(full_gradients[torch.float32]),
        "weights": in_units(parameters_to_vector(make_model(torch.float32).parameters()).detach()),
        "learning_rate": LEARNING_RATE,
        "cuts": cuts,
    }


def cut_data(sizes: list[int], full_gradients: Mapping[torch.dtype, Tensor]) -> dict[str, Any]:
    """Return the running sums of micro-batches of the given sizes.

    For unequal sizes, also return the wrong sums, in which each of N micro-batches has the weight 1/N.
    """
    right = list(running_sums(sizes, torch.float32))
    last = list(running_sums(sizes, torch.float64))[-1]
    difference = right[-1] - full_gradients[torch.float32]
    sums = {
        "sizes": sizes,
        "sums": [in_units(total) for total in right],
        "updated": in_units(updated_weights(right[-1])),
        "difference": [significant(float(x), 3) for x in difference],
        "largest_difference": significant(float(difference.abs().max()), 3),
        "largest_difference_float64": significant(float((last - full_gradients[torch.float64]).abs().max()), 3),
    }
    if len(set(sizes)) > 1:
        wrong = list(running_sums(sizes, torch.float32, exact=False))
        difference = wrong[-1] - full_gradients[torch.float32]
        sums["wrong_sums"] = [in_units(total) for total in wrong]
        sums["wrong_updated"] = in_units(updated_weights(wrong[-1]))
        sums["wrong_relative_difference"] = significant(relative(wrong[-1], full_gradients[torch.float32]), 3)
        sums["wrong_largest_difference"] = significant(float(difference.abs().max()), 3)
    return sums


def updated_weights(gradient: Tensor) -> Tensor:
    """Return the weights after one step of SGD with this gradient."""
    model = make_model(gradient.dtype)
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
    torch.optim.SGD(parameters, lr=LEARNING_RATE).step()
    return parameters_to_vector(parameters).detach()


def in_units(row: Tensor) -> list[int]:
    """Return numbers as multiples of the unit, for drawing."""
    return [round(float(x) / UNIT) for x in row]


EXPERIMENT = Experiment(
    name="split_sum",
    question="Is the sum of the micro-batches' gradients the gradient of the batch?",
    run=run,
    seconds=0.5,
    tolerance=1e-2,
    # Rounding errors, which differ between processors.
    noisy=("difference", "largest_difference", "largest_difference_float64"),
)
