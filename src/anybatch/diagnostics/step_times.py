"""The seconds of a step by part, from the records of its phases or from the logs of a finished run."""

import contextlib
import os
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
from anybatch.core.units import in_bytes
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import JsonLine, read_jsonl

Clock = Callable[[], float]
PARTS: Mapping[str, str] = MappingProxyType({"load": "load", "reduce": "reduce", "clip": "update", "update": "update"})
"""The part of a step that each phase belongs to; micro-batches are "compute"."""
_SCHEDULER = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """One step of one rank."""

    load: float = 0.0  # waiting for the next micro-batch, with copies to the device
    compute: float = 0.0
    reduce: float = 0.0  # from the end of the last backward until all sums are there
    update: float = 0.0  # with clipping
    whole: float = 0.0
    queued: float = 0.0  # ready, without a core; 0 if not reported
    num_samples: int = 0
    num_messages: int = 0  # collectives that carried gradients
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
    """Times the parts of a step; `waits` adds the device's work to its part, which takes overlap away."""

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


_WORTH = 0.1
_FIRST_STEPS = 1
_SMALL_MESSAGE, _MANY = 2**18, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """The parts of a step of a finished run: medians over its steps. `print(report)` shows it."""

    num_ranks: int
    num_logs: int  # ranks with a log
    num_steps: int
    step: float  # slowest rank
    waiting: float  # for data, slowest rank, with copies
    compute: float  # mean over ranks
    communication: float  # of the last rank to arrive; with one log an upper bound
    stragglers: float | None  # extra wait of the mean rank; None with one log
    update: float  # mean over ranks
    num_messages: int  # gradient collectives per step
    message_bytes: float  # mean size

    @property
    def shares(self) -> dict[str, float]:
        """Return part to its share of a step."""
        parts = {
            "waiting for data": self.waiting,
            "compute": self.compute,
            "communication after the last backward": self.communication,
            "stragglers": self.stragglers or 0.0,
            "update": self.update,
        }
        return {name: seconds / self.step for name, seconds in parts.items()}

    @property
    def bottleneck(self) -> str:
        """The part other than compute that takes most, if it takes a tenth; else empty."""
        others = {name: share for name, share in self.shares.items() if name != "compute"}
        name = max(others, key=lambda one: others[one])
        return name if others[name] >= _WORTH else ""

    def __str__(self) -> str:
        """Return the table and the verdict."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        lines = [f"{self.num_steps} steps, {ranks}, the logs of {self.num_logs}", ""]
        lines += [f"  {name:<38}{share * self.step * 1e3:>9.1f} ms{share:>7.0%}" for name, share in self.shares.items()]
        lines.append(f"  {'whole step':<38}{self.step * 1e3:>9.1f} ms")
        lines += ["", f"bottleneck: {self.bottleneck}. {self._change()}" if self.bottleneck else "no bottleneck."]
        if self.num_logs < self.num_ranks:
            lines.append("Without the logs of all ranks, waiting for a straggler counts as communication.")
        return "\n".join(lines)

    def _change(self) -> str:
        messages = f"{self.num_messages} messages of {in_bytes(self.message_bytes)} a step"
        few = self.num_messages >= _MANY and self.message_bytes < _SMALL_MESSAGE
        return {
            "waiting for data": "Use more loading workers, or make samples cheaper to load.",
            "communication after the last backward": f"{messages}: "
            + ("use larger buckets." if few else "use other buckets, compression, or a larger effective batch."),
            "stragglers": "Check the host of the rank with the longest compute time.",
            "update": 'Use strategy="zero1", or a larger effective batch.',
        }[self.bottleneck]


def read_steps(path: str | os.PathLike[str]) -> LogReport:
    """Read the parts of a run's steps from rank 0's log and the other ranks' logs next to it.

    A log has host times: on an accelerator, asynchronous work shows up where the host waits for it. The run
    without reduction that `measure_scaling` makes is missing, so only what comes after the last backward counts as
    communication.
    """
    first, *others = rank_logs(path)
    ranks = [steps for log in (first, *others) if (steps := dict(_steps_of(log)))]
    common = sorted(set.intersection(*map(set, ranks)) if ranks else ())[_FIRST_STEPS:]
    if not common:
        message = f"{first} has fewer than two complete steps; use the log of a longer run."
        raise UserError(message, code="too_few_steps")
    per_rank = [[steps[number] for number in common] for steps in ranks]
    reduces = [[step.reduce for step in steps] for steps in zip(*per_rank, strict=True)]
    last = statistics.median(map(min, reduces))
    example = per_rank[0][-1]
    return LogReport(
        num_ranks=_num_ranks(first),
        num_logs=len(ranks),
        num_steps=len(common),
        step=statistics.median(slowest(per_rank)),
        waiting=max(median_of(steps, "load") for steps in per_rank),
        compute=statistics.fmean(median_of(steps, "compute") for steps in per_rank),
        communication=last,
        stragglers=None if len(ranks) == 1 else statistics.median(map(statistics.fmean, reduces)) - last,
        update=statistics.fmean(median_of(steps, "update") for steps in per_rank),
        num_messages=example.num_messages,
        message_bytes=example.message_bytes / max(1, example.num_messages),
    )


def _steps_of(path: Path) -> Iterator[tuple[int, RankSeconds]]:
    """Yield the host seconds of each finished step with its number; for a repeated step, the last one."""
    seconds, messages, begun = defaultdict[str, Any](float), list[int](), dict[str, float]()
    start: float | None = None
    for line in read_jsonl(path):
        kind, now = line.get("kind"), float(line["time_seconds"])
        if kind in ("start", "out_of_memory"):
            seconds, messages, start = defaultdict(float), [], None
        if kind in ("phase", "micro_batch") and start is None:
            start = now
        if kind == "reduction" and line["event"] == "begin" and line["payload"] == "gradients":
            messages.append(int(line["num_bytes"]))
        part = _part_of(line)
        if part is not None and line["event"] == "begin":
            begun[part] = now
        elif part is not None:
            seconds[part] += now - begun.pop(part, now)
        if kind == "step" and start is not None:
            sent = {"num_messages": len(messages), "message_bytes": sum(messages)}
            yield int(line["step"]), RankSeconds(**seconds, **sent, whole=now - start)
            seconds, messages, start = defaultdict(float), [], None


def _part_of(line: JsonLine) -> str | None:
    if line.get("kind") == "micro_batch":
        return "compute"
    return PARTS.get(str(line.get("name"))) if line.get("kind") == "phase" else None


def _num_ranks(path: Path) -> int:
    return next((int(line["world_size"]) for line in read_jsonl(path) if line.get("kind") == "start"), 1)
