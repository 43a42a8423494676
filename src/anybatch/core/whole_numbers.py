"""Chapter 18: counts and sizes are whole numbers; arguments of a wrong kind are refused here."""

import math
import reprlib

from anybatch.errors import AnyBatchError, UserError

_END = 1 << 64  # seeds may have 64 bits


def checked_int(
    name: str, value: object, *, least: int | None = 1, error: type[AnyBatchError] = UserError, cure: str = ""
) -> int:
    """Return `value` if it is a whole number of at least `least`. A bool is none, although Python counts it as an int.

    Args:
        name: the argument's name, for the message.
        value: the argument.
        least: the smallest number allowed; None for any.
        error: class of the error.
        cure: a sentence on what to do, added to the message; may be empty.

    Raises:
        AnyBatchError: of the class `error`; `value` is of another type, below `least`, or has over 64 bits.
    """
    # `True` would pass for 1, and is nearly always an argument in the wrong place.
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
    """Refuse an argument that is not what it must be.

    Args:
        is_valid: whether it can be used.
        name: the argument's name, for the message.
        value: the argument.
        expected: a noun phrase for the message, such as "a function of a sample".
        error: class of the error.

    Raises:
        AnyBatchError: of the class `error`; the argument cannot be used.
    """
    if not is_valid:
        # Arguments in the wrong place may be whole data sets.
        message = f"{name}={reprlib.repr(value)} must be {expected}, not {type(value).__name__}."
        raise error(message)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
