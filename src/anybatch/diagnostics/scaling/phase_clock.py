"""The seconds of one step by part, from the records of its phases."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record, ReductionRecord

Clock = Callable[[], float]
_SCHEDULER = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """One step of one rank.

    Attributes:
        load: seconds in which the next micro-batch was waited for, copies to the device included.
        compute: of forwards and backwards.
        reduce: from the end of the last backward until all sums are there.
        update: of clipping and the optimizer.
        whole: of the step.
        queued: in which the rank could have run and had no core, because others had them; 0 if not reported.
        num_samples: that the rank has run.
        num_messages: collectives that carried gradients.
        message_bytes: that they carried.
    """

    load: float = 0.0
    compute: float = 0.0
    reduce: float = 0.0
    update: float = 0.0
    whole: float = 0.0
    queued: float = 0.0
    num_samples: int = 0
    num_messages: int = 0
    message_bytes: int = 0

    @property
    def busy(self) -> float:
        """Seconds of the rank's own work."""
        return self.load + self.compute + self.update - self.queued


class PhaseClock:
    """An observer that takes the time of the parts of a step.

    Args:
        device: waited for at the end of each part, where `waits`, so that its work is in that part.
        waits: whether to do so; it takes overlap away, and so is left out where whole steps count.
        clock: monotonic time in seconds.
    """

    def __init__(self, device: torch.device, *, waits: bool, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._waits = waits and device.type != "cpu"
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._messages: list[int] = []
        self._num_samples = 0

    def observe(self, record: Record, /) -> None:
        """Take the time of a record that begins or ends a part."""
        if isinstance(record, ReductionRecord) and record.event == "begin" and record.payload == "gradients":
            self._messages.append(record.num_bytes)
        if isinstance(record, PhaseRecord):
            part = {"load": "load", "reduce": "reduce", "clip": "update", "update": "update"}.get(record.name)
        else:
            part = "compute" if isinstance(record, MicroBatchRecord) else None
        if isinstance(record, MicroBatchRecord) and record.event == "begin":
            self._num_samples += record.num_samples
        if part is None or not isinstance(record, PhaseRecord | MicroBatchRecord):
            return
        if self._waits:
            torch.accelerator.synchronize(self._device)
        now = self._clock()
        if record.event == "begin":
            self._begun[part] = now
        else:
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._begun.pop(part, now)

    def timed(self, step: Callable[[], object]) -> RankSeconds:
        """Run a step and return its seconds."""
        self._seconds.clear()
        self._messages.clear()
        self._num_samples = 0
        queued = queued_seconds()
        begun = self._now()
        step()
        whole = self._now() - begun
        queued = queued_seconds() - queued
        return RankSeconds(
            **self._seconds,
            whole=whole,
            queued=queued,
            num_samples=self._num_samples,
            num_messages=len(self._messages),
            message_bytes=sum(self._messages),
        )

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


def queued_seconds() -> float:
    """Return the seconds that this thread has waited for a core since it began; 0 where the system does not say."""
    # Three numbers: nanoseconds on a core, nanoseconds in the queue for one, turns.
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    return 0.0
