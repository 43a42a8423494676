"""Names and notes of runs, in `watch.json` next to their logs."""

import errno
import json
from pathlib import Path
from typing import Any, Final

from anybatch_guide.watch.fields import cleaned

MAX_NOTE: Final = 2000
_MAX_TITLE: Final = 80
_MAX_FILE_BYTES: Final = 1 << 20


def note_of(log: Path) -> dict[str, str]:
    """Return the title and the note of a run; empty texts if none are saved."""
    try:
        saved = _read(_file_of(log)).get(log.name)
    except OSError:
        saved = None
    given = saved if isinstance(saved, dict) else {}
    limits = {"title": _MAX_TITLE, "note": MAX_NOTE}
    return {name: cleaned(text, limits[name]) if isinstance(text := given.get(name), str) else "" for name in limits}


def save_note(log: Path, title: str, note: str) -> None:
    """Save the title and the note of a run; replaces the file atomically.

    Raises:
        OSError: the folder cannot be written, or the file is not one of ours and would be lost.
    """
    file = _file_of(log)
    content = {**_read(file), log.name: {"title": cleaned(title, _MAX_TITLE), "note": cleaned(note, MAX_NOTE)}}
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(file)


def _file_of(log: Path) -> Path:
    return log.with_name("watch.json")


def _read(file: Path) -> dict[str, Any]:
    """Return the content of the file; empty if it does not exist."""
    if not file.exists():
        return {}
    try:
        if file.stat().st_size <= _MAX_FILE_BYTES and isinstance(content := json.loads(file.read_bytes()), dict):
            return content
    except (ValueError, RecursionError):
        pass
    raise OSError(errno.EINVAL, f"{file} has no notes; move it away")
