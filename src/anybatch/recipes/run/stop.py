"""Stop requests: a signal stops a run after its step, a second Ctrl-C quits immediately."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a stop was requested: call it to ask. Signals are caught inside its `with`.

    SIGINT (Ctrl-C) and SIGTERM request a stop. A SIGINT after either raises KeyboardInterrupt immediately; a second
    SIGTERM does not, because schedulers may send it twice. `say` is called once, from the signal handler, so it must
    not print through a buffer.
    """

    def __init__(self, say: Callable[[signal.Signals], None] | None = None) -> None:
        self._say = say
        self._asked: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._asked is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only this thread may catch signals
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
