"""A cache file with the fastest micro-batch sizes, one line each."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anybatch.core.size_choice import KnownSize
from anybatch.planner.cache.cache_file import JsonLinesFile, JsonObject, cache_file, plain

FILE_NAME = "micro_batch_sizes.jsonl"
MOST_RATE = 1e18


class KnownSizes:
    """Stores the fastest micro-batch size for given circumstances in a file, to use it in later processes.

    A size is used only if all circumstances are the same. If the file is damaged, written by a later version, or not
    readable or writable, the size counts as unknown.

    Args:
        path: the file; None for one in the user's cache folder.
        today: returns the date, such as 2030-12-31.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        today: Callable[[], str] = lambda: datetime.now(tz=UTC).date().isoformat(),
    ) -> None:
        self._lines = JsonLinesFile(cache_file(FILE_NAME) if path is None else path)
        self._today = today

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return the latest size for exactly these circumstances; None if there is no such size.

        Args:
            circumstances: everything that the fastest size depends on; names to plain values.
        """
        wanted = plain(circumstances)
        # The newest lines are at the end of the file.
        for line in reversed(self._lines.read()):
            known = _known(line, wanted)
            if known is not None:
                return known
        return None

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Store a size, replacing the one for the same circumstances; return whether that succeeded.

        Args:
            circumstances: everything that the fastest size depends on; names to plain values.
            size: samples of a micro-batch.
            samples_per_second: measured at that size.
        """
        wanted = plain(circumstances)
        line = {
            "circumstances": wanted,
            "size": size,
            "samples_per_second": samples_per_second,
            "date": self._today(),
        }
        kept = [other for other in self._lines.read() if _known(other, wanted) is None]
        return self._lines.write([*kept, line])


def _known(line: JsonObject, wanted: object) -> KnownSize | None:
    """Return the size in a line; None if the line is for other circumstances, or invalid."""
    size, rate, date = line.get("size"), line.get("samples_per_second"), line.get("date")
    if line.get("circumstances") != wanted or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return None
    # A file is untrusted: `true` is an int for Python, and JSON can hold NaN, which fails this comparison too.
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < MOST_RATE:
        return None
    if not isinstance(date, str):
        return None
    return KnownSize(size, float(rate), date)
