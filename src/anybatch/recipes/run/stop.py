"""A polite end: a signal asks a run to stop when its step is over, a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the process was asked to stop. Call it to know; signals are caught inside of its `with`.

    SIGINT (Ctrl-C) and SIGTERM ask. SIGINT after either raises KeyboardInterrupt where the program stands. SIGTERM
    never does: those who send it may send it twice.

    Args:
        say: is called with what was asked, once, from a signal handler: it must not print through a buffer.
    """

    def __init__(self, say: Callable[[signal.Signals], None] | None = None) -> None:
        self._say = say
        self._asked: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether a stop was asked for."""
        return self._asked is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that Python allows to catch signals
            self._former = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._former = {}

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._asked = signal.Signals(number)
        if self._say is not None:
            self._say(self._asked)
