"""Numbers are shown with three significant digits and a unit."""

import math

import pytest

from anybatch.core.units import in_bytes, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.345, "12.3"),
        (9.999, "10.0"),
        (999.9, "1,000"),
        (999_900.0, "1.00e+06"),
        (0.00099999, "0.00100"),
        (0.00012, "1.20e-04"),
        (math.nan, "NaN"),
        (-math.inf, "-inf"),
        (None, "-"),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    """Ordinary numbers are written out, others with an exponent, and NaN and infinity by name."""
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (999, None, "999 bytes"),
        (1000, None, "0.977 KiB"),
        (1023 * 2**20, None, "0.999 GiB"),
        (2**30, 80 * 2**30, "1.00 of 80.0 GiB"),
        (0, 2**30, "0 of 1.00 GiB"),
    ],
)
def test_bytes(value: int, limit: int | None, text: str) -> None:
    """Bytes use a unit with at most three digits, and next to a limit the limit's unit."""
    assert in_bytes(value, limit) == text
