"""The error measure of all equality tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.testing import assert_same_gradients, relative_error

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)


@given(found=NUMBERS, expected=NUMBERS)
def test_error_is_the_relative_norm_of_the_difference(found: list[float], expected: list[float]) -> None:
    """The error is the norm of the difference over the norm, with all parameters as one vector."""
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    if not other.norm() > 1e-100:
        return
    error = relative_error({"a": one[:1], "b": one[1:]}, {"a": other[:1], "b": other[1:]})
    assert error == pytest.approx(float((one - other).norm() / other.norm()), rel=1e-12)


def test_none_is_not_zero() -> None:
    """A missing gradient only equals a missing one, since optimizers also move parameters with zero gradients."""
    zero = {"a": torch.zeros(2)}
    assert relative_error({"a": None}, zero) == relative_error(zero, {"a": None}) == float("inf")
    assert relative_error({"a": None}, {"a": None}) == relative_error(zero, zero) == 0.0
    assert relative_error({"a": torch.ones(2)}, zero) == float("inf")


def test_not_a_number_is_never_small() -> None:
    """An error of NaN is not below any tolerance."""
    nan = {"a": torch.tensor([float("nan")])}
    assert not relative_error(nan, {"a": torch.ones(1)}) <= 1e300
    with pytest.raises(AssertionError):
        assert_same_gradients(nan, {"a": torch.ones(1)})


def test_other_parameters_are_refused() -> None:
    """Gradients of different parameters cannot be compared."""
    with pytest.raises(ValueError, match="'b'"):
        relative_error({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
