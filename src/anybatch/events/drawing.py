"""Curves as a matplotlib figure; the only module that imports matplotlib for them."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from anybatch.core.units import three_digits
from anybatch.events.plot import Curves, smoothed

# Shades of Okabe and Ito's blue and vermilion: colour-blind readers can distinguish them; in grey they are light, dark
# and between.
RAW, SMOOTH, EVALUATION, FAINT, INK, GAP = "#9CC9E8", "#00507F", "#D55E00", "#8C8C8C", "#262626", "#EDEDED"

SMOOTHED_SHARE = 0.01
"""Standard deviation of the smoothing, as a share of the run."""
LEAST_SMOOTHED_STEPS = 50
FEW_POINTS = 60
"""Up to this number of values, each is drawn as a dot."""
LOSS_LOG_RATIO, METRIC_LOG_RATIO = 30.0, 1_000.0
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""
WIDE_RATIO = 300.0
"""From this ratio on, a logarithmic axis labels only powers of ten."""
LEAST_PLAIN, MOST_PLAIN = 1e-4, 1e6
"""Numbers in this range are labelled without an exponent."""
TITLE_WIDTH = 84
SHAPES = "osD^"
ROUND_STEPS = (1, 2, 5, 10)
RESUMED = (0, (4, 3))
"""Dash pattern of the lines at which a run was resumed."""

_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "text.parse_math": False,  # a dollar in a name is a dollar
        "svg.fonttype": "none",  # text stays text, which can be searched for
        "svg.hashsalt": "anybatch",  # or names in the file would differ from one time to the next
        "font.size": 10.0,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E6E6E6",
        "grid.linewidth": 0.6,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
    }
)
_UNDATED: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
)


def draw(curves: Curves, paths: Sequence[Path]) -> None:
    """Draw a run into files, independent of the user's matplotlib settings, which are restored."""
    # The user's settings, for example a style sheet, would change colours and sizes.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast("Any", _SETTINGS))
        figure = make_figure(curves)
        for path in paths:
            figure.savefig(path, dpi=160, metadata=dict(_UNDATED[path.suffix.lower()]))


def make_figure(curves: Curves) -> Figure:
    """Return a run as a figure: a panel for the loss, one for each other metric, one for the learning rates."""
    others = [name for name in curves.metrics if name not in curves.loss_names]
    heights = [4.0, *[1.6] * len(others), *[0.9] * bool(curves.learning_rates)]
    figure = Figure(figsize=(10.0, 1.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    loss_panel, metric_panels = panels[0], panels[1 : 1 + len(others)]
    _draw_loss(loss_panel, curves)
    for panel, name in zip(metric_panels, others, strict=True):
        _draw_evaluations(panel, curves.metrics[name], name)
    if curves.learning_rates:
        _draw_learning_rates(panels[-1], curves)
    for panel in panels:
        for step in curves.resumed:
            # Between the two steps: the mark belongs to neither.
            panel.axvline(step + 0.5, color=INK, linewidth=0.8, linestyle=RESUMED, zorder=1)
        panel.grid(visible=False, axis="x")
    _draw_marks(loss_panel, curves)
    _set_steps(panels[-1], curves)
    figure.align_ylabels(list(panels))
    _draw_title(loss_panel, curves)
    handles, labels = loss_panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def title(curves: Curves) -> tuple[str, str]:
    """Return how the effective batch was split, one line for each split, and the device."""
    geometries = list(dict.fromkeys(session.geometry for session in curves.sessions))
    geometries[1:] = [f"then {geometry}" for geometry in geometries[1:]]
    circumstances = "; then ".join(dict.fromkeys(session.circumstances for session in curves.sessions))
    num_steps = f"{curves.steps[-1]:,} step{'s' * (curves.steps[-1] != 1)}"
    line = f"{num_steps} on {circumstances}" if circumstances else f"{num_steps}; the beginning of the log is missing"
    return "\n".join(textwrap.fill(one, TITLE_WIDTH, subsequent_indent="    ") for one in geometries), line


def _draw_title(panel: Axes, curves: Curves) -> None:
    main, below = title(curves)
    below = textwrap.fill(below, round(1.2 * TITLE_WIDTH))
    panel.set_title(below, loc="left", fontsize=9.5, pad=10, linespacing=1.3)
    lines = below.count("\n") + 1
    panel.annotate(
        main,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 13 + 13 * lines),
        textcoords="offset points",
        fontsize=11.5,
        fontweight="bold",
        linespacing=1.3,
        va="bottom",
    )


def _draw_loss(panel: Axes, curves: Curves) -> None:
    """Draw the loss, raw and smoothed, with those metrics that are losses too."""
    # An infinite loss would stretch the axis; it is marked at the edge instead.
    losses = torch.where(torch.isfinite(curves.losses), curves.losses, torch.nan)
    is_long = len(curves.steps) >= LEAST_SMOOTHED_STEPS
    colour, width, marker = (RAW, 0.7, "None") if is_long else (SMOOTH, 1.4, "o")
    panel.plot(
        *(curves.steps, losses.tolist()),
        color=colour,
        linewidth=width,
        marker=marker,
        markersize=4,
        label="loss of a step",
        zorder=2,
    )
    if is_long:
        course = smoothed(losses, max(2.0, SMOOTHED_SHARE * len(curves.steps)))
        panel.plot(*_values_without_line(curves.steps, losses), "o", color=RAW, markersize=3, zorder=2)
        panel.plot(curves.steps, course.tolist(), color=SMOOTH, linewidth=1.8, label="loss, smoothed", zorder=4)
    shown = losses[~losses.isnan()].tolist()
    names = [name for name in curves.metrics if name in curves.loss_names]
    for name, shape in zip(names, itertools.cycle(SHAPES)):
        shown += _draw_points(panel, curves.metrics[name], shape=shape, label=f"evaluated {name}")
    _set_values(panel, shown, log_ratio=LOSS_LOG_RATIO, num_ticks=8)
    panel.margins(y=0.1)  # room for marks above and below
    panel.set_ylabel("loss")


def _draw_evaluations(panel: Axes, values: Mapping[int, float], name: str) -> None:
    """Draw a metric, and label its last value."""
    _set_values(panel, _draw_points(panel, values), log_ratio=METRIC_LOG_RATIO, num_ticks=4)
    panel.margins(y=0.18)
    panel.set_ylabel(textwrap.fill(name.replace("_", " "), 18))


def _draw_points(
    panel: Axes, values: Mapping[int, float], *, shape: str = "o", label: str | None = None
) -> list[float]:
    """Draw evaluations as points with a thin line through them; return the finite values."""
    finite = {number: value for number, value in values.items() if math.isfinite(value)}
    marks: dict[str, Any] = {"marker": shape, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    if len(finite) > FEW_POINTS:
        marks = {}
    panel.plot(list(finite), list(finite.values()), color=EVALUATION, linewidth=1.0, label=label, zorder=5, **marks)
    if finite:
        last = max(finite)
        panel.annotate(
            three_digits(finite[last]),
            (last, finite[last]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=EVALUATION,
            annotation_clip=False,
        )
    return list(finite.values())


def _draw_learning_rates(panel: Axes, curves: Curves) -> None:
    """Draw the learning rates, faintly: they are a setting, not a result."""
    marker = "o" if len(curves.steps) == 1 else "None"
    for rates in curves.learning_rates:
        panel.plot(curves.steps, rates.tolist(), color=FAINT, linewidth=1.2, marker=marker, markersize=3)
    panel.margins(y=0.15)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_locator(MaxNLocator(3, steps=ROUND_STEPS))
    panel.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    panel.tick_params(labelcolor=FAINT)
    panel.tick_params(axis="x", labelcolor=INK)
    panel.set_ylabel("learning\nrate", color=FAINT)


def _draw_marks(panel: Axes, curves: Curves) -> None:
    """Mark events at the edges of the panel, by shapes that work without colour, and count them in the legend."""
    lost = [step for step, loss in zip(curves.steps, curves.losses.tolist(), strict=True) if not math.isfinite(loss)]
    gaps = _stretches(lost)
    panel.broken_barh(
        [(first - 0.5, last - first + 1) for first, last in gaps],
        (0, 1),
        transform=panel.get_xaxis_transform(),
        facecolor=GAP,
        zorder=0,
    )
    _draw_shapes(panel, [(first + last) / 2 for first, last in gaps], "x", 0.96, f"loss not finite ({len(lost):,})")
    _draw_shapes(panel, curves.skipped, "v", 0.04, f"update skipped ({len(curves.skipped):,})")
    _draw_shapes(panel, curves.out_of_memory, "D", 0.96, f"out of memory ({len(curves.out_of_memory):,})")
    if curves.resumed:
        panel.plot([], [], color=INK, linewidth=0.8, linestyle=RESUMED, label=f"resumed ({len(curves.resumed):,})")


def _draw_shapes(panel: Axes, steps: Sequence[float], shape: str, height: float, label: str) -> None:
    """Draw shapes at steps, at a height between the bottom of the panel, 0, and its top, 1."""
    if steps:
        panel.plot(
            *(steps, [height] * len(steps)),
            linestyle="None",
            marker=shape,
            markersize=6,
            color=INK,
            markerfacecolor="white",
            transform=panel.get_xaxis_transform(),
            label=label,
            zorder=6,
        )


def _set_steps(panel: Axes, curves: Curves) -> None:
    """Let the axis of steps hold the whole run, and show whole numbers."""
    evaluated = [number for values in curves.metrics.values() for number in values]
    first, last = min([*curves.steps, *evaluated]), max([*curves.steps, *evaluated])
    margin = max(0.5, 0.015 * (last - first))
    panel.set_xlim(first - margin, last + margin)
    panel.xaxis.set_major_locator(MaxNLocator(10, steps=ROUND_STEPS, integer=True, min_n_ticks=1))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.set_xlabel("steps made")


def _set_values(panel: Axes, shown: Sequence[float], *, log_ratio: float, num_ticks: int) -> None:
    """Choose the axis of values: logarithmic if they are positive and their ratio exceeds `log_ratio`."""
    if not shown:
        panel.text(0.5, 0.5, "no finite value", transform=panel.transAxes, ha="center", va="center", color=FAINT)
        panel.set_yticks([])
        return
    ratio = max(shown) / min(shown) if min(shown) > 0 else 1.0
    if ratio >= log_ratio:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < WIDE_RATIO else (1.0,), numticks=12))
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.yaxis.set_major_locator(MaxNLocator(num_ticks, steps=ROUND_STEPS))
    panel.yaxis.set_major_formatter(FuncFormatter(_plain_number))


def _plain_number(value: float, _position: int | None = None) -> str:
    return f"{value:,.10g}" if value == 0 or LEAST_PLAIN <= abs(value) < MOST_PLAIN else f"{value:.3g}"


def _values_without_line(steps: Sequence[int], values: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the values between two missing ones, through which no line can be drawn."""
    around = torch.nn.functional.pad(values.isnan(), (1, 1), value=True)
    lonely = ~values.isnan() & around[:-2] & around[2:]
    return torch.tensor(steps)[lonely].tolist(), values[lonely].tolist()


def _stretches(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last step of each stretch of steps that follow one another."""
    edges = [0, *(place for place in range(1, len(steps)) if steps[place] != steps[place - 1] + 1), len(steps)]
    return [(steps[begin], steps[end - 1]) for begin, end in itertools.pairwise(edges) if begin < end]
