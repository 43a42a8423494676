"""A log as a picture: loss, evaluations and learning rate by step, with marks for events."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float

from anybatch.errors import UserError
from anybatch.events.jsonl import JsonLine, read_jsonl
from anybatch.events.matplotlib_files import import_drawing

_REACH = 4
"""Standard deviations after which the Gaussian is practically zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSession:
    """A part of a run between two starts."""

    first_step: int
    geometry: str
    circumstances: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """The curves of a run. Steps are numbered by the steps made, from 1.

    `losses` has the loss of each step over its effective batch; NaN if it was not a number. `learning_rates` has one
    tensor per parameter group; identical groups appear once. `metrics` maps a metric to its values, by the number of
    steps before each evaluation; metrics among `loss_names` are losses too. Without its beginning, a log has no
    sessions.
    """

    sessions: Sequence[LogSession]
    steps: Sequence[int]
    losses: Float[torch.Tensor, " step"]
    learning_rates: Sequence[Float[torch.Tensor, " step"]]
    metrics: Mapping[str, Mapping[int, float]]
    loss_names: frozenset[str]
    skipped: Sequence[int]
    resumed: Sequence[int]
    out_of_memory: Sequence[int]


def read_curves(path: str | os.PathLike[str]) -> Curves:
    """Read the curves of a run from its log."""
    notes = _CurveCollector()
    take: Mapping[str, Callable[[JsonLine], None]] = {
        "start": notes.start,
        "step": notes.step,
        "evaluate": notes.evaluate,
        "out_of_memory": notes.out_of_memory,
    }
    for line in read_jsonl(path):
        if line.get("kind") in take:
            take[line["kind"]](line)
    return notes.curves()


def smoothed(values: Float[torch.Tensor, " step"], num_steps: float) -> Float[torch.Tensor, " step"]:
    """Return Gaussian-weighted means of neighbouring values (deviation in steps); non-finite values have weight zero.

    `smooth[i] = sum_j w(i - j) v[j] / sum_j w(i - j)` over the finite `v[j]`, with `w(d) = exp(-d^2 / 2 s^2)`. Unlike a
    running mean, the symmetric window does not shift the curve to the right.
    """
    reach = max(1, math.ceil(_REACH * num_steps))
    distances = torch.arange(-reach, reach + 1, dtype=torch.float64)
    bell = torch.exp(-0.5 * (distances / num_steps) ** 2)[None, None]
    finite = torch.isfinite(values)
    # Values and their weights are convolved together, so that gaps and edges have no weight.
    known = torch.stack([torch.where(finite, values.double(), 0.0), finite.double()])[:, None]
    sums, weights = F.conv1d(known, bell, padding=reach)[:, 0]
    return torch.where(finite, sums / weights, torch.nan)


@dataclass(slots=True)
class _CurveCollector:
    """The part of a log that was read so far."""

    sessions: list[LogSession] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    loss_names: set[str] = field(default_factory=lambda: {"loss"})
    skipped: set[int] = field(default_factory=set)
    out_of_memory_at: set[int] = field(default_factory=set)

    def start(self, line: JsonLine) -> None:
        """Begin a session: drop later steps, which were undone."""
        first = int(line["first_step"])
        # A resumed run repeats the steps after its checkpoint, and the second time counts.
        by_step: list[dict[int, Any]] = [self.losses, self.rates, *self.metrics.values()]
        for values in by_step:
            for number in [number for number in values if number > first]:
                del values[number]
        self.skipped = {number for number in self.skipped if number <= first}
        self.out_of_memory_at = {number for number in self.out_of_memory_at if number <= first}
        # A session without steps is replaced by the next one at the same step.
        self.sessions = [session for session in self.sessions if session.first_step < first]
        circumstances = ", ".join(str(line[name]) for name in ("device", "precision", "strategy"))
        self.sessions.append(LogSession(first_step=first, geometry=str(line["geometry"]), circumstances=circumstances))

    def step(self, line: JsonLine) -> None:
        """Add a step."""
        number = int(line["step"]) + 1
        self.losses[number] = _number(line["loss"])
        self.rates[number] = [_number(rate) for rate in line["learning_rates"]]
        self.loss_names.update(line["losses"])
        if line["skipped"] is True:
            self.skipped.add(number)

    def evaluate(self, line: JsonLine) -> None:
        """Add an evaluation; one repeated after a resume replaces the first."""
        for name, value in line["metrics"].items():
            self.metrics.setdefault(name, {})[int(line["step"])] = _number(value)

    def out_of_memory(self, line: JsonLine) -> None:
        """Add a step that ran out of memory."""
        self.out_of_memory_at.add(int(line["step"]) + 1)

    def curves(self) -> Curves:
        """Return the curves collected so far."""
        steps = sorted(self.losses)
        num_groups = max((len(rates) for rates in self.rates.values()), default=0)
        # A resumed run may have more or fewer parameter groups; a missing one leaves a gap.
        groups = [[(self.rates[number][group:] or [math.nan])[0] for number in steps] for group in range(num_groups)]
        return Curves(
            sessions=tuple(self.sessions),
            steps=steps,
            losses=torch.tensor([self.losses[number] for number in steps], dtype=torch.float64),
            learning_rates=[
                torch.tensor(rates, dtype=torch.float64) for rates in dict.fromkeys(tuple(group) for group in groups)
            ],
            metrics={name: dict(sorted(values.items())) for name, values in self.metrics.items() if values},
            loss_names=frozenset(self.loss_names),
            skipped=sorted(self.skipped),
            resumed=[session.first_step for session in self.sessions if session.first_step],
            out_of_memory=sorted(self.out_of_memory_at),
        )


def _number(value: float | str | None) -> float:
    """Return a number of a line, in which NaN and the infinities are text, and an unreadable number is null."""
    return math.nan if value is None else float(value)


def plot_losses(jsonl_path: str | os.PathLike[str], out_paths: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Draw a run from its log.

    The loss of each step is a thin line and its smoothed course a thick one; evaluations are points, and learning rates
    have a panel below. Marks show skipped updates, resumes and out of memory. Steps undone by a resume are not drawn.
    The same log and matplotlib give the same SVG, byte for byte.

    Args:
        jsonl_path: the log, see `JsonlLog`; it may still be written.
        out_paths: the pictures, which end in .png, .svg or .pdf; missing folders are created.

    Returns:
        The paths of the pictures.

    Raises:
        UserError: matplotlib is not installed, a picture has another ending, or the log has no steps.
        OSError: the log cannot be read, or a picture cannot be written.
    """
    paths = tuple(map(Path, out_paths))
    drawing = import_drawing("anybatch.events.drawing", paths)
    curves = read_curves(jsonl_path)
    if not curves.steps:
        message = f"{os.fspath(jsonl_path)} has no steps yet, so there is nothing to draw. Is it the log of rank 0?"
        raise UserError(message, code="no_steps")
    for path in paths:
        # Created late, so that a log without steps leaves no empty folders.
        path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(curves, paths)
    return paths
