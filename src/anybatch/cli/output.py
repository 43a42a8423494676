"""Output that can no longer be written: a closed pipe, as after `| head -1`, or a full disk."""

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def is_output_closed(error: BaseException) -> bool:
    """Return whether an error says that the reader of standard output or standard error has closed the pipe."""
    return isinstance(error, BrokenPipeError) and any(map(_has_no_reader, (sys.stdout, sys.stderr)))


def discard_unwritable_output() -> None:
    """Send output that cannot be written to the null device, so that Python does not fail again when it exits."""
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
    # Not by another write: a stream drops what it could not write, so the next one may succeed.
    poller = select.poll()
    try:
        poller.register(stream.fileno(), 0)
    except (OSError, ValueError):  # a stream that is no file, or is closed
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))
