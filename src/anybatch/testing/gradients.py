"""Fail a test if two gradients differ."""

from collections.abc import Mapping

import torch

from anybatch.core.tensors import errors_by_parameter, relative_error


def assert_same_gradients(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    *,
    tolerance: float = 1e-12,
) -> None:
    """Fail unless the relative error over all parameters is at most `tolerance`.

    Raises:
        AssertionError: they differ; the message has the error and the parameter that differs most.
    """
    error = relative_error(found, expected)
    if error <= tolerance:
        return
    errors = errors_by_parameter(found, expected)
    worst = max(errors, key=lambda name: errors[name])
    message = f"gradients differ by {error:.2e}, more than {tolerance:.0e}; most in {worst!r}."
    raise AssertionError(message)
