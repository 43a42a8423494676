"""The command that repeats a run, from the settings in its folder."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from anybatch.core.run_config import RunConfig

MAX_HEADER_BYTES: Final = 1 << 20
_OPTIONS: Final = tuple(field.name for field in dataclasses.fields(RunConfig))
_MAX_WORD: Final = 400


def command_of(header: Path, rank_logs_beside: Path) -> dict[str, Any]:
    """Return the commands that repeat and resume a run; None if they are unknown.

    Unprintable values, and values that look like options, give no command, because users paste it into a terminal.
    """
    nothing: dict[str, Any] = {"command": None, "resume": None, "changes": 0}
    try:
        if not header.is_file() or header.stat().st_size > MAX_HEADER_BYTES:
            return nothing
        run = json.loads(header.read_text(encoding="utf-8"))
        origin, stretches = run["origin"], run["stretches"]
        words = _words(origin, stretches[-1]["settings"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
        return nothing
    folder = str(rank_logs_beside)
    resume = ["anybatch", "train", "--resume", "--out", folder]
    return {
        "command": None if words is None else shlex.join(["anybatch", "train", *words]),
        "resume": shlex.join(resume) if _is_word(folder) else None,
        "changes": min(len(stretches) - 1, MAX_HEADER_BYTES),
    }


def _words(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str] | None:
    recipe = origin.get("recipe", "digits")
    words = [recipe]
    given = {"ranks": origin.get("ranks"), **{name: settings.get(name) for name in _OPTIONS}}
    if given["ranks"] == "auto":
        given["ranks"] = None
    if given["strategy"] == "auto":
        given["strategy"] = None
    if given["accumulation_steps"] is not None or given["micro_batch_tokens"] is not None:
        given["micro_batch_size"] = None
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    values = [recipe, *(value for value in given.values() if value is not None)]
    are_plain = all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values)
    return words if are_plain and all(map(_is_word, map(str, values))) else None


def _is_word(word: str) -> bool:
    return 0 < len(word) <= _MAX_WORD and word.isprintable() and not word.startswith("-")
