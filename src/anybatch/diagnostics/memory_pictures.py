"""The memory of a step as bars of text by purpose, or as a picture of areas over time."""

from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from anybatch.core.units import in_bytes, shortened
from anybatch.events.matplotlib_files import INK, new_figure
from anybatch.memory.trace import MemoryTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_CELLS = 40
# Shades of Okabe and Ito's palette, for colour-blind readers: cool for persistent memory, warm for temporary memory.
_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#00507F",
        "buffers": "#7F6BB3",
        "optimizer": "#009E73",
        "gradients": "#56B4E9",
        "inputs": "#F0DC57",
        "activations": "#E69F00",
        "temporaries": "#D55E00",
    }
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
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
MAX_COLUMNS = 1_500
"""Maximum number of drawn columns; a longer timeline is reduced to the peak of each column."""
MAX_SHOWN_LIMIT = 1.6
"""A memory limit above this multiple of the peak is not drawn, because the axis would be mostly empty."""
MAX_MARKS = 10
"""If a timeline has more marks, none is drawn, because their names would overlap."""


def memory_bars(num_bytes: Mapping[str, int], total_bytes: int | None = None) -> str:
    """Return bytes by purpose as lines of text with bars, and how much of `total_bytes` is free."""
    sizes = {name: size for name, size in num_bytes.items() if size > 0}
    used_bytes = sum(sizes.values())
    # If more memory is used than the device has, shares are relative to the used memory.
    whole = max(used_bytes, total_bytes or 0)
    if whole > used_bytes:
        sizes["free"] = whole - used_bytes
    width = max(map(len, sizes), default=0)
    lines = []
    for name, size in sizes.items():
        bar = ("." if name == "free" else "#") * round(_NUM_CELLS * size / whole)
        lines.append(f"{name:<{width}} {in_bytes(size):>10} {size / whole:>6.1%}  {bar}".rstrip())
    if total_bytes is not None and used_bytes > total_bytes:
        lines.append(f"more than the {in_bytes(total_bytes)} that are available")
    return "\n".join(lines)


def draw_memory(
    timeline: MemoryTimeline,
    path: Path,
    *,
    title: str,
    subtitle: str,
    limit_bytes: int | None = None,
    headroom: float = 0.0,
) -> None:
    """Draw the memory during a step as stacked areas, with phases, marks, the peak, and a limit close to the peak.

    Raises:
        UserError: matplotlib is not installed, or the path does not end in .png, .svg or .pdf.
        OSError: the file cannot be written.
    """
    with new_figure([path], 11.0) as figure:
        strip, areas = figure.subplots(2, 1, height_ratios=[0.04, 1.0])
        draw_areas(areas, timeline)
        if limit_bytes is not None and limit_bytes <= MAX_SHOWN_LIMIT * timeline.peak_bytes:
            _draw_limit(areas, timeline, limit_bytes, f"limit {in_bytes(limit_bytes)}")
            if headroom:
                _draw_limit(areas, timeline, (1 - headroom) * limit_bytes, f"headroom of {100 * headroom:g}%")
        _draw_phases(strip, areas, timeline)
        for axes in (strip, areas):
            axes.set_xlim(0, max(1, len(timeline.phases) - 1))
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        strip.set_title(subtitle, loc="left", fontsize=9.5)
        for axes, name, position in ((areas, "at the peak", "upper"), (strip, "phase", "lower")):
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(
                handles, labels, title=name, loc=f"outside right {position}", fontsize=9, reverse=axes is areas
            )


def draw_areas(areas: "Axes", timeline: MemoryTimeline) -> None:
    """Draw the memory over time by purpose, and its peak with the operation that allocated last before it."""
    moment, unit_bytes = timeline.peak_moment, _unit_bytes(timeline)
    at_peak = timeline.at(moment)
    moments = highest_moments(timeline.totals, MAX_COLUMNS)
    areas.stackplot(
        moments.tolist(),
        (timeline.held_bytes[moments].T / unit_bytes).tolist(),
        labels=[f"{name}\n{in_bytes(size)}" for name, size in at_peak.items()],
        colors=[_COLOURS[name] for name in at_peak],
        step="post",  # memory is constant between two events
        linewidth=0,
        zorder=2,
    )
    areas.set_ylim(0, 1.14 * timeline.peak_bytes / unit_bytes)  # from 0, so that areas are proportional to memory
    areas.set_ylabel(in_bytes(timeline.peak_bytes).split()[-1])
    areas.set_xlabel("allocations and frees, in order")
    for axis in (areas.xaxis, areas.yaxis):
        axis.set_major_formatter("{x:,.10g}")
    areas.grid(visible=True, axis="y", linewidth=0.6, zorder=0)
    peak = (moment, timeline.peak_bytes / unit_bytes)
    is_late = moment > len(timeline.phases) / 2
    areas.plot(*peak, "o", color=INK, markersize=5, markeredgecolor="white", clip_on=False, zorder=8)
    areas.annotate(
        f"peak {in_bytes(timeline.peak_bytes)}\n{shortened(timeline.operations[moment], 44)}".rstrip(),
        peak,
        xytext=(-8 if is_late else 8, 7),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.82, "edgecolor": "none", "pad": 1.5},
        zorder=7,
    )


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


def _draw_limit(areas: "Axes", timeline: MemoryTimeline, num_bytes: float, label: str) -> None:
    height = num_bytes / _unit_bytes(timeline)
    areas.set_ylim(0, max(areas.get_ylim()[1], 1.1 * height))
    areas.axhline(height, color=INK, linewidth=1, linestyle="--", zorder=5)
    areas.text(0.005, height, label, transform=areas.get_yaxis_transform(), va="bottom", fontsize=8.5, zorder=6)


def _draw_phases(strip: "Axes", areas: "Axes", timeline: MemoryTimeline) -> None:
    """Draw the phases as a strip, with the marks above the strip and a line through the areas at each mark."""
    lengths = [(phase, len(list(run))) for phase, run in groupby(timeline.phases)]
    starts = accumulate((length for _, length in lengths), initial=0)
    runs = [(phase, (start, length)) for (phase, length), start in zip(lengths, starts, strict=False)]
    for phase in dict.fromkeys(timeline.phases):
        widths = [width for name, width in runs if name == phase]
        strip.broken_barh(widths, (0, 1), facecolor=_PHASES[phase], label="load" if phase == "setup" else phase)
    marks = timeline.marks if len(timeline.marks) <= MAX_MARKS else ()
    for moment, _ in marks:
        areas.axvline(moment, color="white", linewidth=0.9, alpha=0.75, zorder=3)
    strip.set_xticks([moment for moment, _ in marks], [name for _, name in marks], fontsize=7.5, ha="left")
    strip.xaxis.tick_top()
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.spines[:].set_visible(False)


def _unit_bytes(timeline: MemoryTimeline) -> float:
    """Return the bytes of the unit in which the peak is printed."""
    return 1024.0 ** _UNITS.index(in_bytes(timeline.peak_bytes).split()[-1])
