"""A log as a picture: loss, evaluations and learning rate by step, with marks for events."""

import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from anybatch.core.units import three_digits
from anybatch.errors import UserError
from anybatch.events.log_lines import JsonLine, read_jsonl
from anybatch.events.matplotlib_files import FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Shades of Okabe and Ito's blue and vermilion, which colour-blind readers can distinguish. They also differ in grey.
RAW, SMOOTH, EVALUATION = "#9CC9E8", "#00507F", "#D55E00"
MIN_SMOOTHED_STEPS: Final = 50
LOSS_LOG_RATIO, METRIC_LOG_RATIO = 30.0, 1_000.0
"""Minimum ratio of the largest to the smallest value for a logarithmic axis of the loss, and of another metric."""
TITLE_WIDTH: Final = 110
RESUMED: Final = (0, (4, 3))
"""Dash pattern of the lines at which a run was resumed."""


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
        is_number = math.isfinite(value)
        sums.append(sums[-1] + Fraction(value) if is_number else sums[-1])
        counts.append(counts[-1] + is_number)
    means = []
    for index in range(len(values)):
        begin, end = max(0, index - reach), min(len(values), index + reach + 1)
        is_number = counts[index + 1] > counts[index]
        means.append(float((sums[end] - sums[begin]) / (counts[end] - counts[begin])) if is_number else math.nan)
    return means


def _number(value: float | str | None) -> float:
    """Return a number of a log line as a float; the log has NaN and infinities as strings, unreadable ones as null."""
    return math.nan if value is None else float(value)


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
    with new_figure(paths) as figure:
        curves = read_curves(jsonl_path)
        if not curves.losses:
            message = f"{os.fspath(jsonl_path)} has no steps yet, so there is nothing to draw. Is it the log of rank 0?"
            raise UserError(message, code="no_steps")
        _draw(figure, curves)
    return paths


def _draw(figure: "Figure", curves: Curves) -> None:
    """Draw a panel for the loss, one for each other metric, and one for the learning rates."""
    others = [name for name in curves.metrics if name not in curves.loss_names]
    heights = [4.0, *[1.6] * len(others), 0.9]
    figure.set_size_inches(10.0, 1.6 + sum(heights))
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_loss(panels[0], curves)
    for panel, name in zip(panels[1:-1], others, strict=True):
        values = _draw_evaluations(panel, curves.metrics[name])
        _set_scale(panel, values, METRIC_LOG_RATIO)
        panel.set_ylabel(textwrap.fill(name.replace("_", " "), 18))
    _draw_learning_rates(panels[-1], curves)
    for panel in panels:
        panel.grid(visible=True, axis="y")
        for step in sorted(curves.resumed):
            # Between the last step before the resume and the first step after it.
            panel.axvline(step + 0.5, color=INK, linewidth=0.8, linestyle=RESUMED, zorder=1)
    panels[-1].locator_params(axis="x", nbins=10, integer=True)
    panels[-1].set_xlabel("finished steps")
    geometries = "; then ".join(dict.fromkeys(curves.geometries)) or "the beginning of the log is missing"
    panels[0].set_title(textwrap.fill(geometries, TITLE_WIDTH), loc="left", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)


def _draw_loss(panel: "Axes", curves: Curves) -> None:
    """Draw the loss, raw and smoothed, the evaluated losses, and marks for events."""
    steps = sorted(curves.losses)
    # An infinite loss would stretch the axis; it is marked at the edge instead.
    losses = [curves.losses[step] if math.isfinite(curves.losses[step]) else math.nan for step in steps]
    is_long = len(steps) >= MIN_SMOOTHED_STEPS
    colour, width, size = (RAW, 0.7, 2.0) if is_long else (SMOOTH, 1.4, 4.0)
    # Each step has a dot, because a step between two steps without a loss has no line.
    panel.plot(steps, losses, color=colour, linewidth=width, marker="o", markersize=size, label="loss of a step")
    if is_long:
        means = smoothed(losses, max(2, len(steps) // 50))
        panel.plot(steps, means, color=SMOOTH, linewidth=1.8, label="loss, smoothed", zorder=4)
    shown = [loss for loss in losses if math.isfinite(loss)]
    names = [name for name in curves.metrics if name in curves.loss_names]
    for name, shape in zip(names, itertools.cycle("osD^")):
        shown += _draw_evaluations(panel, curves.metrics[name], shape=shape, label=f"evaluated {name}")
    _set_scale(panel, shown, LOSS_LOG_RATIO)
    panel.margins(y=0.1)  # room for marks above and below
    panel.set_ylabel("loss")
    lost = [step for step, loss in zip(steps, losses, strict=True) if math.isnan(loss)]
    _draw_marks(panel, lost, "x", 0.96, "loss not finite")
    _draw_marks(panel, curves.skipped, "v", 0.04, "update skipped")
    _draw_marks(panel, curves.out_of_memory, "D", 0.96, "out of memory")
    if curves.resumed:
        panel.plot([], [], color=INK, linewidth=0.8, linestyle=RESUMED, label=f"resumed ({len(curves.resumed):,})")


def _draw_evaluations(
    panel: "Axes", values: Mapping[int, float], *, shape: str = "o", label: str | None = None
) -> list[float]:
    """Draw evaluations as points with a thin line, label the last point, and return the finite values."""
    finite = {number: value for number, value in sorted(values.items()) if math.isfinite(value)}
    panel.plot(
        *(list(finite), list(finite.values())),
        color=EVALUATION,
        linewidth=1.0,
        marker=shape,
        markersize=5,
        label=label,
        zorder=5,
    )
    if finite:
        last = max(finite)
        point = (last, finite[last])
        panel.annotate(
            three_digits(finite[last]), point, xytext=(6, 0), textcoords="offset points", va="center", color=EVALUATION
        )
    return list(finite.values())


def _draw_learning_rates(panel: "Axes", curves: Curves) -> None:
    """Draw the learning rates of the parameter groups, in a faint colour, because they are not a result."""
    steps = sorted(curves.rates)
    # A resumed run may have more or fewer parameter groups; the line of a missing group has a gap.
    groups = itertools.zip_longest(*(curves.rates[step] for step in steps), fillvalue=math.nan)
    for rates in dict.fromkeys(groups):
        panel.plot(steps, rates, color=FAINT, linewidth=1.2, marker="o" if len(steps) == 1 else None)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("learning\nrate", color=FAINT)


def _draw_marks(panel: "Axes", steps: Iterable[float], shape: str, height: float, label: str) -> None:
    """Draw a mark at each step, at a height from 0 (bottom of the panel) to 1 (top); the legend shows how many."""
    marked = sorted(steps)
    if marked:
        panel.plot(
            *(marked, [height] * len(marked)),
            linestyle="None",
            marker=shape,
            color=INK,
            markerfacecolor="white",
            transform=panel.get_xaxis_transform(),
            label=f"{label} ({len(marked):,})",
            zorder=6,
        )


def _set_scale(panel: "Axes", values: Sequence[float], log_ratio: float) -> None:
    """Make the axis of values logarithmic if they are positive and their ratio exceeds `log_ratio`."""
    if values and min(values) > 0 and max(values) / min(values) >= log_ratio:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")  # the default writes formulas, which `new_figure` disables
        panel.yaxis.set_minor_formatter("")
