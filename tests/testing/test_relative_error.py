"""The error measure of all equality tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.testing import assert_same_gradients, relative_error

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)


@given(found=NUMBERS, expected=NUMBERS)
def test_it_is_the_norm_of_the_difference_over_the_norm(found: list[float], expected: list[float]) -> None:
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


class OnNarrowDevice(torch.Tensor):
    """A tensor that cannot be converted to float64 on its device, as on MPS."""

    def double(self) -> torch.Tensor:
        """Raise, as the device does."""
        message = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
        raise TypeError(message)

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        """Return a tensor on the host."""
        return self.as_subclass(torch.Tensor)


def test_gradients_may_be_where_there_is_no_float64() -> None:
    """Gradients are moved to the host before the conversion to float64, which the device may lack."""
    narrow = {"a": torch.ones(3).as_subclass(OnNarrowDevice)}
    assert relative_error(narrow, {"a": torch.ones(3)}) == 0.0
    assert relative_error(narrow, {"a": 2 * torch.ones(3)}) == 0.5


def test_other_parameters_are_refused() -> None:
    """Gradients of different parameters cannot be compared."""
    with pytest.raises(ValueError, match="'b'"):
        relative_error({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
