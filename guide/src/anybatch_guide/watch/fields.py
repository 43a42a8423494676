"""Validated fields of a log line; invalid or too large values count as missing.

Logs are untrusted. Texts are truncated, and control and direction characters are removed;
integers are small enough for exact representation in JavaScript.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

Line = Mapping[str, Any]
MAX_TEXT: Final = 2000
MAX_NAME: Final = 80
MAX_ENTRIES: Final = 32
_MAX_INTEGER: Final = 2**53
_MAX_SECONDS: Final = 1e15
# Control characters, and characters that change the direction of text.
_INVISIBLE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_SPECIAL_NUMBERS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def integer(line: Line, name: str) -> int | None:
    """Return a non-negative integer."""
    value = line.get(name)
    return value if type(value) is int and 0 <= value < _MAX_INTEGER else None


def number(line: Line, name: str) -> float | None:
    """Return a number; NaN and infinities are strings in a log."""
    return _number(line.get(name))


def time_of(line: Line) -> float | None:
    """Return the time of a line, in seconds on a monotonic clock."""
    seconds = number(line, "time_seconds")
    return seconds if seconds is not None and abs(seconds) < _MAX_SECONDS else None


def text(line: Line, name: str, max_length: int = MAX_TEXT) -> str | None:
    """Return a text that is safe to display."""
    value = line.get(name)
    return cleaned(value, max_length) if isinstance(value, str) else None


def cleaned(value: str, max_length: int = MAX_NAME) -> str:
    """Return a text for display, without invisible characters, and truncated."""
    truncated = value if len(value) <= max_length else value[: max_length - 1] + "…"
    return _INVISIBLE.sub("\ufffd", truncated)


def numbers(line: Line, name: str) -> dict[str, float]:
    """Return a mapping of names to numbers, without invalid values."""
    entries = ((key, _number(value)) for key, value in _entries(line, name))
    return {key: value for key, value in entries if value is not None}


def integers(line: Line, name: str) -> dict[str, int]:
    """Return a mapping of names to non-negative integers, without invalid values."""
    return {key: value for key, value in _entries(line, name) if type(value) is int and 0 <= value < _MAX_INTEGER}


def texts(line: Line, name: str) -> dict[str, str]:
    """Return a mapping of names to texts, without invalid values."""
    return {key: cleaned(value, MAX_TEXT) for key, value in _entries(line, name) if isinstance(value, str)}


def first_number(line: Line, name: str) -> float | None:
    """Return the first of a list of numbers."""
    value = line.get(name)
    return _number(value[0]) if isinstance(value, list) and value else None


def _entries(line: Line, name: str) -> list[tuple[str, Any]]:
    value = line.get(name)
    return [(cleaned(key), item) for key, item in list(value.items())[:MAX_ENTRIES]] if isinstance(value, dict) else []


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return _SPECIAL_NUMBERS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
