"""Memory over the course of a step as a picture: measured or planned, stacked by category."""

from dataclasses import dataclass
from pathlib import Path

from anybatch.events.matplotlib_files import import_drawing
from anybatch.memory.timeline import MemoryTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """Title, limits and labels of the drawing of a timeline.

    Attributes:
        title: the first line, in bold.
        below: the line below it.
        limit_bytes: memory of the device; None for no limit.
        headroom: share of it that is to be kept free; None for no line.
        axis: what the horizontal axis counts.
    """

    title: str
    below: str = ""
    limit_bytes: int | None = None
    headroom: float | None = None
    axis: str = "pieces of memory taken and let go, in order"


def draw_memory(course: MemoryTimeline, picture: MemoryPicture, path: Path) -> None:
    """Draw memory over the course of a step as stacked areas, with its phases, its marks and its peak.

    The same timeline gives the same SVG, byte for byte, with the same matplotlib.

    Args:
        course: memory at each moment, in bytes by category.
        picture: title, limits and labels.
        path: the file, which ends in .png, .svg or .pdf.

    Raises:
        UserError: matplotlib is not installed, or the picture has another ending than .png, .svg or .pdf.
        OSError: it cannot be written.
    """
    drawing = import_drawing("anybatch.diagnostics.memory.stacked_areas", [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(course, picture, path)
