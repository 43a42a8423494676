"""The exit statuses of the command line."""

import errno
import sys
from enum import IntEnum
from typing import TypeGuard

from anybatch.cli.output import is_output_closed
from anybatch.cli.users_code import users_traceback
from anybatch.errors import CheckpointError, MemoryExhaustedError, NonFiniteError, UserError, WorldError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Status(IntEnum):
    """The exit statuses, listed in docs/command_line.md."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    STOPPED = 3
    NOT_FINITE = 4
    FILES = 5
    RANKS = 6
    OUT_OF_MEMORY = 7
    NOT_EXACT = 8
    UNDECIDED = 9
    INTERRUPTED = 130
    CLOSED_PIPE = 141


def status_of(error: BaseException) -> Status:
    """Return the exit status for an error that ends a command."""
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED
    if is_output_closed(error):
        return Status.CLOSED_PIPE
    if isinstance(error, CheckpointError) or (isinstance(error, OSError) and error.errno in _FULL):
        return Status.FILES
    for kind, status in (
        (UserError, Status.USAGE),
        (NonFiniteError, Status.NOT_FINITE),
        (MemoryExhaustedError, Status.OUT_OF_MEMORY),
        (WorldError, Status.RANKS),
    ):
        if isinstance(error, kind):
            return status
    if is_unusable_file(error):
        return Status.USAGE
    return Status.OUT_OF_MEMORY if _is_out_of_memory(error) else Status.UNEXPECTED


def is_unusable_file(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a file chosen by the user cannot be used, not counting errors of the user's own code."""
    return isinstance(error, OSError) and error.filename is not None and users_traceback(error) is None


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # not imported: an error of torch implies that it is
    return isinstance(error, MemoryError if torch is None else (MemoryError, torch.OutOfMemoryError))
