"""How fast a run goes: samples per second of the last seconds, and the time that is left."""

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """When a step was over, by two clocks, and what had been done by then."""

    seconds: float
    stepping_seconds: float
    num_steps: int
    num_samples: int


class Throughput:
    """The pace of a session, from the times at which its steps were over.

    Samples per second are those of the last seconds, or of the last step if it took longer. Evaluations and
    checkpoints are left out of them: they stand between two steps, so what passed since the step before belongs to
    them. The time that is left counts them in, for there will be more of them; it is the mean of the whole session.
    The first step of a session is left out as soon as there is a second one: it makes room and compiles.

    Args:
        window_seconds: how far back samples per second look.
    """

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._aside_seconds = 0.0
        self._begun: _StepEnd | None = None
        self._first: _StepEnd | None = None
        self._last: _StepEnd | None = None
        self._moved_seconds: float | None = None
        self._recent: deque[_StepEnd] = deque()

    def begin(self, seconds: float) -> None:
        """Take the time at which the first step begins."""
        self._moved_seconds = seconds
        self._begun = self._first = self._last = self._end_at(seconds, 0, 0)
        self._recent.append(self._last)

    def step(self, seconds: float, num_samples: int) -> None:
        """Take the time at which a step is over, and its samples over all ranks."""
        if self._last is None:
            self.begin(seconds)
        assert self._last is not None
        before, self._moved_seconds = self._last, seconds
        self._last = self._end_at(seconds, before.num_steps + 1, before.num_samples + num_samples)
        self._recent.append(self._last)
        # The first step compiles, makes the optimizer's state and warms caches up; it says nothing of the others.
        if self._last.num_steps == 2:  # noqa: PLR2004 (the second step: from now on there is a pace without the first)
            self._first = before
            self._recent.popleft()
        # One step older than the window is kept, so that the span is never shorter than the window.
        oldest_wanted = self._last.stepping_seconds - self._window_seconds
        while len(self._recent) > 2 and self._recent[1].stepping_seconds <= oldest_wanted:  # noqa: PLR2004 (one step)
            self._recent.popleft()

    def aside(self, seconds: float) -> None:
        """Take the time at which an evaluation, or a checkpoint, is over."""
        if self._moved_seconds is not None:
            self._aside_seconds += seconds - self._moved_seconds
            self._moved_seconds = seconds

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second while stepping; None as long as nothing can be said."""
        if len(self._recent) < 2:  # noqa: PLR2004 (a span has two ends)
            return None
        oldest, newest = self._recent[0], self._recent[-1]
        seconds = newest.stepping_seconds - oldest.stepping_seconds
        return (newest.num_samples - oldest.num_samples) / seconds if seconds > 0 else None

    def seconds_since_begin(self, seconds: float) -> float | None:
        """Return the time that this session has taken so far."""
        return None if self._begun is None else seconds - self._begun.seconds

    def seconds_left(self, seconds: float, num_steps_left: int) -> float | None:
        """Return the time that so many steps after the last one will take, seen from now; None if that is unknown."""
        if self._first is None or self._last is None or self._last.num_steps == self._first.num_steps:
            return None
        # Wall time, not stepping time: evaluations and checkpoints still to come take their part.
        per_step = (self._last.seconds - self._first.seconds) / (self._last.num_steps - self._first.num_steps)
        return max(0.0, per_step * num_steps_left - (seconds - self._last.seconds))

    def _end_at(self, seconds: float, num_steps: int, num_samples: int) -> _StepEnd:
        return _StepEnd(seconds, seconds - self._aside_seconds, num_steps, num_samples)
