"""A run: the logs of its ranks, and its data for the page."""

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from anybatch.errors import UserError
from anybatch_guide.watch.curve import MIN_BYTES, preview_of
from anybatch_guide.watch.fields import cleaned
from anybatch_guide.watch.lanes import lanes_of
from anybatch_guide.watch.notes import note_of, save_note
from anybatch_guide.watch.rank_log import RankLog, memory_of
from anybatch_guide.watch.repeat import command_of
from anybatch_guide.watch.stability import Stability, has_diverged
from anybatch_guide.watch.verdict import Verdict

LOG_NAME: Final = "events.jsonl"
MAX_RANKS: Final = 64
MAX_RUNS: Final = 32
_RANK: Final = re.compile(r"-rank-(\d{1,6})$")
_RECENT_SECONDS: Final = 10.0


class RunLog:
    """One run; its logs are read while they grow."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.version = 0
        self._logs = {0: RankLog(path)}
        self._cached_preview: dict[str, Any] | None = None
        self._has_preview = False
        self._stability = Stability()

    @property
    def main_log(self) -> RankLog:
        """The log of the first rank, which has the steps."""
        return self._logs[0]

    @property
    def has_unread_bytes(self) -> bool:
        """Whether there is more to read, or to check for spikes."""
        return self._stability.has_unread_steps or any(log.tail.has_unread_bytes for log in self._logs.values())

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

    def read(self, max_bytes: int) -> bool:
        """Read new content, at most the given number of bytes per rank, and return whether anything changed."""
        changed = [log.read(max_bytes) for log in self._logs.values()]
        content = self.main_log.content
        was_unread = self._stability.has_unread_steps
        changed.append(self._stability.read(content.curve, content.num_starts) or was_unread)
        # A read that ends within a very long line counts as a change.
        self.version += any(changed)
        return any(changed)

    def save_note(self, title: str, note: str) -> None:
        """Save a title and a note next to the log, and send them to the pages."""
        save_note(self.path, title, note)
        self.version += 1

    def view(self, verdict: Verdict, clock: Callable[[], float] = time.time) -> dict[str, Any]:
        """Return the data of the run for the page, as valid JSON."""
        content, last = self.main_log.content, self.main_log.content.curve.last
        read, size = self.num_bytes
        logs = self._logs.items()
        problem = next((log.read_error for _, log in logs if log.read_error), None)
        return {
            "name": self.name,
            **note_of(self.path),
            "path": cleaned(str(self.path), 400),
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
                "step": last.step + 1,
                "samples": content.curve.num_samples,
                "seconds": last.seconds,
                "loss": _number(last.loss),
            },
            "speed": self._speed(),
            "stride": content.curve.stride,
            "counts": {"clipped": content.curve.num_clipped, "skipped": content.curve.num_skipped},
            "curves": {name: _counted_from_1(points) for name, points in content.curve.points().items()},
            "spikes": [{**spike, "value": _number(spike["value"])} for spike in self._stability.spikes],
            "num_spikes": self._stability.num_spikes,
            "diverged": has_diverged(content.curve),
            "sketch": _counted_from_1(self._preview()),
            "geometry": list(map(_counted_from_1, content.geometry)),
            "evaluations": [
                {**evaluation, "metrics": {name: _number(value) for name, value in evaluation["metrics"].items()}}
                for evaluation in content.evaluations
            ],
            "checkpoints": list(content.checkpoints),
            "num_diagnoses": sum(log.content.num_diagnoses for _, log in logs),
            "diagnoses": [_counted_from_1(diagnosis) for _, log in sorted(logs) for diagnosis in log.content.diagnoses],
            "memory": [
                _counted_from_1({"rank": rank, **memory}) for rank, log in sorted(logs) if (memory := memory_of(log))
            ],
            "lanes": _counted_from_1(lanes_of({rank: log.content.latest for rank, log in logs})),
            "num_skipped": sum(log.content.num_skipped + log.tail.num_too_long for _, log in logs),
            "verdict": {
                **{name: getattr(verdict, name) for name in ("word", "num_steps", "tolerance", "reasons")},
                "step": None if verdict.step is None else verdict.step + 1,
                "difference": None if verdict.difference is None else min(verdict.difference, 1e300),
            },
            **self.repeat(),
        }

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the run, by name."""
        return dict(self.repeat()["settings"])

    def repeat(self) -> dict[str, Any]:
        """Return the commands and settings of the run. Runs without `run.json` have the settings in their log."""
        repeat = command_of(self.path.with_name("run.json"), self.path.parent)
        return {**repeat, "settings": repeat["settings"] or self.main_log.content.facts.get("decisions", {})}

    def _preview(self) -> dict[str, Any] | None:
        """Return a preview of a long log while most of it is unread."""
        tail = self.main_log.tail
        if tail.size < MIN_BYTES or tail.offset > 0.9 * tail.size:
            self._cached_preview = None
        elif not self._has_preview:
            self._cached_preview, self._has_preview = preview_of(tail.path, tail.size), True
        return self._cached_preview

    def _speed(self) -> float | str | None:
        """Return samples per second over the last `_RECENT_SECONDS`."""
        curve = self.main_log.content.curve
        if len(curve.steps) < 2:  # noqa: PLR2004 (a span has two ends)
            return None
        index = len(curve.steps) - 2
        while index and curve.seconds[-1] - curve.seconds[index] < _RECENT_SECONDS:
            index -= 1
        seconds = curve.seconds[-1] - curve.seconds[index]
        return _number((curve.samples[-1] - curve.samples[index]) / seconds) if seconds > 0 else None


def find_new_runs(paths: list[Path], known: list[RunLog]) -> list[RunLog]:
    """Return the runs that appeared in the folders since the first search, oldest first."""
    known_paths = {run.path for run in known}
    logs = {log: None for path in paths for log in _logs_of(path) if log not in known_paths}
    new = sorted(logs, key=lambda log: log.stat().st_mtime)
    names = _names([*(run.path for run in known), *new])[len(known) :]
    return [RunLog(path, name) for path, name in zip(new, names, strict=True)]


def find_runs(paths: list[Path]) -> list[RunLog]:
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
        name = cleaned(folder_or_file or path.name)
        same = sum(known == name or known.startswith(f"{name} (") for known in names)
        names.append(f"{name} ({same + 1})" if same else name)
    return names


def _number(value: float) -> float | str:
    """Return a finite number unchanged, and another number as its name."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _counted_from_1(view: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a view whose steps are numbered from 1, as the console prints them; logs number them from 0."""
    if view is None or view.get("step") is None:
        return view
    step = view["step"]
    return {**view, "step": [number + 1 for number in step] if isinstance(step, list) else step + 1}


def _escaped(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)
