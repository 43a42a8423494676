"""The curves of a run as a matplotlib figure. Imported only for drawing, because matplotlib is optional."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from anybatch.core.units import three_digits
from anybatch.events.plot import Curves, smoothed

# Shades of Okabe and Ito's blue and vermilion, which colour-blind readers can distinguish. They also differ in grey.
RAW, SMOOTH, EVALUATION, FAINT, INK = "#9CC9E8", "#00507F", "#D55E00", "#8C8C8C", "#262626"

MIN_SMOOTHED_STEPS: Final = 50
LOSS_LOG_RATIO, METRIC_LOG_RATIO = 30.0, 1_000.0
"""Minimum ratio of the largest to the smallest value for a logarithmic axis of the loss, and of another metric."""
TITLE_WIDTH: Final = 110
RESUMED: Final = (0, (4, 3))
"""Dash pattern of the lines at which a run was resumed."""

_SETTINGS: Final[Mapping[str, Any]] = {
    "text.parse_math": False,  # a dollar sign in a name does not begin a formula
    "svg.fonttype": "none",  # keep text as text, so that it can be searched
    "svg.hashsalt": "anybatch",  # without it, ids in the file would be random
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
}
_METADATA_WITHOUT_DATE: Final[Mapping[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}


def draw(curves: Curves, paths: Sequence[Path]) -> None:
    """Draw a run into files, with the same colours and sizes regardless of the user's matplotlib settings."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast("Any", _SETTINGS))
        figure = make_figure(curves)
        for path in paths:
            figure.savefig(path, dpi=160, metadata=_METADATA_WITHOUT_DATE[path.suffix.lower()])


def make_figure(curves: Curves) -> Figure:
    """Return a run as a figure: a panel for the loss, one for each other metric, one for the learning rates."""
    others = [name for name in curves.metrics if name not in curves.loss_names]
    heights = [4.0, *[1.6] * len(others), 0.9]
    figure = Figure(figsize=(10.0, 1.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _draw_loss(panels[0], curves)
    for panel, name in zip(panels[1:-1], others, strict=True):
        values = _draw_evaluations(panel, curves.metrics[name])
        _set_scale(panel, values, METRIC_LOG_RATIO)
        panel.set_ylabel(textwrap.fill(name.replace("_", " "), 18))
    _draw_learning_rates(panels[-1], curves)
    for panel in panels:
        for step in sorted(curves.resumed):
            # Between the last step before the resume and the first step after it.
            panel.axvline(step + 0.5, color=INK, linewidth=0.8, linestyle=RESUMED, zorder=1)
    panels[-1].xaxis.set_major_locator(MaxNLocator(10, integer=True))
    panels[-1].set_xlabel("finished steps")
    geometries = "; then ".join(dict.fromkeys(curves.geometries)) or "the beginning of the log is missing"
    panels[0].set_title(textwrap.fill(geometries, TITLE_WIDTH), loc="left", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _draw_loss(panel: Axes, curves: Curves) -> None:
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
    panel: Axes, values: Mapping[int, float], *, shape: str = "o", label: str | None = None
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


def _draw_learning_rates(panel: Axes, curves: Curves) -> None:
    """Draw the learning rates of the parameter groups, in a faint colour, because they are not a result."""
    steps = sorted(curves.rates)
    # A resumed run may have more or fewer parameter groups; the line of a missing group has a gap.
    groups = itertools.zip_longest(*(curves.rates[step] for step in steps), fillvalue=math.nan)
    for rates in dict.fromkeys(groups):
        panel.plot(steps, rates, color=FAINT, linewidth=1.2, marker="o" if len(steps) == 1 else None)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("learning\nrate", color=FAINT)


def _draw_marks(panel: Axes, steps: Iterable[float], shape: str, height: float, label: str) -> None:
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


def _set_scale(panel: Axes, values: Sequence[float], log_ratio: float) -> None:
    """Make the axis of values logarithmic if they are positive and their ratio exceeds `log_ratio`."""
    if values and min(values) > 0 and max(values) / min(values) >= log_ratio:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # the default writes formulas, see `_SETTINGS`
        panel.yaxis.set_minor_formatter(NullFormatter())
