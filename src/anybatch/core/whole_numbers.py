"""Chapter 18: counts and sizes are whole numbers, and every argument that is one is checked here."""

from anybatch.errors import AnyBatchError, UserError


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
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    bound = "" if least is None else f" of at least {least}"
    kind = "" if type(value) is int else f", not {type(value).__name__}"
    message = f"{name}={value!r} must be a whole number{bound}{kind}.{cure and f' {cure}'}"
    raise error(message)
