"""Micro-batch sizes that were measured before, in a file: one line each, never more than a hint."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs

from anybatch.core.size_choice import KnownSize

MOST_LINES = 1000
FILE_NAME = "micro_batch_sizes.jsonl"


class KnownSizes:
    """Remembers which micro-batch size was the fastest under which circumstances, from one process to the next.

    A size is found again only where all circumstances are the same. Whatever is wrong with the file (it is damaged, of
    a later version, may not be read or not be written) makes a size unknown, and nothing else.

    Args:
        path: the file; None for one in the user's cache folder.
        today: returns the date, as 2030-12-31.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        today: Callable[[], str] = lambda: datetime.now(tz=UTC).date().isoformat(),
    ) -> None:
        self.path = Path(platformdirs.user_cache_dir("anybatch", appauthor=False)) / FILE_NAME if path is None else path
        self._today = today

    def find(self, circumstances: Mapping[str, Any]) -> KnownSize | None:
        """Return what was kept last under exactly these circumstances; None for nothing.

        Args:
            circumstances: all that the fastest size depends on; names to plain values.
        """
        wanted = _plain(circumstances)
        for line in reversed(self._lines()):
            known = _known(line, wanted)
            if known is not None:
                return known
        return None

    def keep(self, circumstances: Mapping[str, Any], size: int, samples_per_second: float) -> bool:
        """Keep a size, in the place of what was kept under the same circumstances; return whether that was possible."""
        wanted = _plain(circumstances)
        line = {
            "circumstances": wanted,
            "size": size,
            "samples_per_second": samples_per_second,
            "date": self._today(),
        }
        kept = [other for other in self._lines() if _known(other, wanted) is None][-(MOST_LINES - 1) :]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace("".join(f"{text}\n" for text in (*kept, json.dumps(line, sort_keys=True))))
        except OSError:
            return False
        return True

    def _lines(self) -> list[str]:
        """Return the lines that are whole; what was damaged goes when the file is written again."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        return [line for line in text.splitlines() if _parsed(line) is not None]

    def _replace(self, text: str) -> None:
        """Write the file as a whole or not at all: who reads it meanwhile sees the old one or the new one."""
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise


def _plain(circumstances: Mapping[str, Any]) -> Any:  # noqa: ANN401 (what JSON makes of it)
    """Return circumstances as they come back from a file: tuples are lists there."""
    return json.loads(json.dumps(circumstances))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _known(line: str, wanted: object) -> KnownSize | None:
    """Return the size in a line about these circumstances; None if it is about others, or makes no sense."""
    found = _parsed(line) or {}
    size, rate, date = found.get("size"), found.get("samples_per_second"), found.get("date")
    if found.get("circumstances") != wanted or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return None
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not isinstance(date, str):
        return None
    return KnownSize(size, float(rate), date)
