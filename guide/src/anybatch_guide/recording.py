"""Recordings: the result of an experiment as one line of JSON, with its device and its command."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from anybatch.errors import UserError
from anybatch_guide.catalogue import experiments
from anybatch_guide.catalogue import names as all_names
from anybatch_guide.experiment import Data, Experiment, Provenance, made_here

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
MAX_FILE_BYTES: Final = 4 * 2**20
_CLONE: Final = Path(__file__).parents[3]
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Data with its provenance."""

    name: str  # name of the experiment
    question: str  # the question it answers
    made: Provenance  # where and when it was computed
    data: Data  # the result, as decoded from JSON

    def as_json(self) -> dict[str, Any]:
        """Return the recording as a JSON object."""
        return {"name": self.name, "question": self.question, "made": asdict(self.made), "data": self.data}


def known(names: Sequence[str]) -> tuple[str, ...]:
    """Return the given names of experiments, or all names if none are given."""
    unknown = [name for name in names if name not in all_names()]
    if unknown:
        message = f"unknown experiment {unknown[0]!r}; choose from {', '.join(all_names())}."
        raise UserError(message)
    return tuple(names) or all_names()


def record(name: str, folder: Path) -> Path:
    """Run an experiment on one thread, write its result, and return the file."""
    return write_recording(recorded(experiments()[known([name])[0]]), folder)


def record_apart(name: str, folder: Path) -> Path:
    """Record in a new process, so that earlier recordings have no effect."""
    command = [sys.executable, "-m", "anybatch", "guide", "record", name, "--to", str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 (our own program)
    if done.returncode:
        message = f"{name} was not recorded: its process exited with status {done.returncode}."
        raise UserError(message)
    return folder / f"{name}.json"


def recorded(experiment: Experiment) -> Recording:
    """Run an experiment on one thread, so that the number of threads has no effect, and return its data."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        data = experiment.run(lambda _line: None)
        made = made_here(experiment.name, packages=experiment.packages, commit=commit_here())
        return as_recording(experiment, data, made)
    finally:
        torch.set_num_threads(threads)


def as_recording(experiment: Experiment, data: Data, made: Provenance) -> Recording:
    """Return the data of an experiment as a recording, for a file or for the page."""
    return Recording(name=experiment.name, question=experiment.question, made=made, data=plain(data))


def write_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording as one line, replacing an older one."""
    file = folder / f"{recording.name}.json"
    text = json.dumps(recording.as_json(), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    file.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    return file


def read_recording(file: Path) -> Recording:
    """Read a recording."""
    if not NAME.fullmatch(file.stem) or file.suffix != ".json":
        message = f"{file.name!r} is not a recording's name: use lower-case letters, digits, underscores, and .json."
        raise UserError(message)
    if file.stat().st_size > MAX_FILE_BYTES:
        message = f"{file} has {file.stat().st_size} bytes; the limit for a recording is {MAX_FILE_BYTES}."
        raise UserError(message)
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        made = Provenance(**content["made"])
        recording = Recording(name=content["name"], question=content["question"], made=made, data=content["data"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"{file} is not a recording ({type(error).__name__}: {error}). Run again: anybatch guide record"
        raise UserError(message) from error
    if recording.name != file.stem:
        message = f"{file} contains the recording {recording.name!r}. Rename the file."
        raise UserError(message)
    return recording


def plain(value: object) -> Any:  # noqa: ANN401 (JSON is)
    """Return a value as decoded from JSON, with NaN and infinities as strings, as in a run's log."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE[0 if math.isnan(value) else 1 if value > 0 else 2]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    message = f"{type(value).__name__} {value!r} cannot be written as JSON."
    raise TypeError(message)


def differences(one: Data, other: Data, *, tolerance: float = 0.0, noisy: tuple[str, ...] = ()) -> list[str]:
    """Return the differences of two recordings' data as texts; empty if they are equal within the tolerance."""
    return list(_differences("data", one, other, tolerance, noisy))


def _differences(place: str, one: object, other: object, tolerance: float, noisy: tuple[str, ...]) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                yield f"{place}.{name} is only in one of them"
            elif name not in noisy:
                yield from _differences(f"{place}.{name}", one[name], other[name], tolerance, noisy)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{place}[{number}]", first, second, tolerance, noisy)
    elif isinstance(one, int | float) and isinstance(other, int | float):
        if abs(one - other) > tolerance * max(abs(one), abs(other)):
            yield f"{place}: {one!r} and {other!r}"
    elif one != other:
        yield f"{place}: {one!r} and {other!r}"


def commit_here() -> str | None:
    """Return the commit of this code, with "+" for changed sources; None outside a clone."""
    if not (_CLONE / ".git").exists():
        return None
    commit = _git("rev-parse", "--short=12", "HEAD")
    # The built page is among the sources, but no number depends on it.
    changed = _git("status", "--porcelain", "--", "src", "guide/src", ":(exclude)guide/src/anybatch_guide/dist")
    return None if commit is None or changed is None else f"{commit}+" if changed else commit


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=_CLONE, capture_output=True, text=True, check=False)  # noqa: S603, S607 (fixed words; git is where the user has it)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _refuse_constant(name: str) -> float:
    message = f"{name} is not valid JSON"
    raise ValueError(message)
