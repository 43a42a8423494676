"""A stacked memory bar adds up, and is readable as plain text in 80 columns."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anybatch.diagnostics.memory_pictures import MemoryBar, cells_of, colours_of
from anybatch.memory.trace import ORDER

MIB = 2**20


def shown(bar: MemoryBar, width: int, **settings: object) -> list[str]:
    """Return a bar as a terminal shows it."""
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, **settings).print(bar)  # type: ignore[arg-type]
    return stream.getvalue().splitlines()


def test_a_bar_in_letters() -> None:
    """Letters show categories in proportion and dots show free memory, with bytes and percentages below."""
    lines = str(MemoryBar({"weights": 20 * MIB, "activations": 10 * MIB, "inputs": 1}, 40 * MIB)).splitlines()

    assert lines == [
        "[" + "w" * 38 + "a" * 20 + "i" + "." * 19 + "]",
        " w weights      20.0 MiB  50.0%    i inputs        1 bytes  <0.1%",
        " a activations  10.0 MiB  25.0%    . free         10.0 MiB  25.0%",
    ]


@pytest.mark.parametrize(
    ("held", "place"), [({"weights": 30 * MIB, "activations": 10 * MIB}, 40), ({"weights": 21 * MIB}, 75)]
)
def test_more_than_there_is(held: dict[str, int], place: int) -> None:
    """If more memory is in use than available, an arrow marks the limit, and the bar is full."""
    bar, arrow, *legend = str(MemoryBar(held, 20 * MIB)).splitlines()

    assert "." not in bar
    assert arrow.index("^") == place
    assert "20.0 MiB is what there is" in arrow
    assert len(arrow) <= 80
    assert "free" not in "".join(legend)


@given(sizes=st.lists(st.integers(0, 2**45), max_size=9), num_cells=st.integers(0, 120))
def test_cells_are_shared_out(sizes: list[int], num_cells: int) -> None:
    """Cells add up, every non-zero category gets one if there are enough, and more bytes never get fewer."""
    cells = cells_of(sizes, num_cells)
    present = [(size, cell) for size, cell in zip(sizes, cells, strict=True) if size]

    assert sum(cells) == (num_cells if present else 0)
    assert all(cell == 0 for size, cell in zip(sizes, cells, strict=True) if not size)
    if num_cells >= len(present):
        assert all(cell >= 1 for _, cell in present)
    if num_cells >= 20 * len(present):  # no category had to give up a cell
        whole = sum(sizes)
        assert all(abs(cell - num_cells * size / whole) <= len(present) for size, cell in present)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_terminal_with_colours_gets_blocks(width: int) -> None:
    """With colors the bar is drawn in blocks, as wide as the terminal, with the same text below."""
    bar = MemoryBar({"weights": 20 * MIB, "activations": 10 * MIB}, 40 * MIB)
    first, *below = shown(bar, width, color_system="truecolor")

    assert "█" in first
    assert "w" not in first
    assert "░" in first
    assert {"weights", "activations", "free"} <= set("".join(below).split()) or width < 30
    assert len(shown(bar, width, color_system=None)[0]) == width


def test_colours_are_one_each() -> None:
    """Every category has a distinct color, and so have some other names."""
    names = [*ORDER, "allocator", "context", "communicator", "workspaces"]

    assert len(set(colours_of(names).values())) == len(names)
    assert colours_of(["weights"]) == {"weights": colours_of(reversed(names))["weights"]}
