"""Chapter 11: the relative error between two gradients, as one number."""

import math
from collections.abc import Mapping

import torch

Gradients = Mapping[str, torch.Tensor | None]


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Return ||found - expected|| / ||expected|| over all parameters together, in float64.

    A gradient that is None on one side only counts as infinitely far: an unused parameter is not the same as one with a
    zero gradient, because an optimizer may change only the latter.

    Args:
        found: gradients by parameter name, dense or sparse, on any device and of any dtype.
        expected: the gradients to compare with.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    return math.hypot(*errors_by_parameter(found, expected).values())


def errors_by_parameter(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Return each parameter's part in the relative error: ||found_p - expected_p|| / ||expected||, over all of them.

    The squares add up to the square of `relative_error`. Dividing by the parameter's own norm instead would inflate
    parameters whose gradient is only rounding error.
    """
    if set(found) != set(expected):
        message = f"different parameters: {sorted(set(found) ^ set(expected))} are on one side only."
        raise ValueError(message)
    norm = math.sqrt(sum(float(_as_float64(value).square().sum()) for value in expected.values() if value is not None))
    errors = {}
    for name, value in expected.items():
        other = found[name]
        if value is None and other is None:
            errors[name] = 0.0
        elif value is None or other is None:
            errors[name] = math.inf
        else:
            difference = float((_as_float64(other) - _as_float64(value)).norm())
            errors[name] = difference / norm if norm else (math.inf if difference else 0.0)
    return errors


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    # To the host first: not every accelerator has float64.
    return tensor.detach().cpu().to_dense().double()
