"""The memory of a step as bars of text by purpose, or as a picture of areas over time."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from anybatch.core.units import in_bytes
from anybatch.events.matplotlib_files import import_drawing
from anybatch.memory.trace import MemoryTimeline

_NUM_CELLS = 40
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
_OTHER_COLOURS = ("#CC79A7", "#8C5A3C", "#5C7A29", "#8C8C8C", "#3B3B3B", "#B9A6D9")


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


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, the same in figures and on terminals.

    Shades of the palette of Okabe and Ito, which colour-blind readers can distinguish. Persistent categories have cool
    colours, and temporary categories warm colours; unknown names get the remaining colours in order.
    """
    others = itertools.cycle(_OTHER_COLOURS)
    return {name: _COLOURS.get(name) or next(others) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """Title, limits and labels of the drawing of a timeline."""

    title: str
    subtitle: str = ""
    limit_bytes: int | None = None
    headroom: float | None = None


def draw_memory(timeline: MemoryTimeline, picture: MemoryPicture, path: Path) -> None:
    """Draw the memory during a step as stacked areas, with phases, marks and peak.

    The same timeline gives the same SVG, byte for byte, if the matplotlib version is the same.
    """
    drawing = import_drawing("anybatch.diagnostics.stacked_areas", [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(timeline, picture, path)
