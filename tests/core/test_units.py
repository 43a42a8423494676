"""Numbers are shown with three significant digits and a unit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.units import duration, in_bytes, per_second, shortened, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (0.1, "0.100"),
        (12.345, "12.3"),
        (-123.45, "-123"),
        (9.999, "10.0"),
        (999.9, "1,000"),
        (12_345.0, "12,300"),
        (999_900.0, "1.00e+06"),
        (0.001, "0.00100"),
        (0.00099999, "0.00100"),
        (0.00012, "1.20e-04"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (None, "-"),
    ],
)
def test_three_digits(value: float | None, text: str) -> None:
    """Ordinary numbers are written out, others with an exponent, and NaN and infinity by name."""
    assert three_digits(value) == text


@given(st.floats(-1e300, 1e300))
def test_three_digits_are_the_number(value: float) -> None:
    """The text is accurate to half a unit of its third digit, in at most nine characters."""
    text = three_digits(value)

    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.005_000_1, abs_tol=1e-320)
    assert len(text.lstrip("-")) <= len("1.23e-123")


def test_rates_are_written_out() -> None:
    """A large rate never has an exponent."""
    assert [per_second(value) for value in (None, 12.34, 1_234_567.0)] == ["-", "12.3", "1,230,000"]


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (512, None, "512 bytes"),
        (999, None, "999 bytes"),
        (1000, None, "0.977 KiB"),
        (1023 * 2**20, None, "0.999 GiB"),
        (3 * 2**20, None, "3.00 MiB"),
        (2**30, 80 * 2**30, "1.00 of 80.0 GiB"),
        (0, 2**30, "0 of 1.00 GiB"),
    ],
)
def test_bytes(value: int, limit: int | None, text: str) -> None:
    """Bytes use a unit with at most three digits, and next to a limit the limit's unit."""
    assert in_bytes(value, limit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (-1.0, "0.0 s"),
        (4.26, "4.3 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7_380, "2 h 03 min"),
        (3 * 86_400 + 4 * 3_600, "3 d 04 h"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    """A duration has its two largest units."""
    assert duration(seconds) == text


@given(st.text("abcde", max_size=20), st.integers(4, 30))
def test_shortened(name: str, width: int) -> None:
    """A short name is kept, and a long one keeps its beginning and end in exactly the given width."""
    text = shortened(name, width)

    if len(name) <= width:
        assert text == name
    else:
        head, tail = text.split("..")
        assert len(text) == width
        assert name.startswith(head)
        assert name.endswith(tail)
