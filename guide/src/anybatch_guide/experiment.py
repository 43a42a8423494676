"""`Experiment`: a measurement for the page. `Provenance`: where, when and how its data was computed."""

import datetime as dt
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from anybatch.engine.notifier import software_versions

Data = Mapping[str, Any]
"""The data of an experiment: JSON values by name."""
Emit = Callable[[Mapping[str, Any]], None]
"""Sends one event to the page while an experiment runs: a record of the engine or of the guide."""


def emit_progress(emit: Emit, done: int, of: int, what: str) -> None:
    """Emit the progress of an experiment; `emit` raises to cancel it."""
    emit({"kind": "guide.progress", "done": done, "of": of, "what": what})


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A repeatable measurement."""

    name: str  # its name in recordings, links and on the command line: lower case, with underscores
    question: str  # the question it answers, in one line
    # function (emit) -> data. It sets its own seeds, changes no state of the process, and calls `emit` often, because
    # `emit` raises if the run is cancelled
    run: Callable[[Emit], Data]
    seconds: float  # approximate duration on two cores
    runs_here: bool = True  # whether the page may run it. Experiments that take minutes, or ranks, are only recorded
    # largest relative difference of a number between two recordings with the same versions; 0 for equal bits.
    # Names in `noisy` are not compared
    tolerance: float = 0.0
    noisy: tuple[str, ...] = ()  # names of numbers, anywhere in the data, that depend on the machine, such as seconds
    # other packages whose versions are recorded, because the experiment measures them
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and when data was computed."""

    date: str  # the day, as 2026-11-22
    device: str  # type and name of the device, with the number of threads on a CPU
    versions: Mapping[str, str]  # software name to version
    commit: str | None  # the commit of the project; None outside a clone
    command: str  # the command that reproduces it


def provenance_here(
    experiment: str, *, packages: Sequence[str] = (), commit: str | None = None, today: dt.date | None = None
) -> Provenance:
    """Return the provenance of data computed in this process, including the versions of `packages`."""
    day = dt.datetime.now(tz=dt.UTC).date() if today is None else today
    return Provenance(
        date=day.isoformat(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        versions={**software_versions(), **{name: version(name) for name in packages}},
        commit=commit,
        command=f"anybatch guide record {experiment}",
    )
