"""Error texts: a message for an expected error, the user's own frames if their code failed."""

import os
import sys
import traceback

from anybatch.cli.status import Status, is_unusable_file, status_of
from anybatch.cli.users_code import users_traceback
from anybatch.errors import AnyBatchError


def explain(error: BaseException, *, in_full: bool | None = None) -> str:
    """Return the text to print about an error; the full traceback with `in_full` or under `python -X dev`."""
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
        return "Interrupted by Ctrl-C. Saved checkpoints are intact; continue with --resume."
    if status is Status.OUT_OF_MEMORY:
        return (
            f"out of memory: {error}. Use a smaller --micro-batch-size, which does not change the result, "
            "or --precision bf16."
        )
    if isinstance(error, OSError) and status is Status.FILES:
        what = "the output" if error.filename is None else os.fspath(error.filename)
        return f"cannot write {what}: {error.strerror}. Free some space, or choose a place on another disk."
    if is_unusable_file(error):
        return f"cannot use {error.filename!r}: {error.strerror}. Check the path and its permissions."
    return None
