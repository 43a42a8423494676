"""Recordings: the result of an experiment as one line of JSON, with its device and its command."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from anybatch.errors import UserError
from anybatch_guide.catalogue import experiments
from anybatch_guide.experiment import Data, Experiment, Provenance, provenance_here

_CLONE: Final = Path(__file__).parents[3]


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the given names of experiments, or all names if none are given; raise `UserError` for unknown names."""
    known = experiments()
    for name in names:
        if name not in known:
            message = f"unknown experiment {name!r}; choose from {', '.join(known)}."
            raise UserError(message)
    return tuple(names) or tuple(known)


def record(name: str, folder: Path) -> Path:
    """Run an experiment on one thread, write its result, and return the file."""
    return write_recording(recorded(experiments()[checked_names([name])[0]]), folder)


def record_in_subprocess(name: str, folder: Path) -> Path:
    """Record an experiment in a new process, so that earlier recordings have no effect; return the file."""
    command = [sys.executable, "-m", "anybatch", "guide", "record", name, "--to", str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 (our own program)
    if done.returncode:
        message = f"recording {name} failed: its process exited with status {done.returncode}."
        raise UserError(message)
    return folder / f"{name}.json"


def recorded(experiment: Experiment) -> dict[str, Any]:
    """Run an experiment on one thread, so that the number of threads has no effect, and return the recording."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = experiment.run(lambda _line: None)
        provenance = provenance_here(experiment.name, packages=experiment.packages, commit=commit_here())
        return as_recording(experiment, data, provenance)
    finally:
        torch.set_num_threads(threads)


def as_recording(experiment: Experiment, data: Data, provenance: Provenance) -> dict[str, Any]:
    """Return the data of an experiment with its provenance as a JSON object, for a file or for the page."""
    made = asdict(provenance)
    return {"name": experiment.name, "question": experiment.question, "made": made, "data": plain(data)}


def write_recording(recording: Mapping[str, Any], folder: Path) -> Path:
    """Write a recording as one line of JSON, replacing an older file; return the file."""
    file = folder / f"{recording['name']}.json"
    text = json.dumps(recording, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    file.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return file


def plain(value: object) -> Any:  # noqa: ANN401 (JSON is)
    """Return a value as JSON types, with NaN and infinities as strings, as in a run's log."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    message = f"{type(value).__name__} {value!r} cannot be written as JSON."
    raise TypeError(message)


def commit_here() -> str | None:
    """Return the commit of this code, with "+" for changed sources; None outside a clone."""
    if not (_CLONE / ".git").exists():
        return None
    commit = _git("rev-parse", "--short=12", "HEAD")
    # Ignore the built page, because no number depends on it.
    changed = _git("status", "--porcelain", "--", "src", "guide/src", ":(exclude)guide/src/anybatch_guide/dist")
    return None if commit is None or changed is None else f"{commit}+" if changed else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_CLONE, capture_output=True, text=True, check=False)  # noqa: S603, S607 (fixed arguments; the user's git)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
