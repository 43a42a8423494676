"""`WatchedRuns`: reads the logs of all runs in turn, and returns their data as JSON for the stream or a file."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from anybatch_guide.watch.run_log import MAX_RUNS, RunLog, find_new_runs, find_runs
from anybatch_guide.watch.verdict import Verdict, compare, different_settings

SLICE_BYTES: Final = 4 * 2**20
_SLICES_PER_UPDATE: Final = 6


class WatchedRuns:
    """The watched runs; all runs are compared with the first."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        runs = find_runs(paths)
        self.runs: list[RunLog] = runs[:MAX_RUNS]
        self.num_left_out = len(runs) - len(self.runs)
        self._compared_versions: dict[int, tuple[int, int]] = {}
        self._sent_verdicts: dict[int, tuple[int, Verdict]] = {}
        self._num_reads = 0

    @property
    def has_unread_bytes(self) -> bool:
        """Whether some run has more to read."""
        return any(run.has_unread_bytes for run in self.runs)

    def read_changes(self, num_slices: int = _SLICES_PER_UPDATE) -> dict[int, str]:
        """Read more of every run, and return the data of changed runs, as JSON by index."""
        if self._num_reads % 8 == 0:
            with contextlib.suppress(OSError):  # a run was deleted during the search
                new_runs = find_new_runs(self._paths, self.runs) if len(self.runs) < MAX_RUNS else []
                self.runs += new_runs[: MAX_RUNS - len(self.runs)]
            for run in self.runs:
                run.find_ranks()
        # The first call returns after one slice of each run, so that the page shows data soon.
        for _ in range(num_slices if self._num_reads else 1):
            has_grown = [run.read(SLICE_BYTES) for run in self.runs]  # read all: any() would stop at the first
            if not any(has_grown) or not self.has_unread_bytes:
                break
        self._num_reads += 1
        return dict(self._changed())

    def read_all(self) -> list[dict[str, Any]]:
        """Read the runs to their current end, and return their data."""
        for run in self.runs:
            run.find_ranks()
            while run.read(SLICE_BYTES) and run.has_unread_bytes:
                pass
        return [run.view(self._verdict(run)) for run in self.runs]

    def _changed(self) -> Iterator[tuple[int, str]]:
        reference = self.runs[0].version
        for index, run in enumerate(self.runs):
            # While the reference grows, only the verdict of a finished run may change.
            if self._compared_versions.get(index) == (run.version, reference):
                continue
            self._compared_versions[index] = (run.version, reference)
            verdict = self._verdict(run)
            if self._sent_verdicts.get(index) != (run.version, verdict):
                self._sent_verdicts[index] = (run.version, verdict)
                yield index, encoded(run.view(verdict))

    def _verdict(self, run: RunLog) -> Verdict:
        reference = self.runs[0]
        if run is reference:
            return Verdict(word="reference")
        content, other = reference.main_log.content, run.main_log.content
        return compare(
            content.facts, content.curve, other.facts, other.curve, different_settings(reference.settings, run.settings)
        )


def encoded(view: object) -> str:
    """Return a view as strict JSON."""
    return json.dumps(view, allow_nan=False, separators=(",", ":"))
