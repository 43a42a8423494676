"""`Experiment`, a measurement shown on the page, and `Provenance`, where and how its data was computed."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A repeatable measurement.

    Attributes:
        name: its name in recordings, links and on the command line: lower case, with underscores.
        question: the question it answers, in one line.
        run: function (emit) -> data. It sets its own seeds, changes no state of the process, and calls `emit` often
            enough to be cancelled: `emit` raises to end it.
        seconds: approximate duration on two cores.
        runs_here: whether the page may run it. Experiments that take minutes, or ranks, are only recorded.
        tolerance: the largest relative difference of a number between two recordings with the same versions; 0 for
            the same bits. Names in `noisy` are not compared.
        noisy: names of numbers, anywhere in the data, that depend on the machine, such as seconds.
        packages: measured packages other than torch, whose versions are recorded; the guide does not need them.
    """

    name: str
    question: str
    run: Callable[[Emit], Data]
    seconds: float
    runs_here: bool = True
    tolerance: float = 0.0
    noisy: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and when data was computed.

    Attributes:
        date: the day, as 2026-11-22.
        device: type and name of the device, with the number of threads on a CPU.
        versions: software name to version.
        commit: the commit of the project; None outside a clone.
        command: the command that reproduces it.
    """

    date: str
    device: str
    versions: Mapping[str, str]
    commit: str | None
    command: str


def made_here(
    experiment: str, *, packages: Sequence[str] = (), commit: str | None = None, today: dt.date | None = None
) -> Provenance:
    """Return the provenance of data computed in this process, with the versions of further packages."""
    day = dt.datetime.now(tz=dt.UTC).date() if today is None else today
    return Provenance(
        date=day.isoformat(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        versions={**software_versions(), **{name: version(name) for name in packages}},
        commit=commit,
        command=f"anybatch guide record {experiment}",
    )
