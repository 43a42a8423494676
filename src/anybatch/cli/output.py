"""Unwritable output: a closed pipe, as after `| head -1`, or a full disk."""

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


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
    # Polled, because a stream drops unwritten data, so another write may succeed.
    poller = select.poll()
    try:
        poller.register(stream.fileno(), 0)
    except (OSError, ValueError):  # not a file, or closed
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))
