"""Counts and sizes must be integers; anything else raises with its value and type."""

from typing import Any

import pytest

from anybatch.core.geometry import checked_int
from anybatch.errors import BatchSizeError, UserError


@pytest.mark.parametrize(("value", "least"), [(1, 1), (7, 1), (0, 0), (-3, None), (2**64 - 1, 1)])
def test_whole_numbers_pass(value: int, least: int | None) -> None:
    """An integer that is not below the minimum is returned."""
    assert checked_int("steps", value, least=least) == value


@pytest.mark.parametrize(
    ("value", "least", "words"),
    [
        (0, 1, "steps=0 must be a whole number of at least 1."),
        (-1, 0, "steps=-1 must be a whole number of at least 0."),
        (2.0, 1, "steps=2.0 must be a whole number of at least 1, not float."),
        ("2", 1, "steps='2' must be a whole number of at least 1, not str."),
        (True, 0, "steps=True must be a whole number of at least 0, not bool."),
        (None, None, "steps=None must be a whole number, not NoneType."),
        (2**64, 1, "steps has 65 bits; it must be below 2**64."),
        (-(10**30), None, "steps has 100 bits; it must be below 2**64."),
    ],
)
def test_others_are_refused(value: Any, least: int | None, words: str) -> None:
    """Anything else raises the requested error class with the value, its type if wrong, and the fix."""
    with pytest.raises(UserError) as caught:
        checked_int("steps", value, least=least)
    assert str(caught.value) == words
    with pytest.raises(BatchSizeError) as caught:
        checked_int("steps", value, least=least, error=BatchSizeError, cure="Leave it out.")
    assert str(caught.value) == f"{words} Leave it out."
