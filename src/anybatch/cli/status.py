"""Exit statuses of commands, and the text that a command prints about an error.

The text is the error's message if the error is expected, and the traceback of the user's code if that code failed.
"""

import errno
import os
import select
import sys
import sysconfig
import traceback
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TextIO, TypeGuard

from anybatch.errors import (
    AnyBatchError,
    CheckpointError,
    MemoryExhaustedError,
    NonFiniteError,
    UserError,
    WorldError,
)

_PACKAGE = Path(__file__).parents[1]
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


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


class ParserExit(SystemExit):
    """Raised by a command's parser to end the command: after --help, or with a message, after an invalid option."""

    message = ""


def status_of(error: BaseException) -> Status:
    """Return the exit status for an error that ends a command."""
    if isinstance(error, KeyboardInterrupt):
        return Status.INTERRUPTED
    if is_output_closed(error):
        return Status.CLOSED_PIPE
    if isinstance(error, CheckpointError) or (isinstance(error, OSError) and error.errno in _DISK_FULL):
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
    """Return whether a file chosen by the user cannot be used; False for errors in the user's own code."""
    return isinstance(error, OSError) and error.filename is not None and users_traceback(error) is None


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # if torch is not imported, it did not raise the error
    return isinstance(error, MemoryError if torch is None else (MemoryError, torch.OutOfMemoryError))


ErrorValues = dict[str, str]


def error_values(error: BaseException) -> ErrorValues:
    """Return the class of an error, its code (by default the name of its exit status), and its message, for JSON."""
    if isinstance(error, ParserExit):
        return {"type": "UserError", "code": "usage", "message": error.message}
    code = getattr(error, "code", "") if isinstance(error, AnyBatchError) else ""
    message = explain(error).removeprefix("anybatch: ")
    return {"type": type(error).__name__, "code": code or status_of(error).name.lower(), "message": message}


def explain(error: BaseException, *, in_full: bool | None = None) -> str:
    """Return the text to print about an error; the full traceback with `in_full` or under `python -X dev`."""
    if sys.flags.dev_mode if in_full is None else in_full:
        return "".join(traceback.format_exception(error)).rstrip()
    message = _expected_message(error)
    if message is not None:
        return f"anybatch: {message}"
    user_frames = users_traceback(error)
    if user_frames is not None:
        return f"anybatch: the recipe's own code failed:\n\n{user_frames}"
    full = "".join(traceback.format_exception(error)).rstrip()
    return (
        "anybatch: Internal error: this is a bug in anybatch. Please report it with the output of 'anybatch env'."
        f"\n\n{full}"
    )


def _expected_message(error: BaseException) -> str | None:
    """Return the message for an error that needs no traceback; None for other errors."""
    if isinstance(error, AnyBatchError):
        return str(error)
    status = status_of(error)
    if status is Status.INTERRUPTED:
        return "Interrupted by Ctrl-C. Checkpoints, if any, are intact."
    if status is Status.OUT_OF_MEMORY:
        return (
            f"out of memory: {error}. Use a smaller --micro-batch-size, which does not change the result, "
            "or --precision bf16."
        )
    if isinstance(error, OSError) and status is Status.FILES:
        what = "the output" if error.filename is None else os.fspath(error.filename)
        return f"cannot write {what}: {error.strerror}. Free some space, or choose a folder on another disk."
    if is_unusable_file(error):
        return f"cannot use {error.filename!r}: {error.strerror}. Check the path and its permissions."
    return None


def users_traceback(error: BaseException) -> str | None:
    """Return the traceback from the first frame of the user's code; None without such a frame."""
    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, SyntaxError):  # the user's file did not run, so it has no frame
        return "".join(shown.format_exception_only()).rstrip()
    foreign = [number for number, frame in enumerate(shown.stack) if not _is_ours(frame.filename)]
    if not foreign:
        return None
    # Skip frames of installed packages between anybatch and the recipe, such as decorators.
    first = next((number for number in foreign if not _is_installed(shown.stack[number].filename)), foreign[0])
    # Drop the frames above the recipe, which belong to anybatch and torch.
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[first:])
    return "".join(shown.format(chain=False)).rstrip()


def _is_ours(filename: str) -> bool:
    """Return whether a frame belongs to anybatch, its guide, torch or Python."""
    # Python's frozen modules and other code without a file.
    if filename.startswith("<"):
        return True
    # A module that is not loaded has no frames, and importing torch would take seconds.
    modules = [sys.modules.get(name) for name in ("torch", "anybatch_guide")]
    packages = [_PACKAGE, *(Path(module.__file__).parent for module in modules if module and module.__file__)]
    if any(_is_in(filename, package) for package in packages):
        return True
    if filename == sys.argv[0] and _is_in(filename, sysconfig.get_path("scripts")):
        return True
    return not _is_installed(filename) and _is_in(filename, sysconfig.get_path("stdlib"))


def _is_installed(filename: str) -> bool:
    return any(_is_in(filename, sysconfig.get_path(name)) for name in ("purelib", "platlib"))


def _is_in(filename: str, folder: str | Path) -> bool:
    return Path(filename).resolve().is_relative_to(Path(folder).resolve())


def is_output_closed(error: BaseException) -> bool:
    """Return whether an error means that the reader of standard output or standard error closed the pipe."""
    return isinstance(error, BrokenPipeError) and any(map(_has_no_reader, (sys.stdout, sys.stderr)))


def discard_unwritable_output() -> None:
    """Redirect unwritable output to the null device, so that Python does not fail again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            is_lost = True
        else:
            is_lost = _has_no_reader(stream)
        if is_lost:
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def _has_no_reader(stream: TextIO) -> bool:
    # A test write would not show it: after a failed write the stream drops its data, so the next write may succeed.
    poller = select.poll()
    try:
        poller.register(stream.fileno(), 0)
    except (OSError, ValueError):  # not a file, or closed
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))
