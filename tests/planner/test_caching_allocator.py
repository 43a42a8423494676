"""The model of CUDA's caching allocator, checked against a slow version, worked examples and invariants."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.memory.trace import fit
from anybatch.planner.caching_allocator import largest_that_fits, replay
from tests.planner.naive_allocator import replay_naively
from tests.planner.traced_programs import trace_of

MIB = 1 << 20
SIZES = (
    st.integers(1, 4000)
    | st.sampled_from([512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB - 511, 10 * MIB, 20 * MIB])
    | st.integers(MIB // 2, 3 * MIB)
    | st.integers(5 * MIB, 45 * MIB)
)


class Case(NamedTuple):
    """A trace: its events, the size of each allocation, and the stream of each allocation."""

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    streams: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn, num_streams: int = 2) -> Case:
    """Draw a trace of up to 30 allocations, with frees between them in any order."""
    sizes: list[int] = []
    events: list[int] = []
    live: list[int] = []
    for choice in draw(st.lists(st.integers(0, 99), max_size=60)):
        if live and choice % 2:
            events.append(-live.pop(choice // 2 % len(live)))
        else:
            sizes.append(draw(SIZES))
            events.append(len(sizes))
            live.append(len(sizes))
    streams = draw(st.lists(st.integers(0, num_streams - 1), min_size=len(sizes), max_size=len(sizes)))
    return Case(tuple(events), tuple(sizes), tuple(streams))


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@given(case=cases(), limit=st.none() | st.integers(1, 200).map(MIB.__mul__))
def test_it_matches_the_slow_allocator(*, expandable: bool, case: Case, limit: int | None) -> None:
    """Peaks, retries and the point of running out of memory match an allocator that searches all memory every time."""
    found = replay(case.events, case.sizes, limit_bytes=limit, expandable=expandable, pools=case.streams)

    assert (
        found.peak_reserved_bytes,
        found.peak_allocated_bytes,
        found.num_retries,
        found.full_at,
    ) == replay_naively(case.events, case.sizes, limit, case.streams, expandable=expandable)


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@given(case=cases())
@pytest.mark.slow
def test_freed_memory_is_merged(*, expandable: bool, case: Case) -> None:
    """After everything is freed, one allocation can use all reserved memory, in whole segments or pages."""
    freed = [-(number + 1) for number in range(len(case.sizes)) if -(number + 1) not in case.events]
    peak = replay(case.events, case.sizes, expandable=expandable).peak_reserved_bytes
    events, sizes = (*case.events, *freed, len(case.sizes) + 1), (*case.sizes, peak)
    is_whole = peak % (20 * MIB) == 0 if expandable else peak >= 10 * MIB or not peak

    assert replay(events, sizes, limit_bytes=peak, expandable=expandable).fits == is_whole


def test_segments_by_hand() -> None:
    """1 byte takes 512 of a 2 MiB segment; two allocations of 5 MiB share one of 20 MiB; 11 MiB take one of 12."""
    events, sizes = (1, 2, 3, 4), (1, 5 * MIB, 5 * MIB, 11 * MIB)
    found = replay(events, sizes)

    assert found.peak_reserved_bytes == (2 + 20 + 12) * MIB
    assert found.peak_allocated_bytes == 512 + (5 + 5 + 12) * MIB  # the rest of 1 MiB is not split off


def test_fragmented_memory_runs_out() -> None:
    """Two separate free pieces of 30 MiB cannot hold 40 MiB, unless segments are expandable."""
    events = (1, 2, 3, -1, -3, 4)
    sizes = (30 * MIB, 12 * MIB, 30 * MIB, 40 * MIB)

    assert replay(events, sizes, limit_bytes=72 * MIB).num_retries == 1
    assert replay(events, sizes, limit_bytes=72 * MIB).fits
    inside = (5, -5, 1, 2, 3, -1, -3, 4)  # all three in one segment, which cannot be returned to the device
    assert replay(inside, (*sizes, 72 * MIB), limit_bytes=72 * MIB).full_at == 7
    assert replay(inside, (*sizes, 72 * MIB), limit_bytes=100 * MIB, expandable=True).fits


def test_empty_allocations_need_no_memory() -> None:
    """An allocation of zero bytes is skipped, even with no memory at all."""
    assert replay((1, -1), (0,), limit_bytes=0).peak_reserved_bytes == 0


@given(
    slopes=st.lists(st.tuples(st.integers(0, 4 * MIB), st.integers(0, 6)), min_size=1, max_size=12),
    limit=st.integers(1, 400).map(MIB.__mul__),
    expandable=st.booleans(),
)
@pytest.mark.slow
def test_the_largest_fits(*, slopes: list[tuple[int, int]], limit: int, expandable: bool) -> None:
    """The batch size found fits and is at most the one by tensor sizes; the next one does not fit, or exceeds that."""
    program = [((100 * MIB, 0), 99), *(((0, slope), lifetime) for slope, lifetime in slopes)]
    envelope = fit(trace_of(program, 2), 2, trace_of(program, 3), 3)
    most = envelope.largest(limit)
    found = largest_that_fits(envelope, limit, expandable=expandable)

    if found is None:
        assert most is None
        return
    assert most is None or found <= most
    if found:
        assert replay(envelope.trace.events, envelope.sizes(found), limit_bytes=limit, expandable=expandable).fits
    following = replay(envelope.trace.events, envelope.sizes(found + 1), limit_bytes=limit, expandable=expandable)
    assert not following.fits or found + 1 == most
