"""The message that confirms a signal: the run stops after its step."""

import os
import signal
import sys


def print_stopping(number: signal.Signals) -> None:
    """Confirm a stop request. Called from a signal handler, where a buffered print may fail.

    On a terminal the console shows it above its bar instead.
    """
    if sys.stderr.isatty():
        return
    again = " Press Ctrl-C again to quit immediately without saving." if number == signal.SIGINT else ""
    os.write(sys.stderr.fileno(), f"\n{number.name}: finishing this step, then saving.{again}\n".encode())
