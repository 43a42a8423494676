"""Spikes and divergence of a run, from its curve. `anybatch spikes` finds the same spikes."""

import bisect
import math
from itertools import islice
from statistics import median
from typing import Any, Final

from anybatch.core.spikes import FirstSpikes, SpikeRule
from anybatch_guide.watch.curve import SKIPPED, UNREAD, Curve

STEPS_PER_READ: Final = 4000
MAX_SPIKES: Final = 50
_NUM_FIRST: Final = 3
_NUM_LAST: Final = 8
_DIVERGED_FACTOR: Final = 1.5
_NO_PROGRESS: Final = 0.75
_PEAK_FACTOR: Final = 3.0
_NUM_PEAKS: Final = 3


class Stability:
    """The spikes of a growing curve, found incrementally."""

    def __init__(self) -> None:
        self._num_starts = 0
        self._begin()

    def _begin(self) -> None:
        self._first_spikes = FirstSpikes(SpikeRule())
        self._next_step = -1
        self.spikes: list[dict[str, Any]] = []
        self.num_spikes = 0
        self.has_unread_steps = False

    def read(self, curve: Curve, num_starts: int, max_steps: int = STEPS_PER_READ) -> bool:
        """Check more steps, and return whether there are new spikes. A resumed run is checked again from its start."""
        before = self.num_spikes
        if num_starts != self._num_starts:
            self._num_starts = num_starts
            self._begin()
        begin = bisect.bisect_left(curve.steps, self._next_step)
        end = min(len(curve.steps), begin + max_steps)
        for index in range(begin, end):
            if not curve.flags[index] & (SKIPPED | UNREAD):
                self._add(curve.steps[index], curve.losses[index], curve.norms[index])
        if end > begin:
            self._next_step = curve.steps[end - 1] + 1
        self.has_unread_steps = end < len(curve.steps)
        return self.num_spikes != before

    def _add(self, step: int, loss: float, norm: float) -> None:
        spike = self._first_spikes.add(step, loss, None if math.isnan(norm) else norm)
        if spike is None:
            return
        self.num_spikes += 1
        level = spike.level if math.isfinite(spike.level) else None
        self.spikes.append(
            {"step": step + 1, "quantity": spike.quantity, "form": spike.form, "value": spike.value, "level": level}
        )
        del self.spikes[:-MAX_SPIKES]


def has_diverged(curve: Curve) -> bool:
    """Return whether the latest loss is not finite, or the last losses are far above the first.

    "Far above": with L the lowest of the first 3 losses, the median of the last 8 is above 1.5 L; or above 0.75 L, if
    at least 3 losses of the run are above 3 L.
    """
    losses = [
        loss
        for loss, flags in zip(curve.losses[-_NUM_LAST:], curve.flags[-_NUM_LAST:], strict=True)
        if not flags & (SKIPPED | UNREAD)
    ]
    if losses and not math.isfinite(losses[-1]):
        return True
    first = [loss for loss in curve.losses[:_NUM_FIRST] if math.isfinite(loss)]
    last = [loss for loss in losses if math.isfinite(loss)][-max(1, len(curve.steps) // 4) :]
    if len(curve.steps) <= _NUM_FIRST or not first or not last:
        return False
    rise = median(last) / min(first) if min(first) > 0 else 0.0
    peaks = (loss for loss in curve.losses if loss > _PEAK_FACTOR * min(first))
    return rise > _DIVERGED_FACTOR or (rise > _NO_PROGRESS and len(list(islice(peaks, _NUM_PEAKS))) == _NUM_PEAKS)
