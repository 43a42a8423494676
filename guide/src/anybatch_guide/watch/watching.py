"""All watched runs: read interleaved, and returned as JSON for the stream or a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from anybatch_guide.watch.run_log import MAX_RUNS, RunLog, found_runs
from anybatch_guide.watch.verdict import Verdict, compare

SLICE_BYTES: Final = 4 * 2**20
_SLICES_BETWEEN: Final = 6


class Watching:
    """The watched runs; the first is the reference for the others."""

    def __init__(self, paths: list[Path]) -> None:
        runs = found_runs(paths)
        self.runs: list[RunLog] = runs[:MAX_RUNS]
        self.num_left_out = len(runs) - len(self.runs)
        self._judged: dict[int, tuple[int, int]] = {}
        self._told: dict[int, tuple[int, Verdict]] = {}
        self._num_looks = 0

    @property
    def has_unread_bytes(self) -> bool:
        """Whether some run has more to read."""
        return any(run.has_unread_bytes for run in self.runs)

    def look(self, num_slices: int = _SLICES_BETWEEN) -> dict[int, str]:
        """Read more of every run, and return the data of changed runs, as JSON by index."""
        if self._num_looks % 8 == 0:
            for run in self.runs:
                run.find_ranks()
        # The first data is returned after one slice each.
        for _ in range(num_slices if self._num_looks else 1):
            grown = [run.read(SLICE_BYTES) for run in self.runs]  # read all: any() would stop at the first
            if not any(grown) or not self.has_unread_bytes:
                break
        self._num_looks += 1
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
        for at, run in enumerate(self.runs):
            # While the reference grows, only the verdict of a finished run may change.
            if self._judged.get(at) == (run.version, reference):
                continue
            self._judged[at] = (run.version, reference)
            verdict = self._verdict(run)
            if self._told.get(at) != (run.version, verdict):
                self._told[at] = (run.version, verdict)
                yield at, encoded(run.view(verdict))

    def _verdict(self, run: RunLog) -> Verdict:
        reference = self.runs[0]
        if run is reference:
            return Verdict(word="reference")
        content, other = reference.lead.content, run.lead.content
        return compare(content.facts, content.curve, other.facts, other.curve)


def encoded(view: object) -> str:
    """Return a view as strict JSON."""
    return json.dumps(view, allow_nan=False, separators=(",", ":"))
