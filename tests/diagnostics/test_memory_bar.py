"""A stacked bar of memory: every cell accounted for, readable in a pipe, in 80 columns."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anybatch.diagnostics.memory.bar import MemoryBar, cells_of, colours_of
from anybatch.memory.timeline import ORDER
from tests.faults import sees

MIB = 2**20


def shown(bar: MemoryBar, width: int, **settings: object) -> list[str]:
    """Return a bar as a terminal shows it."""
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, **settings).print(bar)  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


@sees(
    "memory report: small pieces vanish from the bar",
    "src/anybatch/diagnostics/memory/bar.py",
    "        if size and not cells[number] and max(cells) > 1:",
    "        if size and not cells[number] and max(cells) > 10**9:",
    also=["tests/diagnostics/test_memory_bar.py::test_cells_are_shared_out"],
)
def test_a_bar_in_letters() -> None:
    """Pieces are drawn in proportion in their letters, what is free in points, with bytes and percent below."""
    lines = str(MemoryBar({"weights": 20 * MIB, "activations": 10 * MIB, "inputs": 1}, 40 * MIB)).splitlines()

    assert lines == [
        "[" + "w" * 38 + "a" * 20 + "i" + "." * 19 + "]",
        " w weights      20.0 MiB  50.0%    i inputs        1 bytes  <0.1%",
        " a activations  10.0 MiB  25.0%    . free         10.0 MiB  25.0%",
    ]


def test_without_a_limit_nothing_is_free() -> None:
    """The whole is what is held, where nothing else is said."""
    lines = str(MemoryBar({"weights": 3, "buffers": 1})).splitlines()

    assert lines[0] == "[" + "w" * 59 + "b" * 19 + "]"
    assert "free" not in "".join(lines)


@pytest.mark.parametrize(
    ("held", "place"), [({"weights": 30 * MIB, "activations": 10 * MIB}, 40), ({"weights": 21 * MIB}, 75)]
)
def test_more_than_there_is(held: dict[str, int], place: int) -> None:
    """Where more is held than there is, an arrow under the bar shows what there is, and the bar is full."""
    bar, arrow, *legend = str(MemoryBar(held, 20 * MIB)).splitlines()

    assert "." not in bar
    assert arrow.index("^") == place
    assert "20.0 MiB is what there is" in arrow
    assert len(arrow) <= 80
    assert "free" not in "".join(legend)


def test_nothing_held_is_an_empty_bar() -> None:
    """Nothing of something is free, and nothing of nothing is an empty bar."""
    assert str(MemoryBar({"weights": 0}, MIB)).splitlines() == ["[" + "." * 78 + "]", " . free  1.00 MiB 100.0%"]
    assert str(MemoryBar({})) == "[" + "]"


@given(sizes=st.lists(st.integers(0, 2**45), max_size=9), num_cells=st.integers(0, 120))
def test_cells_are_shared_out(sizes: list[int], num_cells: int) -> None:
    """Cells add up, everything that is there has one where there are enough, and more bytes never get fewer cells."""
    cells = cells_of(sizes, num_cells)
    present = [(size, cell) for size, cell in zip(sizes, cells, strict=True) if size]

    assert sum(cells) == (num_cells if present else 0)
    assert all(cell == 0 for size, cell in zip(sizes, cells, strict=True) if not size)
    if num_cells >= len(present):
        assert all(cell >= 1 for _, cell in present)
    if num_cells >= 20 * len(present):  # nobody has had to give a cell away
        whole = sum(sizes)
        assert all(abs(cell - num_cells * size / whole) <= len(present) for size, cell in present)


@given(
    sizes=st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 2**45), max_size=12),
    limit=st.none() | st.integers(1, 2**45),
)
def test_any_bar_is_ascii_for_ascii_names(sizes: dict[str, int], limit: int | None) -> None:
    """Whatever it is made of, a line has at most 80 columns, and no letter stands for two things."""
    plain = {name.encode("ascii", "backslashreplace").decode(): size for name, size in sizes.items()}
    bar, *below = str(MemoryBar(plain, limit)).splitlines()

    assert bar.isascii()
    assert all(len(line) <= 80 for line in [bar, *below] if line.isprintable())
    pieces = [letter for number, letter in enumerate(bar[1:-1]) if number == 0 or bar[number] != letter]
    assert len(pieces) == len(set(pieces))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_terminal_with_colours_gets_blocks(width: int) -> None:
    """With colours there are blocks and no letters in the bar, as wide as the terminal, and the same words below."""
    bar = MemoryBar({"weights": 20 * MIB, "activations": 10 * MIB}, 40 * MIB)
    first, *below = shown(bar, width, color_system="truecolor")

    assert "█" in first
    assert "w" not in first
    assert "░" in first
    assert {"weights", "activations", "free"} <= set("".join(below).split()) or width < 30
    assert len(shown(bar, width, color_system=None)[0]) == width


def test_a_terminal_without_colours_gets_letters() -> None:
    """Where pieces cannot be told apart by colour they are letters."""
    bar = MemoryBar({"weights": 2, "activations": 2})

    assert shown(bar, 80, color_system=None) == str(bar).splitlines()
    assert "ww" in shown(bar, 80, color_system="truecolor", no_color=True)[0]


def test_colours_are_one_each() -> None:
    """Every category has a colour of its own, and so have a handful of other names."""
    names = [*ORDER, "allocator", "context", "communicator", "workspaces"]

    assert len(set(colours_of(names).values())) == len(names)
    assert colours_of(["weights"]) == {"weights": colours_of(reversed(names))["weights"]}
