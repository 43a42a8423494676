"""The seconds of a step by part, from the records of its phases or from the logs of a finished run."""

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from anybatch.core.records import MicroBatchRecord, PhaseRecord, Record, ReductionRecord, SpanEvent
from anybatch.events.jsonl import read_jsonl

Clock = Callable[[], float]
PARTS: Mapping[str, str] = MappingProxyType({"load": "load", "reduce": "reduce", "clip": "update", "update": "update"})
"""The part of a step that each phase belongs to; micro-batches are "compute"."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """The seconds of one step on one rank, by part."""

    load: float = 0.0  # waiting for the next micro-batch, with copies to the device
    compute: float = 0.0
    reduce: float = 0.0  # from the end of the last backward until all sums have arrived
    update: float = 0.0  # with clipping
    whole: float = 0.0
    queued: float = 0.0  # waiting for a core; 0 if the system does not report it
    num_samples: int = 0
    num_messages: int = 0  # collectives that carried gradients
    message_bytes: int = 0

    @property
    def busy(self) -> float:
        """Seconds of the rank's own work."""
        return self.load + self.on_core + self.update

    @property
    def queued_compute(self) -> float:
        """Seconds of compute in which other programs used the core."""
        return min(self.queued, self.compute)

    @property
    def on_core(self) -> float:
        """Seconds of compute without the time in which other programs used the core."""
        return self.compute - self.queued_compute


MAX_QUEUED = 0.1
"""If steps wait for a core for a larger share of their time, other programs decide which step is the fastest."""
_MAX_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over interleaved rounds, and its 95% interval; the interval is infinite below 6 rounds."""

    value: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0.0

    def __str__(self) -> str:
        """Return the value and its interval, as text."""
        if math.isinf(self.high):
            return f"{self.value:.2f} (interval unknown)"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def estimate(rounds: Sequence[float]) -> Estimate:
    """Return the median, and its interval between two of the sorted values (sign test).

    The interval assumes no distribution, only that the noise of rounds is independent: the median is below the k-th
    smallest of n values with the probability that fewer than k of n coins show heads.
    """
    ordered, tail, rank = sorted(rounds), 0.0, 0
    while (tail := tail + math.comb(len(ordered), rank) / 2 ** len(ordered)) <= _MAX_TAIL:
        rank += 1
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)
    return Estimate(statistics.median(ordered), low, high)


def busy_cores(queued_share: float) -> str:
    """Return why step times show nothing if steps waited for a core for this share of their time, or an empty text."""
    if queued_share <= MAX_QUEUED:
        return ""
    return f"other programs use these cores, so steps waited for a core {queued_share:.0%} of their time; stop them"


def median_of(steps: Sequence[RankSeconds], part: str) -> float:
    """Return the median of a part, an attribute of `RankSeconds`, over steps."""
    found: float = statistics.median(getattr(step, part) for step in steps)
    return found


def slowest(ranks: Sequence[Sequence[RankSeconds]]) -> list[float]:
    """Return the seconds of the slowest rank, for each step."""
    return [max(step.whole for step in steps) for steps in zip(*ranks, strict=True)]


class PhaseClock:
    """Times the parts of a step. With `waits`, it synchronizes the device after each part, which prevents overlap."""

    def __init__(self, device: torch.device, *, waits: bool, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._waits = waits and device.type != "cpu"
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._messages: list[int] = []
        self._num_samples = 0

    def observe(self, record: Record, /) -> None:
        """Read the clock if the record begins or ends a part of the step."""
        match record:
            case ReductionRecord(event="begin", payload="gradients"):
                self._messages.append(record.num_bytes)
            case MicroBatchRecord():
                self._num_samples += record.num_samples * (record.event == "begin")
                self._note_time("compute", record.event)
            case PhaseRecord() if record.name in PARTS:
                self._note_time(PARTS[record.name], record.event)
            case _:
                return

    def _note_time(self, part: str, event: SpanEvent) -> None:
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
        begun = time_after_work(self._device, self._clock)
        step()
        whole = time_after_work(self._device, self._clock) - begun
        queued = queued_seconds() - queued
        return RankSeconds(
            **self._seconds,
            whole=whole,
            queued=queued,
            num_samples=self._num_samples,
            num_messages=len(self._messages),
            message_bytes=sum(self._messages),
        )


def time_after_work(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Synchronize the device, so that launched work is complete, and return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock()


def queued_seconds() -> float:
    """Return the seconds that this thread has waited for a core so far; 0 if the system does not report them."""
    # Three numbers: nanoseconds on a core, nanoseconds of waiting for a core, number of time slices.
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    return 0.0


def logged_steps(path: Path) -> Iterator[tuple[int, RankSeconds]]:
    """Yield the samples and the host seconds of each finished step in the log of a rank."""
    seconds, begun = defaultdict[str, Any](float), dict[str, float]()
    start: float | None = None
    for line in read_jsonl(path):
        kind, now = line.get("kind"), float(line["time_seconds"])
        if kind in ("start", "out_of_memory"):
            seconds, start = defaultdict(float), None
        if kind in ("phase", "micro_batch") and start is None:
            start = now
        part = "compute" if kind == "micro_batch" else PARTS.get(str(line.get("name"))) if kind == "phase" else None
        if part is not None and line["event"] == "begin":
            begun[part] = now
        elif part is not None:
            seconds[part] += now - begun.pop(part, now)
        if kind == "step" and start is not None:
            yield int(line["num_samples"]), RankSeconds(**seconds, whole=now - start)
            seconds, start = defaultdict(float), None
