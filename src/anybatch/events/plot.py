"""A log as a picture: loss, evaluations and learning rate by step, with marks for events."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite, nan
from pathlib import Path
from typing import Any

from anybatch.errors import UserError
from anybatch.events.log_lines import JsonLine, read_jsonl
from anybatch.events.matplotlib_files import import_drawing


@dataclass(slots=True, eq=False)
class Curves:
    """The curves of a run, by step, counted from 1.

    `losses` are over the effective batch, NaN if they could not be read, and `rates` are the learning rates of all
    parameter groups. `metrics` has the values of each evaluated metric; a metric in `loss_names` is also a loss.
    `geometries` are texts about how each session (the run until a resume) split its batches.
    """

    geometries: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    loss_names: set[str] = field(default_factory=lambda: {"loss"})
    skipped: set[int] = field(default_factory=set)
    resumed: set[int] = field(default_factory=set)
    out_of_memory: set[int] = field(default_factory=set)

    def add(self, line: JsonLine) -> None:
        """Add a line of the log. Lines of other kinds are ignored."""
        match line.get("kind"):
            case "start":
                self._undo_from(int(line["first_step"]))
                facts = ", ".join(str(line[name]) for name in ("device", "precision", "strategy"))
                self.geometries.append(f"{line['geometry']} ({facts})")
            case "step":
                number = int(line["step"]) + 1
                self.losses[number] = _number(line["loss"])
                self.rates[number] = [_number(rate) for rate in line["learning_rates"]]
                self.loss_names.update(line["losses"])
                if line["skipped"] is True:
                    self.skipped.add(number)
            case "evaluate":
                for name, value in line["metrics"].items():
                    self.metrics.setdefault(name, {})[int(line["step"])] = _number(value)
            case "out_of_memory":
                self.out_of_memory.add(int(line["step"]) + 1)

    def _undo_from(self, first: int) -> None:
        """Drop the steps after the checkpoint at step `first`, because the resumed run repeats them."""
        by_step: list[dict[int, Any]] = [self.losses, self.rates, *self.metrics.values()]
        for values in by_step:
            for number in [number for number in values if number > first]:
                del values[number]
        for marks in (self.skipped, self.resumed, self.out_of_memory):
            marks.difference_update([number for number in marks if number > first])
        if first:
            self.resumed.add(first)


def read_curves(path: str | os.PathLike[str]) -> Curves:
    """Read the curves of a run from its log."""
    curves = Curves()
    for line in read_jsonl(path):
        curves.add(line)
    return curves


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return running means over the finite values from `reach` before to `reach` after each value; NaN stays NaN."""
    # Exact fractions, because one huge loss in a floating-point sum would round away all later ones.
    sums, counts = [Fraction()], [0]
    for value in values:
        is_number = isfinite(value)
        sums.append(sums[-1] + Fraction(value) if is_number else sums[-1])
        counts.append(counts[-1] + is_number)
    means = []
    for index in range(len(values)):
        begin, end = max(0, index - reach), min(len(values), index + reach + 1)
        is_number = counts[index + 1] > counts[index]
        means.append(float((sums[end] - sums[begin]) / (counts[end] - counts[begin])) if is_number else nan)
    return means


def _number(value: float | str | None) -> float:
    """Return a number of a log line as a float; the log has NaN and infinities as strings, unreadable ones as null."""
    return nan if value is None else float(value)


def plot_losses(jsonl_path: str | os.PathLike[str], out_paths: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Draw a run from its log.

    The loss of each step is a thin line and its running mean a thick one; evaluations are points, and learning rates
    have a panel below. Marks show skipped updates, resumes, out-of-memory errors and losses that are not finite. Steps
    undone by a resume are not drawn. The same log and version of matplotlib give the same SVG, byte for byte.

    Args:
        jsonl_path: the log, a file of `JsonlLog`; the run may still be writing it.
        out_paths: the paths of the pictures, which end in .png, .svg or .pdf; missing folders are created.

    Returns:
        The paths of the pictures.

    Raises:
        UserError: matplotlib is not installed, a path ends in anything else, or the log has no steps.
        OSError: the log cannot be read, or a picture cannot be written.
    """
    paths = tuple(map(Path, out_paths))
    drawing = import_drawing("anybatch.events.drawing", paths)
    curves = read_curves(jsonl_path)
    if not curves.losses:
        message = f"{os.fspath(jsonl_path)} has no steps yet, so there is nothing to draw. Is it the log of rank 0?"
        raise UserError(message, code="no_steps")
    for path in paths:
        # Created only now, so that a log without steps leaves no empty folders.
        path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(curves, paths)
    return paths
