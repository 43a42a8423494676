"""All runs that are watched: read in turns, and told as texts that are sent, or stand in a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from anybatch_guide.watch.run_log import MOST_RUNS, RunLog, found_runs
from anybatch_guide.watch.verdict import Verdict, compare

SLICE_BYTES: Final = 4 * 2**20
_SLICES_BETWEEN: Final = 6


class Watching:
    """The runs that are watched, the first as the reference of all others.

    Args:
        paths: that were named.

    Attributes:
        runs: in their order.
        num_left_out: runs that were named, and are more than are shown.

    Raises:
        UserError: one of the paths is no run.
    """

    def __init__(self, paths: list[Path]) -> None:
        found = found_runs(paths)
        self.runs: list[RunLog] = found[:MOST_RUNS]
        self.num_left_out = len(found) - len(self.runs)
        self._judged: dict[int, tuple[int, int]] = {}
        self._told: dict[int, tuple[int, Verdict]] = {}
        self._num_looks = 0

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read of some run."""
        return any(run.is_behind for run in self.runs)

    def look(self, num_slices: int = _SLICES_BETWEEN) -> dict[int, str]:
        """Read on in every run, and return what the page shows of those that have changed, as JSON by their number.

        Args:
            num_slices: most pieces of each log that are read before anything is told.
        """
        if self._num_looks % 8 == 0:
            for run in self.runs:
                run.find_ranks()
        # The first pictures come after one slice each.
        for _ in range(num_slices if self._num_looks else 1):
            grown = [run.read(SLICE_BYTES) for run in self.runs]  # all of them: any() would stop at the first
            if not any(grown) or not self.is_behind:
                break
        self._num_looks += 1
        return dict(self._changed())

    def read_all(self) -> list[dict[str, Any]]:
        """Read the runs to where they end now, and return what the page shows."""
        for run in self.runs:
            run.find_ranks()
            while run.read(SLICE_BYTES) and run.is_behind:
                pass
        return [run.view(self._verdict(run)) for run in self.runs]

    def _changed(self) -> Iterator[tuple[int, str]]:
        reference = self.runs[0].version
        for at, run in enumerate(self.runs):
            # While the reference grows, the verdict of a run that is over may change, and nothing else of it.
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
        told, other = reference.lead.told, run.lead.told
        return compare(told.facts, told.curve, other.facts, other.curve)


def encoded(view: object) -> str:
    """Return a view as JSON without anything that JSON lacks."""
    return json.dumps(view, allow_nan=False, separators=(",", ":"))
