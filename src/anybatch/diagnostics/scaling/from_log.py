"""Where the steps of a finished run went, from the logs of its ranks."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anybatch.core.units import in_bytes
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import JsonLine, read_jsonl

_WORTH = 0.1
_FIRST_STEPS = 1
_SMALL_MESSAGE, _MANY = 2**18, 4


@dataclass(slots=True)
class LoggedStep:
    """The seconds of one step of one rank, as its log tells them: on the host.

    Attributes:
        parts: load, compute, reduce and update to seconds.
        whole: from its first record to its last.
        message_bytes: of each collective that carried gradients.
    """

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("load", "compute", "reduce", "update"), 0.0))
    whole: float = 0.0
    message_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """The parts of a step of a finished run: medians over its steps. `print(report)` shows it.

    Attributes:
        num_ranks: of the run.
        num_logs: ranks whose logs were found.
        num_steps: that were looked at.
        step: seconds of a step, on the slowest rank.
        waiting: for data, on the rank that waits longest, copies included.
        compute: forwards and backwards, the mean of the ranks.
        communication: what the last rank to arrive still waits for sums; with one log an upper bound.
        stragglers: what the mean rank waits longer for sums than the last one to arrive; None with one log.
        update: the mean of the ranks.
        num_messages: collectives that carried gradients, in a step.
        message_bytes: of their mean.
    """

    num_ranks: int
    num_logs: int
    num_steps: int
    step: float
    waiting: float
    compute: float
    communication: float
    stragglers: float | None
    update: float
    num_messages: int
    message_bytes: float

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
        """The part other than compute that takes most, if it takes a tenth; empty if there is none."""
        others = {name: share for name, share in self.shares.items() if name != "compute"}
        name = max(others, key=lambda one: others[one])
        return name if others[name] >= _WORTH else ""

    def __str__(self) -> str:
        """Return the table and the verdict."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        lines = [f"{self.num_steps} steps, {ranks}, the logs of {self.num_logs}", ""]
        lines += [f"  {name:<38}{share * self.step * 1e3:>9.1f} ms{share:>7.0%}" for name, share in self.shares.items()]
        lines.append(f"  {'whole step':<38}{self.step * 1e3:>9.1f} ms")
        lines += ["", f"bottleneck: {self.bottleneck}. {self._change()}" if self.bottleneck else "no bottleneck in it."]
        if self.num_logs < self.num_ranks:
            lines.append("Without the logs of all ranks, waiting for a straggler counts as communication.")
        return "\n".join(lines)

    def _change(self) -> str:
        messages = f"{self.num_messages} messages of {in_bytes(self.message_bytes)} a step"
        few = self.num_messages >= _MANY and self.message_bytes < _SMALL_MESSAGE
        return {
            "waiting for data": "More workers that load, or samples that are cheaper to load.",
            "communication after the last backward": f"{messages}: "
            + ("larger buckets." if few else "other buckets, compression, or a larger effective batch."),
            "stragglers": "Look at the host of the rank whose compute takes longest.",
            "update": 'strategy="zero1", or a larger effective batch.',
        }[self.bottleneck]


def read_steps(path: str | os.PathLike[str]) -> LogReport:
    """Read where the steps of a run went, from rank 0's log and those of other ranks beside it.

    A log has times of the host: on an accelerator, work that runs behind it shows where the host waits for it. The run
    without reduction that `measure_scaling` makes is missing, so only what comes after the last backward counts as
    communication.

    Args:
        path: `events.jsonl`, or the folder of a run.

    Raises:
        UserError: there are not two steps in it.
        OSError: the log cannot be opened.
    """
    first, *others = rank_logs(path)
    ranks = [steps for log in (first, *others) if (steps := dict(_steps_of(log)))]
    common = sorted(set.intersection(*map(set, ranks)) if ranks else ())[_FIRST_STEPS:]
    if not common:
        message = f"{first} holds fewer than two whole steps; a log of a longer run is needed."
        raise UserError(message)
    per_rank = [[steps[number] for number in common] for steps in ranks]
    reduces = [[step.parts["reduce"] for step in steps] for steps in zip(*per_rank, strict=True)]
    last = statistics.median(map(min, reduces))
    messages = per_rank[0][-1].message_bytes
    return LogReport(
        num_ranks=_num_ranks(first),
        num_logs=len(ranks),
        num_steps=len(common),
        step=statistics.median(max(step.whole for step in steps) for steps in zip(*per_rank, strict=True)),
        waiting=max(_median(steps, "load") for steps in per_rank),
        compute=statistics.fmean(_median(steps, "compute") for steps in per_rank),
        communication=last,
        stragglers=None if len(ranks) == 1 else statistics.median(map(statistics.fmean, reduces)) - last,
        update=statistics.fmean(_median(steps, "update") for steps in per_rank),
        num_messages=len(messages),
        message_bytes=statistics.fmean(messages) if messages else 0.0,
    )


def _steps_of(path: Path) -> Iterator[tuple[int, LoggedStep]]:
    """Yield each step that was finished, with its number; of a step that was made again, the last one counts."""
    step, begun = LoggedStep(), dict[str, float]()
    start: float | None = None
    for line in read_jsonl(path):
        kind, now = line.get("kind"), float(line["time_seconds"])
        if kind in ("start", "out_of_memory"):
            step, start = LoggedStep(), None
        if kind in ("phase", "micro_batch") and start is None:
            start = now
        if kind == "reduction" and line["event"] == "begin" and line["payload"] == "gradients":
            step.message_bytes.append(int(line["num_bytes"]))
        part = _part_of(line)
        if part is not None and line["event"] == "begin":
            begun[part] = now
        elif part is not None:
            step.parts[part] += now - begun.pop(part, now)
        if kind == "step" and start is not None:
            step.whole = now - start
            yield int(line["step"]), step
            step, start = LoggedStep(), None


def _part_of(line: JsonLine) -> str | None:
    if line.get("kind") == "micro_batch":
        return "compute"
    names: Mapping[str, str] = {"load": "load", "reduce": "reduce", "clip": "update", "update": "update"}
    return names.get(str(line.get("name"))) if line.get("kind") == "phase" else None


def _num_ranks(path: Path) -> int:
    return next((int(line["world_size"]) for line in read_jsonl(path) if line.get("kind") == "start"), 1)


def _median(steps: Sequence[LoggedStep], part: str) -> float:
    return statistics.median(step.parts[part] for step in steps)
