"""Memory over the course of a step as a picture: measured or planned, stacked by what it is held for."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from anybatch.errors import UserError
from anybatch.memory.timeline import MemoryTimeline

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """What stands around the drawing of a timeline.

    Attributes:
        title: the first line, in bold.
        below: the line below it.
        limit_bytes: what there is; None for no limit.
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

    Raises:
        UserError: matplotlib is not installed, or the picture has another ending than .png, .svg or .pdf.
        OSError: it cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        message = f"{path} ends in {path.suffix!r}; a picture ends in {', '.join(FORMATS)}."
        raise UserError(message)
    try:
        drawing = importlib.import_module("anybatch.diagnostics.memory.drawing")
    except ModuleNotFoundError as error:
        message = (
            f"a picture is drawn by matplotlib, and there is no module {error.name!r}. "
            "Install it: pip install 'anybatch[plot]'"
        )
        raise UserError(message) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(course, picture, path)
