"""A run: the logs of its ranks, and its data for the page."""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from anybatch.errors import UserError
from anybatch_guide.watch.curve import MIN_BYTES, sketched
from anybatch_guide.watch.fields import shown
from anybatch_guide.watch.lanes import lanes_of
from anybatch_guide.watch.rank_log import RankLog, memory_of
from anybatch_guide.watch.repeat import command_of
from anybatch_guide.watch.verdict import Verdict

LOG_NAME: Final = "events.jsonl"
MAX_RANKS: Final = 64
MAX_RUNS: Final = 32
_RANK: Final = re.compile(r"-rank-(\d{1,6})$")
_RECENT_SECONDS: Final = 10.0


class RunLog:
    """One run, read as it grows."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.version = 0
        self._logs = {0: RankLog(path)}
        self._sketch: dict[str, Any] | None = None
        self._is_sketched = False

    @property
    def lead(self) -> RankLog:
        """The log with the steps."""
        return self._logs[0]

    @property
    def has_unread_bytes(self) -> bool:
        """Whether there is more to read."""
        return any(log.tail.has_unread_bytes for log in self._logs.values())

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes read, and total bytes."""
        tails = [log.tail for log in self._logs.values()]
        return sum(tail.offset for tail in tails), sum(tail.size for tail in tails)

    def find_ranks(self) -> None:
        """Find new logs of other ranks next to the first one."""
        for log in sorted(self.path.parent.glob(f"{_escaped(self.path.stem)}-rank-*{self.path.suffix}")):
            match = _RANK.search(log.stem)
            if match and len(self._logs) < MAX_RANKS:
                self._logs.setdefault(int(match.group(1)), RankLog(log))

    def read(self, most_bytes: int) -> bool:
        """Read new content, at most the given number of bytes per rank, and return whether anything changed."""
        changed = [log.read(most_bytes) for log in self._logs.values()]
        # A pass that ends within a very long line counts as progress.
        self.version += any(changed)
        return any(changed)

    def view(self, verdict: Verdict, clock: Callable[[], float] = time.time) -> dict[str, Any]:
        """Return the data of the run for the page, as valid JSON."""
        content, last = self.lead.content, self.lead.content.curve.last
        read, size = self.num_bytes
        logs = self._logs.items()
        problem = next((log.trouble for _, log in logs if log.trouble), None)
        return {
            "name": self.name,
            "path": shown(str(self.path), 400),
            "state": content.end["status"] if content.end else ("open" if self.version else "unread"),
            "message": content.end["message"] if content.end else problem,
            "written": round(max(log.tail.written_seconds for _, log in logs), 1),
            "looked": round(clock(), 1),
            "read": read,
            "size": size,
            "facts": content.facts,
            "num_logs": len(self._logs),
            "last": None
            if last is None
            else {
                "step": last.step,
                "samples": content.curve.num_samples,
                "seconds": last.seconds,
                "loss": _number(last.loss),
            },
            "speed": self._speed(),
            "stride": content.curve.stride,
            "counts": {"clipped": content.curve.num_clipped, "skipped": content.curve.num_skipped},
            "curves": content.curve.points(),
            "sketch": self._sketched(),
            "geometry": list(content.geometry),
            "evaluations": [
                {**evaluation, "metrics": {name: _number(value) for name, value in evaluation["metrics"].items()}}
                for evaluation in content.evaluations
            ],
            "checkpoints": list(content.checkpoints),
            "num_diagnoses": sum(log.content.num_diagnoses for _, log in logs),
            "diagnoses": [evaluation for _, log in sorted(logs) for evaluation in log.content.diagnoses],
            "memory": [{"rank": rank, **memory} for rank, log in sorted(logs) if (memory := memory_of(log))],
            "lanes": lanes_of({rank: log.content.latest for rank, log in logs}),
            "num_skipped": sum(log.content.num_skipped + log.tail.num_too_long for _, log in logs),
            "verdict": {
                **{name: getattr(verdict, name) for name in ("word", "step", "num_steps", "tolerance", "reasons")},
                "difference": None if verdict.difference is None else min(verdict.difference, 1e300),
            },
            **command_of(self.path.with_name("run.json"), self.path.parent),
        }

    def _sketched(self) -> dict[str, Any] | None:
        """Return a preview of a long log while most of it is unread."""
        tail = self.lead.tail
        if tail.size < MIN_BYTES or tail.offset > 0.9 * tail.size:
            self._sketch = None
        elif not self._is_sketched:
            self._sketch, self._is_sketched = sketched(tail.path, tail.size), True
        return self._sketch

    def _speed(self) -> float | str | None:
        """Return samples per second of the last seconds."""
        curve = self.lead.content.curve
        if len(curve.steps) < 2:  # noqa: PLR2004 (a span has two ends)
            return None
        at = len(curve.steps) - 2
        while at and curve.seconds[-1] - curve.seconds[at] < _RECENT_SECONDS:
            at -= 1
        seconds = curve.seconds[-1] - curve.seconds[at]
        return _number((curve.samples[-1] - curve.samples[at]) / seconds) if seconds > 0 else None


def found_runs(paths: list[Path]) -> list[RunLog]:
    """Return the runs of the given paths: logs, folders of runs, or folders of such folders (newest run first)."""
    logs: dict[Path, None] = {}
    for path in paths:
        path_logs = list(_logs_of(path))
        if not path_logs:
            message = f"{path} is not a log, a run's folder, or a folder of runs: {LOG_NAME} is missing."
            raise UserError(message)
        logs.update(dict.fromkeys(path_logs))
    return [RunLog(path, name) for path, name in zip(logs, _names(list(logs)), strict=True)]


def _logs_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif (path / LOG_NAME).is_file():
        yield path / LOG_NAME
    elif path.is_dir():
        yield from sorted(path.glob(f"*/{LOG_NAME}"), key=lambda log: -log.stat().st_mtime)


def _names(paths: list[Path]) -> list[str]:
    """Return a unique name for each log: its folder, or its file if that is more specific."""
    names: list[str] = []
    for path in paths:
        folder_or_file = path.resolve().parent.name if path.name == LOG_NAME else path.name
        name = shown(folder_or_file or path.name)
        same = sum(known == name or known.startswith(f"{name} (") for known in names)
        names.append(f"{name} ({same + 1})" if same else name)
    return names


def _number(value: float) -> float | str:
    """Return a finite number, or its name as a string."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _escaped(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)
