"""Chapter 18: counts and sizes are whole numbers; arguments of a wrong kind are refused here."""

import math
import os
import reprlib
from pathlib import Path
from typing import Final

from anybatch.errors import AnyBatchError, UserError

_TOO_LARGE: Final = 2**63
"""Sizes from here on do not fit into an index."""


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
        AnyBatchError: of the class `error`; `value` is of another type, or below `least`.
    """
    # `True` would pass for 1, and is nearly always an argument in the wrong place.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or least <= value < _TOO_LARGE):
        return value
    bound = "" if least is None else f" of at least {least}"
    bound += " and below 2**63" * (type(value) is int and value >= _TOO_LARGE)
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


def checked_path(name: str, value: object, error: type[AnyBatchError] = UserError) -> Path:
    """Return an argument as a path.

    Raises:
        AnyBatchError: of the class `error`; it is not a path.
    """
    refuse_unless(isinstance(value, (str, os.PathLike)), name, value, "the path of a file or folder", error)
    return Path(value)  # type: ignore[arg-type]
