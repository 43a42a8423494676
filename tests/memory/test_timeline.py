"""The timeline of memory is the running sum of allocations and frees by category."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.units import Reserve
from anybatch.memory.trace import ORDER, Allocation, Category, MemoryTrace, Phase, timeline

KIB = 1024


@st.composite
def traces(draw: st.DrawFn) -> MemoryTrace:
    """Draw a trace in which each allocation is freed at most once."""
    num_pieces = draw(st.integers(1, 12))
    pieces = tuple(
        Allocation(
            num_bytes=draw(st.integers(1, 5)) * KIB,
            category=draw(st.sampled_from(get_args(Category))),
            phase=draw(st.sampled_from(get_args(Phase))),
            operation=draw(st.sampled_from(["", "aten.mm.default"])),
        )
        for _ in range(num_pieces)
    )
    events: list[int] = []
    live: list[int] = []
    for number in range(num_pieces):
        events.append(number + 1)
        live.append(number + 1)
        num_let_go = draw(st.integers(0, len(live)))
        events.extend(-live.pop(draw(st.integers(0, len(live) - 1))) for _ in range(num_let_go))
    return MemoryTrace(pieces, tuple(events))


def walked(trace: MemoryTrace) -> list[dict[str, int]]:
    """Return the memory held after each event, with one counter per category."""
    held = dict.fromkeys(get_args(Category), 0)
    course = []
    for event in trace.events:
        piece = trace.allocations[abs(event) - 1]
        held[piece.category] += piece.num_bytes if event > 0 else -piece.num_bytes
        course.append(dict(held))
    return course


@pytest.mark.slow
@given(trace=traces())
def test_a_timeline_matches_counters(trace: MemoryTrace) -> None:
    """At every moment, each category matches counters updated event by event."""
    course, expected = timeline(trace), walked(trace)
    expected = expected[len(expected) - len(course.phases) :]

    for moment, held in enumerate(expected):
        assert {name: size for name, size in held.items() if size} == {
            name: size for name, size in course.at(moment).items() if size
        }
    assert course.totals.tolist() == [sum(held.values()) for held in expected]
    assert course.peak_bytes == trace.peak_bytes == course.totals[course.peak_moment]
    assert course.peak_moment == course.totals.tolist().index(trace.peak_bytes)
    assert list(course.categories) == [name for name in ORDER if any(held[name] for held in walked(trace))]


def test_earlier_allocations_are_one_moment() -> None:
    """Allocations without an operation at the start become the first moment, and marks move with the moments."""
    weight = Allocation(4, "weights", "setup", "")
    made = Allocation(8, "activations", "forward", "aten.mm.default")
    kept = Allocation(2, "gradients", "backward", "aten.mul.Tensor")
    trace = MemoryTrace((weight, weight, made, kept), (1, 2, 3, 4, -3), ((2, "begin"), (3, "middle"), (5, "end")))

    course = timeline(trace)

    assert course.totals.tolist() == [8, 16, 18, 10]
    assert course.phases == ["setup", "forward", "backward", "backward"]
    assert course.operations == ["", "aten.mm.default", "aten.mul.Tensor", ""]
    assert course.marks == ((1, "begin"), (2, "middle"), (4, "end"))
    assert [course.mark_before(moment) for moment in range(4)] == [None, "begin", "middle", "middle"]
    assert course.at(course.peak_moment) == {"weights": 8, "gradients": 2, "activations": 8}


def test_an_empty_trace_is_refused() -> None:
    """A trace without events raises."""
    with pytest.raises(ValueError, match="no events"):
        timeline(MemoryTrace((), ()))


@given(
    limit=st.integers(1, 2**45),
    share=st.floats(0.0, 1.5),
    headroom=st.floats(0.0, 0.9),
)
def test_headroom_is_kept_up_to_its_last_byte(limit: int, share: float, headroom: float) -> None:
    """The headroom is kept exactly if the peak is at most the rest of the limit."""
    peak = int(share * limit)
    reserve = Reserve(peak, limit, headroom)

    assert reserve.kept == (peak <= (1.0 - headroom) * limit)
    assert reserve.left == 1.0 - peak / limit
