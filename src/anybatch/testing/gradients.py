"""How far apart two gradients are, as one number."""

import math
from collections.abc import Mapping

import torch


def relative_error(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> float:
    """Return ||found - expected|| / ||expected|| over all parameters together, in float64.

    A gradient of None on one side only counts as infinitely far: a parameter that was never used is not the same as
    one with a zero gradient, because optimizers move the latter.

    Raises:
        ValueError: the two do not have the same parameters.
    """
    if set(found) != set(expected):
        message = f"different parameters: {sorted(set(found) ^ set(expected))} are on one side only."
        raise ValueError(message)
    difference, reference = 0.0, 0.0
    for name, value in expected.items():
        other = found[name]
        if value is None and other is None:
            continue
        if value is None or other is None:
            return float("inf")
        wide, other_wide = _wide(value), _wide(other)
        difference += float((other_wide - wide).square().sum())
        reference += float(wide.square().sum())
    if not reference:
        return 0.0 if not difference else float("inf")
    return math.sqrt(difference / reference)


def assert_same_gradients(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    *,
    tolerance: float = 1e-12,
) -> None:
    """Fail unless the relative error over all parameters is at most `tolerance`.

    Raises:
        AssertionError: with the error and the parameter that differs most.
    """
    error = relative_error(found, expected)
    if error <= tolerance:
        return
    worst = max(expected, key=lambda name: relative_error({name: found[name]}, {name: expected[name]}))
    message = f"gradients differ by {error:.2e}, more than {tolerance:.0e}; most in {worst!r}."
    raise AssertionError(message)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().double().cpu()
