"""Draws the memory during a step with matplotlib, which is imported here."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import matplotlib as mpl
import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from anybatch.core.units import in_bytes, shortened
from anybatch.diagnostics.memory_pictures import MemoryPicture, colours_of
from anybatch.memory.trace import MemoryTimeline

INK, FAINT, PALE = "#262626", "#8C8C8C", "#595959"
MAX_COLUMNS = 1_500
"""Maximum number of drawn columns; a longer timeline is reduced to the peak of each column."""
MAX_SHOWN_LIMIT = 1.6
"""A memory limit above this multiple of the peak is not drawn, because the axis would be mostly empty."""
MAX_MARKS = 10
"""If a timeline has more marks, none is drawn, because their names would overlap."""
LABEL_LEFT_BEYOND = 0.6
"""If the peak is to the right of this fraction of the width, its label is on its left."""

_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "text.parse_math": False,  # do not interpret $ as math
        "svg.fonttype": "none",  # keep text searchable
        "svg.hashsalt": "anybatch",  # the same ids in every file
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "legend.fontsize": 9.0,
        "legend.title_fontsize": 9.0,
    }
)
# Without a date the same timeline gives the same file.
_UNDATED: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
)
_PHASES: Mapping[str, str] = MappingProxyType(
    {
        "setup": "#F2F2F2",
        "forward": "#DCEBF7",
        "backward": "#A9CDE8",
        "reduce": "#D9D2E9",
        "clip": "#F9E0C7",
        "update": "#CFE8DC",
    }
)


_LegendPosition = Literal["outside right upper", "outside right lower"]


def draw(timeline: MemoryTimeline, picture: MemoryPicture, path: Path) -> None:
    """Draw a timeline into a file with fixed matplotlib settings, and restore the user's settings."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast("Any", _SETTINGS))
        figure = make_figure(timeline, picture)
        figure.savefig(path, dpi=160, metadata=dict(_UNDATED[path.suffix.lower()]))


def make_figure(timeline: MemoryTimeline, picture: MemoryPicture) -> Figure:
    """Return a timeline as a figure: a strip of phases, and the areas below it."""
    # Without pyplot, which would keep the figure alive and may open a window.
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    strip, areas = figure.subplots(2, 1, height_ratios=[0.04, 1.0])
    unit_bytes, unit = _unit(timeline.peak_bytes)
    colours = colours_of(timeline.categories)
    moments = highest_moments(timeline.totals, MAX_COLUMNS)
    heights = (timeline.held_bytes[moments].T / unit_bytes).tolist()
    # Drawn as steps, because memory is constant between two events.
    areas.stackplot(moments.tolist(), heights, colors=list(colours.values()), step="post", linewidth=0, zorder=2)
    # From zero, so that areas are proportional to memory.
    areas.set_ylim(0, _draw_limit(areas, timeline, picture, unit_bytes))
    areas.set_ylabel(unit)
    areas.set_xlabel("allocations and frees, in order")
    for axis in (areas.xaxis, areas.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    areas.spines[["top", "right"]].set_visible(False)
    areas.grid(visible=True, axis="y", color="#E6E6E6", linewidth=0.6, zorder=0)
    _draw_peak(areas, timeline, unit_bytes)
    _draw_phases(strip, areas, timeline)
    for axes in (strip, areas):
        axes.set_xlim(0, max(1, len(timeline.phases) - 1))
    figure.suptitle(picture.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    strip.set_title(picture.subtitle, loc="left", fontsize=9.5, color=PALE)
    # From top to bottom, with the memory of each at the peak.
    at_peak = timeline.at(timeline.peak_moment)
    named = {f"{name}\n{in_bytes(at_peak[name])}": colours[name] for name in reversed(timeline.categories)}
    _draw_legend(figure, "at the peak", named, "outside right upper")
    phases = {"load" if name == "setup" else name: _PHASES[name] for name in dict.fromkeys(timeline.phases)}
    _draw_legend(figure, "phase", phases, "outside right lower")
    return figure


def highest_moments(totals: Int[Tensor, " moment"], num_columns: int) -> Int[Tensor, " column"]:
    """Return the moments to draw: all, or both ends and the highest moment of each of `num_columns` equal parts.

    The peak and all spikes are among them.
    """
    num_moments = len(totals)
    if num_moments <= num_columns:
        return torch.arange(num_moments)
    borders = [num_moments * number // num_columns for number in range(num_columns + 1)]
    highest = [begin + int(totals[begin:end].argmax()) for begin, end in pairwise(borders)]
    # A set, because both ends may already be in `highest`.
    return torch.tensor(sorted({0, *highest, num_moments - 1}))


def runs_of_equal_names(names: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return each run of equal names as (begin, end, name)."""
    borders = [0, *(index for index in range(1, len(names)) if names[index] != names[index - 1]), len(names)]
    return [(begin, end, names[begin]) for begin, end in pairwise(borders) if begin < end]


def _draw_limit(areas: Axes, timeline: MemoryTimeline, picture: MemoryPicture, unit_bytes: float) -> float:
    """Draw the memory limit if it is close to the peak, and return the height of the axis."""
    peak, limit = max(timeline.peak_bytes, 1), picture.limit_bytes
    if limit is None or limit > MAX_SHOWN_LIMIT * peak:
        return 1.16 * peak / unit_bytes
    lines: list[tuple[float, Any, str]] = [(limit, "-", f"limit {in_bytes(limit)}")]
    if picture.headroom:
        lines.append(((1 - picture.headroom) * limit, (0, (4, 3)), f"headroom of {100 * picture.headroom:g}%"))
    for num_bytes, style, label in lines:
        areas.axhline(num_bytes / unit_bytes, color=INK, linewidth=1, linestyle=style, zorder=5)
        areas.annotate(
            label,
            (0, num_bytes / unit_bytes),
            xycoords=areas.get_yaxis_transform(),
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=8.5,
            zorder=6,
        )
    return 1.12 * max(limit, peak) / unit_bytes


def _draw_peak(areas: Axes, timeline: MemoryTimeline, unit_bytes: float) -> None:
    """Mark the peak, with the operation that allocated last before it."""
    moment, height = timeline.peak_moment, timeline.peak_bytes / unit_bytes
    label = f"peak {in_bytes(timeline.peak_bytes)}"
    if timeline.operations[moment]:
        label += f"\n{shortened(timeline.operations[moment], 44)}"
    is_late = moment > LABEL_LEFT_BEYOND * len(timeline.phases)
    areas.plot([moment], [height], "o", color=INK, markersize=5, markeredgecolor="white", clip_on=False, zorder=8)
    areas.annotate(
        label,
        (moment, height),
        xytext=(-8 if is_late else 8, 7),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=9,
        linespacing=1.25,
        bbox={"facecolor": "white", "alpha": 0.82, "edgecolor": "none", "pad": 1.5},
        zorder=7,
    )


def _draw_phases(strip: Axes, areas: Axes, timeline: MemoryTimeline) -> None:
    """Draw the phases as a strip, with the marks above the strip and a line through the areas at each mark."""
    for phase in dict.fromkeys(timeline.phases):
        widths = [(begin, end - begin) for begin, end, name in runs_of_equal_names(timeline.phases) if name == phase]
        strip.broken_barh(widths, (0, 1), facecolor=_PHASES[phase])
    marks = timeline.marks if len(timeline.marks) <= MAX_MARKS else ()
    for moment, _ in marks:
        areas.axvline(moment, color="white", linewidth=0.9, alpha=0.75, zorder=3)
    strip.set_xticks([moment for moment, _ in marks], [name for _, name in marks], fontsize=7.5, ha="left")
    strip.xaxis.tick_top()
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.spines[:].set_visible(False)


def _draw_legend(figure: Figure, title: str, colours: Mapping[str, str], position: _LegendPosition) -> None:
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, title=title, loc=position, labelspacing=0.7, handlelength=1.1, alignment="left")


def _unit(num_bytes: int) -> tuple[float, str]:
    """Return the bytes of the unit in which a number of bytes has at most three digits, and its name."""
    name = in_bytes(num_bytes).split()[-1]
    return 1024.0 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB").index(name), name
