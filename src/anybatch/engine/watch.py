"""From happenings inside the engine to records for an observer; free when nobody observes."""

from typing import Any


def _nothing(*_: Any) -> None:
    return


class Watch:
    def __init__(self, observer: Any, rank: int) -> None:
        self.reduction = None
        self.before = self.after = self.step = self.evaluate = self.end = _nothing
