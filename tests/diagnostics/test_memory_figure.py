"""The memory figure shows the recorded timeline without losing its peaks."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from anybatch.diagnostics.memory_pictures import draw_areas, draw_memory, highest_moments
from anybatch.errors import UserError
from anybatch.memory.trace import Allocation, MemoryTimeline, MemoryTrace, Phase, timeline
from tests.raising import raises

MIB = 2**20
PICTURE: Any = {"title": "the title", "subtitle": "the line below", "limit_bytes": 40 * MIB, "headroom": 0.15}


def course(num_micro_batches: int = 3) -> MemoryTimeline:
    """Return the timeline of micro-batches that allocate 10, 20 and 5 MiB each, with 8 MiB of weights."""
    pieces = [Allocation(8 * MIB, "weights", "setup", "")]
    events, marks = [1], []
    for number in range(num_micro_batches):
        marks.append((len(events), f"micro-batch {number + 1}"))
        taken: list[tuple[int, Phase]] = [(10, "forward"), (20 + (number == 1), "forward"), (5, "backward")]
        for size, phase in taken:
            pieces.append(Allocation(size * MIB, "activations", phase, f"aten.made_of_{size}.default"))
            events.append(len(pieces))
        events += [-len(pieces), 1 - len(pieces), 2 - len(pieces)]
    return timeline(MemoryTrace(tuple(pieces), tuple(events), tuple(marks)))


def words(path: Path) -> str:
    """Return the text of an SVG."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))


def test_a_figure_has_its_labels(tmp_path: Path) -> None:
    """The figure labels categories with their bytes, micro-batches, phases, the peak's operation and the limit.

    The same timeline gives the same file, byte for byte.
    """
    path, again = tmp_path / "folder" / "memory.svg", tmp_path / "again.svg"
    draw_memory(course(), path, **PICTURE)
    draw_memory(course(), again, **PICTURE)

    said = words(path)
    for word in ("the title", "the line below", "weights", "8.00 MiB", "activations", "36.0 MiB", "micro-batch 2"):
        assert word in said
    for word in ("forward", "backward", "peak 44.0 MiB", "aten.made_of_5.default", "limit 40.0 MiB", "headroom of 15%"):
        assert word in said
    assert path.read_bytes() == again.read_bytes()


def test_areas_match_the_memory() -> None:
    """The top edge of the areas is the total in MiB, and each area is a category."""
    found = course()
    areas = Figure().subplots()
    draw_areas(areas, found)
    weights, activations = (torch.tensor(area.get_paths()[0].vertices) for area in areas.collections)

    assert weights[:, 1].max() == 8
    assert activations[:, 1].max() == found.peak_bytes / MIB == 44
    assert found.peak_moment in activations[activations[:, 1] == 44][:, 0].tolist()


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported extension raises, and so does a missing matplotlib; no folder is created."""
    with raises(UserError, "picture_format"):
        draw_memory(course(), tmp_path / "folder" / "memory.gif", **PICTURE)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with raises(UserError, "needs_matplotlib"):
        draw_memory(course(), tmp_path / "folder" / "memory.png", **PICTURE)
    assert not list(tmp_path.iterdir())


@given(totals=st.lists(st.integers(0, 9), min_size=1, max_size=200), num_columns=st.integers(1, 50))
def test_peaks_are_drawn(totals: list[int], num_columns: int) -> None:
    """A long timeline keeps its peak, both ends and the highest moment of each interval, in order."""
    moments = highest_moments(torch.tensor(totals), num_columns).tolist()

    assert moments == sorted(set(moments))
    assert {moments[0], moments[-1]} == {0, len(totals) - 1}
    assert max(totals) == max(totals[moment] for moment in moments)
    assert len(moments) <= max(num_columns + 2, 0) or len(totals) <= num_columns
    if len(totals) > num_columns:
        width = -(-len(totals) // num_columns)
        for begin in range(len(totals) - 2 * width):
            assert any(begin <= moment < begin + 2 * width for moment in moments)
