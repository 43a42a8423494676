"""The text of an error: a message where it was foreseen, the user's own frames where their code failed."""

import os
import sys
import traceback

from anybatch.cli.status import Status, is_unusable_file, status_of
from anybatch.cli.users_code import users_traceback
from anybatch.errors import AnyBatchError


def explain(error: BaseException, *, in_full: bool | None = None) -> str:
    """Return the text to print about an error.

    Args:
        error: what was raised.
        in_full: with the whole traceback, whatever it is; None does so under `python -X dev`.
    """
    if sys.flags.dev_mode if in_full is None else in_full:
        return "".join(traceback.format_exception(error)).rstrip()
    message = _foreseen(error)
    if message is not None:
        return f"anybatch: {message}"
    own = users_traceback(error)
    if own is not None:
        return f"anybatch: the recipe's own code failed:\n\n{own}"
    full = "".join(traceback.format_exception(error)).rstrip()
    return (
        "anybatch: Internal error: this is a bug in anybatch. Please report it with the output of 'anybatch env'."
        f"\n\n{full}"
    )


def _foreseen(error: BaseException) -> str | None:
    """Return the message for an error that needs no traceback; None for any other."""
    if isinstance(error, AnyBatchError):
        return str(error)
    status = status_of(error)
    if status is Status.INTERRUPTED:
        return "ended at once, by Ctrl-C. What was saved before is whole; --resume goes on from there."
    if status is Status.OUT_OF_MEMORY:
        return (
            f"out of memory: {error}. Name a smaller --micro-batch-size: the result stays the same. "
            "Or use --precision bf16."
        )
    if isinstance(error, OSError) and status is Status.FILES:
        what = "the output" if error.filename is None else os.fspath(error.filename)
        return f"cannot write {what}: {error.strerror}. Free some space, or choose a place on another disk."
    if is_unusable_file(error):
        return f"cannot use {error.filename!r}: {error.strerror}. Check the path and its permissions."
    return None
