"""The seconds of one step by part, from the records of its phases."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record, ReductionRecord, SpanEvent

Clock = Callable[[], float]
PARTS: Mapping[str, str] = MappingProxyType({"load": "load", "reduce": "reduce", "clip": "update", "update": "update"})
"""The part of a step that each phase belongs to; micro-batches are "compute"."""
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

    @property
    def on_core(self) -> float:
        """Seconds of compute without the time in which other programs used the core."""
        return self.compute - self.queued


def median_of(steps: Sequence[RankSeconds], part: str) -> float:
    """Return the median of a part, an attribute of `RankSeconds`, over steps."""
    found: float = statistics.median(getattr(step, part) for step in steps)
    return found


def slowest(ranks: Sequence[Sequence[RankSeconds]]) -> list[float]:
    """Return the seconds of the slowest rank, for each step."""
    return [max(step.whole for step in steps) for steps in zip(*ranks, strict=True)]


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
        match record:
            case ReductionRecord(event="begin", payload="gradients"):
                self._messages.append(record.num_bytes)
            case MicroBatchRecord():
                self._num_samples += record.num_samples * (record.event == "begin")
                self._follow("compute", record.event)
            case PhaseRecord() if record.name in PARTS:
                self._follow(PARTS[record.name], record.event)
            case _:
                return

    def _follow(self, part: str, event: SpanEvent) -> None:
        if self._waits:
            torch.accelerator.synchronize(self._device)
        now = self._clock()
        if event == "begin":
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
