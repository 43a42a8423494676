"""Memory over the course of a step as a figure of matplotlib, which is imported here."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

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
MOST_COLUMNS = 1_500
"""Maximum number of drawn columns; a longer timeline is reduced to the peak of each column."""
SHOWN_LIMIT = 1.6
"""A limit above this multiple of the peak is not drawn, because the axis would be mostly empty."""
LETTER_SHARE = 0.0075
"""Width of a letter as a share of a strip's width, to omit names that do not fit."""
MOST_EDGES = 100
"""Maximum number of pieces that a strip draws with edges; more edges would hide the pieces."""
TURN = 0.6
"""The label of a peak to the right of this share of the width is on the left of the peak."""

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
_MARKS = "#FFFFFF", "#EFEFEF"


def draw(course: MemoryTimeline, picture: MemoryPicture, path: Path) -> None:
    """Draw a timeline into a file, independent of the user's matplotlib settings, which are restored."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast("Any", _SETTINGS))
        figure = make_figure(course, picture)
        figure.savefig(path, dpi=160, metadata=dict(_UNDATED[path.suffix.lower()]))


def make_figure(course: MemoryTimeline, picture: MemoryPicture) -> Figure:
    """Return a timeline as a figure: two strips of marks and phases, and the areas below them."""
    # Not by pyplot, which would keep the figure alive and may open a window.
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    strips, areas = figure.subplots(2, 1, sharex=True, height_ratios=[0.075, 1.0])
    unit_bytes, unit = _unit(course.peak_bytes)
    colours = colours_of(course.categories)
    moments = highest_moments(course.totals, MOST_COLUMNS)
    heights = (course.held_bytes[moments].T / unit_bytes).tolist()
    # Drawn as steps, because memory is constant between two events.
    areas.stackplot(moments.tolist(), heights, colors=list(colours.values()), step="post", linewidth=0, zorder=2)
    top = _draw_limit(areas, course, picture, unit_bytes)
    areas.set_xlim(0, max(1, len(course.phases) - 1))
    # From zero, so that areas are proportional to memory.
    areas.set_ylim(0, top)
    areas.set_ylabel(unit)
    areas.set_xlabel("allocations and frees, in order")
    areas.tick_params(labelsize=9)
    for axis in (areas.xaxis, areas.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    areas.spines[["top", "right"]].set_visible(False)
    areas.grid(visible=True, axis="y", color="#E6E6E6", linewidth=0.6, zorder=0)
    _draw_peak(areas, course, unit_bytes)
    unnamed = _draw_phases(strips, course)
    _draw_marks(strips, areas, course)
    _draw_areas_legend(areas, course, colours)
    _draw_phases_legend(strips, areas, unnamed)
    _draw_title(strips, picture)
    return figure


def highest_moments(totals: Int[Tensor, " moment"], num_columns: int) -> Int[Tensor, " column"]:
    """Return the moments to draw: all, or both ends and the highest one in each of `num_columns` equal stretches.

    The peak is always among them, and no spike disappears.
    """
    num_moments = len(totals)
    if num_moments <= num_columns:
        return torch.arange(num_moments)
    borders = [num_moments * number // num_columns for number in range(num_columns + 1)]
    highest = [begin + int(totals[begin:end].argmax()) for begin, end in pairwise(borders)]
    # A set, because both ends may already be in `highest`.
    return torch.tensor(sorted({0, *highest, num_moments - 1}))


def stretches(names: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return each run of equal names as (begin, end, name)."""
    borders = [0, *(place for place in range(1, len(names)) if names[place] != names[place - 1]), len(names)]
    return [(begin, end, names[begin]) for begin, end in pairwise(borders) if begin < end]


def _draw_title(strips: Axes, picture: MemoryPicture) -> None:
    strips.set_title(picture.below, loc="left", fontsize=9.5, color=PALE, pad=8)
    strips.annotate(
        picture.title,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 26),
        textcoords="offset points",
        fontsize=12,
        fontweight="bold",
    )


def _draw_limit(areas: Axes, course: MemoryTimeline, picture: MemoryPicture, unit_bytes: float) -> float:
    """Draw the memory limit if it is close to the peak, and return the height of the axis."""
    peak, limit = max(course.peak_bytes, 1), picture.limit_bytes
    if limit is None or limit > SHOWN_LIMIT * peak:
        return 1.16 * peak / unit_bytes
    lines: list[tuple[float, Any, str]] = [(limit, "-", f"limit {in_bytes(limit)}")]
    if picture.headroom:
        lines.append(((1 - picture.headroom) * limit, (0, (4, 3)), f"headroom of {100 * picture.headroom:g}%"))
    for num_bytes, style, words in lines:
        areas.axhline(num_bytes / unit_bytes, color=INK, linewidth=1, linestyle=style, zorder=5)
        areas.annotate(
            words,
            (0, num_bytes / unit_bytes),
            xycoords=areas.get_yaxis_transform(),
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=8.5,
            zorder=6,
        )
    return 1.12 * max(limit, peak) / unit_bytes


def _draw_peak(areas: Axes, course: MemoryTimeline, unit_bytes: float) -> None:
    """Mark the peak, with the operation that allocated last."""
    moment, height = course.peak_moment, course.peak_bytes / unit_bytes
    words = f"peak {in_bytes(course.peak_bytes)}"
    if course.operations[moment]:
        words += f"\n{shortened(course.operations[moment], 44)}"
    is_late = moment > TURN * len(course.phases)
    areas.plot([moment], [height], "o", color=INK, markersize=5, markeredgecolor="white", clip_on=False, zorder=8)
    areas.annotate(
        words,
        (moment, height),
        xytext=(-8 if is_late else 8, 7),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=9,
        linespacing=1.25,
        bbox={"facecolor": "white", "alpha": 0.82, "edgecolor": "none", "pad": 1.5},
        zorder=7,
    )


def _draw_phases(strips: Axes, course: MemoryTimeline) -> list[str]:
    """Draw the phases as the lower strip; return the phases whose names did not fit."""
    found = stretches(course.phases)
    edge = 0.5 if len(found) <= MOST_EDGES else 0.0
    unnamed: list[str] = []
    for phase in dict.fromkeys(course.phases):
        spans = [(begin, end) for begin, end, name in found if name == phase]
        widths = [(begin, end - begin) for begin, end in spans]
        strips.broken_barh(widths, (0, 1), facecolor=_PHASES[phase], edgecolor="white", linewidth=edge)
        if not sum(_label(strips, span, 0.5, _phase_name(phase), len(course.phases)) for span in spans):
            unnamed.append(phase)
    return unnamed


def _draw_marks(strips: Axes, areas: Axes, course: MemoryTimeline) -> None:
    """Draw the marks as the upper strip, with a line through the areas at each."""
    num_moments, has_edges = len(course.phases), len(course.marks) <= MOST_EDGES
    ends = [*(place for place, _ in course.marks[1:]), num_moments]
    for number, ((begin, name), end) in enumerate(zip(course.marks, ends, strict=True)):
        colour, edge = _MARKS[number % 2], 0.5 if has_edges else 0.0
        strips.broken_barh([(begin, end - begin)], (1, 1), facecolor=colour, edgecolor="#D0D0D0", linewidth=edge)
        short = name.rsplit(" ", maxsplit=1)[-1]
        if not _label(strips, (begin, end), 1.5, name, num_moments) and short.isdecimal():
            _label(strips, (begin, end), 1.5, short, num_moments)
        if has_edges:
            areas.axvline(begin, color="white", linewidth=0.9, alpha=0.75, zorder=3)
    strips.set_ylim(0, 2 if course.marks else 1)
    strips.set_yticks([])
    strips.tick_params(axis="x", length=0, labelbottom=False)
    strips.spines[:].set_visible(False)


def _label(strips: Axes, span: tuple[int, int], height: float, name: str, num_moments: int) -> bool:
    """Write a name into a stretch of a strip if it fits; return whether it fits."""
    begin, end = span
    fits = end - begin >= LETTER_SHARE * (len(name) + 1) * num_moments
    if fits:
        strips.text((begin + end) / 2, height, name, ha="center", va="center_baseline", fontsize=7.5, clip_on=True)
    return fits


def _draw_areas_legend(areas: Axes, course: MemoryTimeline, colours: Mapping[str, str]) -> None:
    """List the areas from top to bottom, with the memory of each at the peak."""
    at_peak = course.at(course.peak_moment)
    areas.legend(
        handles=[
            Patch(facecolor=colours[name], label=f"{name}\n{in_bytes(at_peak[name])}")
            for name in reversed(course.categories)
        ],
        title="at the peak",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.03),
        labelspacing=0.7,
        handlelength=1.1,
        handleheight=1.6,
        alignment="left",
    )


def _draw_phases_legend(strips: Axes, areas: Axes, phases: Sequence[str]) -> None:
    """List the phases whose names did not fit into the strip."""
    if phases:
        strips.legend(
            handles=[Patch(facecolor=_PHASES[name], label=_phase_name(name)) for name in phases],
            title="meanwhile",
            loc="lower left",
            bbox_to_anchor=(1.01, -0.03),
            bbox_transform=areas.transAxes,
            handlelength=1.1,
            alignment="left",
        ).set_in_layout(False)  # the other legend has already reserved this space


def _phase_name(phase: str) -> str:
    return "load" if phase == "setup" else phase


def _unit(num_bytes: int) -> tuple[float, str]:
    """Return the unit in which a number of bytes has three digits at most, and its name."""
    name = in_bytes(num_bytes).split()[-1]
    return 1024.0 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB").index(name), name
