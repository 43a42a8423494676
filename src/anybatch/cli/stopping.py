"""The line that answers a signal: a run stops after its step."""

import os
import signal
import sys


def say_stopping(number: signal.Signals) -> None:
    """Say that a stop was asked for; called from a signal handler, where a buffered print may fail.

    On a terminal the console says it, above its bar.
    """
    if sys.stderr.isatty():
        return
    again = "; Ctrl-C again ends at once, without" if number == signal.SIGINT else ""
    os.write(sys.stderr.fileno(), f"\n{number.name}: stopping after this step, and saving{again}\n".encode())
