"""The memory of a step as a picture: a stacked bar by purpose, or areas over time."""

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from anybatch.core.units import in_bytes, shortened
from anybatch.events.matplotlib_files import import_drawing
from anybatch.memory.trace import MemoryTimeline

_WIDTH = 80
_GAP = "   "
_NAME_WIDTH = 18
_LEAST_WIDTH = 12
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


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the bar: its glyph, name, bytes, share of the whole, cells and colour."""

    glyph: str
    name: str
    num_bytes: int
    share: float
    num_cells: int
    colour: str

    def words(self, name_width: int) -> str:
        """Return name, bytes and percent, in columns."""
        percent = "<0.1" if 0 < self.share < 0.001 else f"{100 * self.share:.1f}"  # noqa: PLR2004 (rounds to 0.0)
        return f"{shortened(self.name, name_width):<{name_width}} {in_bytes(self.num_bytes):>9} {percent:>5}%"


class MemoryBar:
    """A stacked bar; `print` it, or give it to a console of rich.

    Printed, it is letters, which every pipe can carry: each piece is drawn in the letter that stands before its name.
    A terminal with colours gets blocks of them.

    Args:
        num_bytes: bytes by category, in the order of the bar.
        total_bytes: memory of the device; None draws the parts alone. Where the parts exceed it, an arrow below the bar
            shows it.
    """

    def __init__(self, num_bytes: Mapping[str, int], total_bytes: int | None = None) -> None:
        self._num_bytes = {name: size for name, size in num_bytes.items() if size > 0}
        self._total_bytes = total_bytes

    def __str__(self) -> str:
        """Return the bar in letters, 80 columns wide."""
        return "\n".join(text.plain.rstrip() for text in self._drawn(_WIDTH, blocks=False))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the bar in the width at hand."""
        in_colour = console.color_system is not None and not console.no_color
        yield from self._drawn(options.max_width, blocks=in_colour and not options.ascii_only)

    def _drawn(self, width: int, *, blocks: bool) -> Iterator[Text]:
        """Yield the bar, the arrow if there is one, and the legend, as lines."""
        width = max(width, _LEAST_WIDTH)
        parts = self._parts(width - 2, blocks=blocks)
        left, right = ("▕", "▏") if blocks else ("[", "]")
        pieces = [(part.glyph * part.num_cells, part.colour) for part in parts]
        yield _line(left, *pieces, right)
        total = sum(self._num_bytes.values())
        if self._total_bytes is not None and total > self._total_bytes:
            place = 1 + round((width - 2) * self._total_bytes / total)
            note = f"{in_bytes(self._total_bytes)} is what there is"
            # Without room on the right, the note goes to the left of the arrow.
            before = place + len(note) + 2 > width
            yield _line(f"{note} ^".rjust(place + 1) if before else f"{'':{place}}^ {note}")
        yield from _legend(parts, width)

    def _parts(self, num_cells: int, *, blocks: bool) -> list[_Part]:
        total = sum(self._num_bytes.values())
        # If the parts exceed the device, the bar shows only the parts.
        whole = max(total, self._total_bytes or 0)
        sizes = dict(self._num_bytes)
        glyphs = ["█"] * len(sizes) if blocks else _letters(sizes)
        colours = colours_of(sizes)
        if whole > total:
            sizes["free"] = whole - total
            glyphs.append("░" if blocks else ".")
            colours["free"] = "bright_black"
        cells = cells_of(list(sizes.values()), num_cells)
        return [
            _Part(glyph, name, size, size / whole, num, colours[name])
            for glyph, (name, size), num in zip(glyphs, sizes.items(), cells, strict=True)
        ]


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, the same in figures and on terminals.

    Shades of the palette of Okabe and Ito, which colour-blind readers can distinguish. Persistent categories have cool
    colours, temporary ones warm colours; other names get further colours in order.
    """
    others = itertools.cycle(_OTHER_COLOURS)
    return {name: _COLOURS.get(name) or next(others) for name in names}


def cells_of(sizes: Sequence[int], num_cells: int) -> list[int]:
    """Return how many of `num_cells` cells each size gets: in proportion, at least one, all of them together.

    Largest remainders first; a size that is too small for a cell takes it from the one that has most.
    """
    whole = sum(sizes)
    if not whole:
        return [0] * len(sizes)
    cells = [num_cells * size // whole for size in sizes]
    remainders = sorted(range(len(sizes)), key=lambda number: -(num_cells * sizes[number] % whole))
    for number in remainders[: num_cells - sum(cells)]:
        cells[number] += 1
    # A part of less than a cell would vanish from the bar while the legend still names it.
    for number, size in enumerate(sizes):
        if size and not cells[number] and max(cells) > 1:
            cells[cells.index(max(cells))] -= 1
            cells[number] = 1
    return cells


def _legend(parts: Sequence[_Part], width: int) -> Iterator[Text]:
    """Yield the legend in columns that fit the width, filled from top to bottom."""
    if not parts:
        return
    name_width = min(_NAME_WIDTH, max(len(part.name) for part in parts), max(4, width - 20))
    entries = [Text.assemble(" ", (part.glyph, part.colour), " ", part.words(name_width)) for part in parts]
    entry_width = entries[0].cell_len
    num_columns = max(1, (width + len(_GAP)) // (entry_width + len(_GAP)))
    num_rows = -(-len(entries) // num_columns)
    for row in range(num_rows):
        yield _line(*[piece for entry in entries[row::num_rows] for piece in (entry, _GAP)][:-1])


def _letters(names: Iterable[str]) -> list[str]:
    """Return a letter for each name, unique while letters last."""
    found: list[str] = []
    for name in names:
        candidates = (*name.lower(), *string.ascii_lowercase, *string.digits)
        found.append(next((one for one in candidates if one.isascii() and one.isalnum() and one not in found), "?"))
    return found


def _line(*pieces: str | tuple[str, str] | Text) -> Text:
    return Text.assemble(*pieces, no_wrap=True, overflow="crop")


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
    drawing = import_drawing("anybatch.diagnostics.stacked_areas", [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(course, picture, path)
