"""The speed of a run: recent samples per second, and the remaining time."""

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """The end of a step on two clocks, with the progress so far."""

    seconds: float
    stepping_seconds: float
    num_steps: int
    num_samples: int


class Throughput:
    """The speed of a session, from the ends of its steps.

    Samples per second are over the last seconds, or the last step if it took longer, without evaluations and
    checkpoints. The remaining time includes them, by the mean of the session. The first step is ignored once there is a
    second, because it allocates and compiles.
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
        """Set the time at which the first step begins."""
        self._moved_seconds = seconds
        self._begun = self._first = self._last = self._end_at(seconds, 0, 0)
        self._recent.append(self._last)

    def step(self, seconds: float, num_samples: int) -> None:
        """Add the end of a step, and its samples over all ranks."""
        if self._last is None:
            self.begin(seconds)
        assert self._last is not None
        before, self._moved_seconds = self._last, seconds
        self._last = self._end_at(seconds, before.num_steps + 1, before.num_samples + num_samples)
        self._recent.append(self._last)
        # The first step compiles, allocates optimizer state and warms caches, so it is not typical.
        if self._last.num_steps == 2:  # noqa: PLR2004 (the second step: from now on there is a pace without the first)
            self._first = before
            self._recent.popleft()
        # One step older than the window is kept, so that the span covers the window.
        oldest_wanted = self._last.stepping_seconds - self._window_seconds
        while len(self._recent) > 2 and self._recent[1].stepping_seconds <= oldest_wanted:  # noqa: PLR2004 (one step)
            self._recent.popleft()

    def aside(self, seconds: float) -> None:
        """Add the end of an evaluation or checkpoint."""
        if self._moved_seconds is not None:
            self._aside_seconds += seconds - self._moved_seconds
            self._moved_seconds = seconds

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second during steps; None if unknown."""
        if len(self._recent) < 2:  # noqa: PLR2004 (a span has two ends)
            return None
        oldest, newest = self._recent[0], self._recent[-1]
        seconds = newest.stepping_seconds - oldest.stepping_seconds
        return (newest.num_samples - oldest.num_samples) / seconds if seconds > 0 else None

    def seconds_since_begin(self, seconds: float) -> float | None:
        """Return the duration of this session so far."""
        return None if self._begun is None else seconds - self._begun.seconds

    def seconds_left(self, seconds: float, num_steps_left: int) -> float | None:
        """Return the remaining time for `num_steps_left` steps, from now; None if unknown."""
        if self._first is None or self._last is None or self._last.num_steps == self._first.num_steps:
            return None
        # Wall time, because evaluations and checkpoints are still to come.
        per_step = (self._last.seconds - self._first.seconds) / (self._last.num_steps - self._first.num_steps)
        return max(0.0, per_step * num_steps_left - (seconds - self._last.seconds))

    def _end_at(self, seconds: float, num_steps: int, num_samples: int) -> _StepEnd:
        return _StepEnd(seconds, seconds - self._aside_seconds, num_steps, num_samples)
