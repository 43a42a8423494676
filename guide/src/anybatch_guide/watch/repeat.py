"""The command that repeats a run, from the settings in its folder."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from anybatch.core.run_config import RunConfig
from anybatch_guide.watch.fields import cleaned

MAX_HEADER_BYTES: Final = 1 << 20
_OPTIONS: Final = tuple(field.name for field in dataclasses.fields(RunConfig))
_MAX_ARGUMENT: Final = 400
MAX_SETTINGS: Final = 100
_MAX_PRINTED: Final = 1e18


def command_of(header: Path, run_folder: Path) -> dict[str, Any]:
    """Return the commands that repeat and resume a run (None if they are unknown), and its settings.

    If a value is unprintable or looks like an option, no command is returned, because users paste it into a terminal.
    """
    unknown: dict[str, Any] = {"command": None, "resume": None, "changes": 0, "settings": {}}
    try:
        if not header.is_file() or header.stat().st_size > MAX_HEADER_BYTES:
            return unknown
        run = json.loads(header.read_text(encoding="utf-8"))
        origin, stretches = run["origin"], run["stretches"]
        arguments = _arguments(origin, stretches[-1]["settings"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
        return unknown
    folder = str(run_folder)
    resume = ["anybatch", "train", "--resume", "--out", folder]
    return {
        "command": None if arguments is None else shlex.join(["anybatch", "train", *arguments]),
        "resume": shlex.join(resume) if _is_safe_argument(folder) else None,
        "settings": _settings(origin, stretches[-1]["settings"]),
        "changes": min(len(stretches) - 1, MAX_HEADER_BYTES),
    }


def _settings(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are given, as short texts."""
    given = {"recipe": origin.get("recipe"), "ranks": origin.get("ranks"), **settings}
    shown = (
        (name, value) for name, value in list(given.items())[:MAX_SETTINGS] if isinstance(value, str | int | float)
    )
    return {cleaned(name): cleaned(value if isinstance(value, str) else _printed(value)) for name, value in shown}


def _printed(value: float) -> str:
    return str(value) if abs(value) < _MAX_PRINTED else "large"


def _arguments(origin: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str] | None:
    recipe = origin.get("recipe", "digits")
    arguments = [recipe]
    given = {"ranks": origin.get("ranks"), **{name: settings.get(name) for name in _OPTIONS}}
    if given["ranks"] == "auto":
        given["ranks"] = None
    if given["strategy"] == "auto":
        given["strategy"] = None
    if given["accumulation_steps"] is not None or given["micro_batch_tokens"] is not None:
        given["micro_batch_size"] = None
    for name, value in given.items():
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    values = [recipe, *(value for value in given.values() if value is not None)]
    are_plain = all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values)
    return arguments if are_plain and all(map(_is_safe_argument, map(str, values))) else None


def _is_safe_argument(argument: str) -> bool:
    return 0 < len(argument) <= _MAX_ARGUMENT and argument.isprintable() and not argument.startswith("-")
