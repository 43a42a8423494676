"""Chapter 18: argument checks: counts and sizes are whole numbers, and wrong types are refused."""

import math
import reprlib

from anybatch.errors import AnyBatchError, UserError

_END = 1 << 64  # seeds may have 64 bits


def checked_int(
    name: str, value: object, *, least: int | None = 1, error: type[AnyBatchError] = UserError, cure: str = ""
) -> int:
    """Return `value` if it is a whole number of at least `least` (None: any); a bool is refused.

    `cure` is a sentence with the fix for the message; it may be empty.

    Raises:
        AnyBatchError: of the class `error`; `value` is of another type, below `least`, or has over 64 bits.
    """
    # `True` would pass as 1, and is nearly always an argument in the wrong position.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        if abs(value) < _END:
            return value
        message = f"{name} has {value.bit_length()} bits; it must be below 2**64.{cure and f' {cure}'}"
        raise error(message)
    bound = "" if least is None else f" of at least {least}"
    kind = "" if type(value) is int else f", not {type(value).__name__}"
    message = f"{name}={value!r} must be a whole number{bound}{kind}.{cure and f' {cure}'}"
    raise error(message)


def refuse_unless(
    is_valid: bool,  # noqa: FBT001 (a condition, as in `assert`)
    name: str,
    value: object,
    expected: str,
    error: type[AnyBatchError] = UserError,
) -> None:
    """Raise an `error` unless `is_valid`; `expected` is a noun phrase for the message: "a function of a sample"."""
    if not is_valid:
        # An argument in the wrong position may be a whole data set.
        message = f"{name}={reprlib.repr(value)} must be {expected}, not {type(value).__name__}."
        raise error(message)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
