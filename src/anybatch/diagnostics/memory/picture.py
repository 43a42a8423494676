"""Memory over the course of a step as a picture: measured or planned, stacked by category."""

from dataclasses import dataclass
from pathlib import Path

from anybatch.events.matplotlib_files import import_drawing
from anybatch.memory.timeline import MemoryTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """Title, limits and labels of the drawing of a timeline."""

    title: str
    below: str = ""
    limit_bytes: int | None = None
    headroom: float | None = None


def draw_memory(course: MemoryTimeline, picture: MemoryPicture, path: Path) -> None:
    """Draw memory over the course of a step as stacked areas, with its phases, its marks and its peak.

    The same timeline gives the same SVG, byte for byte, with the same matplotlib.
    """
    drawing = import_drawing("anybatch.diagnostics.memory.stacked_areas", [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(course, picture, path)
