"""The memory envelope equals a real run at every micro-batch size, or raises."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch.errors import PlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryEnvelope, MemoryTrace, check, fit
from tests.planner.traced_programs import (
    Coefficients,
    held_after_each_event,
    largest_by_trying,
    programs,
    trace_of,
)

Program = list[tuple[Coefficients, int]]


def envelope_of(program: Program, m_a: int = 2, m_b: int = 3) -> MemoryEnvelope:
    """Return the envelope through two traces of a program."""
    return fit(trace_of(program, m_a), m_a, trace_of(program, m_b), m_b)


@given(program=programs(), sizes=st.lists(st.integers(1, 40), min_size=2, max_size=2, unique=True))
@pytest.mark.slow
def test_envelope_matches_the_run(program: Program, sizes: list[int]) -> None:
    """Sizes, peak and memory after each event match the run, also at sizes that were never traced."""
    envelope = envelope_of(program, *sizes)

    for m in (1, 2, 7, 64, 1000):
        trace = trace_of(program, m)
        assert envelope.sizes(m) == tuple(one.num_bytes for one in trace.allocations)
        assert held_after_each_event(envelope.at(m)) == held_after_each_event(trace)
        assert envelope.peak_bytes(m) == trace.peak_bytes == max(held_after_each_event(trace))


@given(program=programs(), m=st.integers(1, 50), num_bytes=st.integers(0, 10**6))
@pytest.mark.slow
def test_a_temporary_allocation_raises_the_peak(program: Program, m: int, num_bytes: int) -> None:
    """It raises the peak by its bytes, at twice the size by twice as much or slightly less, and is then freed."""
    before = envelope_of(program)
    after = before.with_temporary(m, num_bytes)

    assert after.peak_bytes(m) == before.peak_bytes(m) + num_bytes
    assert after.at_peak(m).by_category["temporaries"] >= before.at_peak(m).by_category["temporaries"] + num_bytes
    assert before.peak_bytes(2 * m) <= after.peak_bytes(2 * m) <= before.peak_bytes(2 * m) + 2 * num_bytes
    assert held_after_each_event(after.at(m))[-1] == held_after_each_event(before.at(m))[-1]


@given(program=programs(), m=st.integers(1, 50))
@pytest.mark.slow
def test_categories_add_up_to_the_peak(program: Program, m: int) -> None:
    """The categories add up to the peak, and its operation is the first to reach it."""
    envelope = envelope_of(program)
    trace = trace_of(program, m)
    held = held_after_each_event(trace)
    peak = envelope.at_peak(m)

    assert peak.num_bytes == sum(peak.by_category.values()) == max(held)
    assert peak.event_index == held.index(max(held))
    assert peak.operation == trace.allocations[trace.events[peak.event_index] - 1].operation
    assert peak.phase == trace.allocations[trace.events[peak.event_index] - 1].phase
    assert peak.mark == ([""] + [name for position, name in trace.marks if position <= peak.event_index])[-1]
    there = [
        event for event in trace.events[: peak.event_index + 1] if -event not in trace.events[: peak.event_index + 1]
    ]
    pieces = [trace.allocations[event - 1] for event in there if event > 0]
    for name, num_bytes in peak.by_category.items():
        assert num_bytes == sum(piece.num_bytes for piece in pieces if piece.category == name)


@given(
    program=programs(),
    budget=st.integers(0, 200_000),
    just_fits=st.none() | st.integers(1, 99),
)
@pytest.mark.slow
def test_largest_matches_a_search(program: Program, budget: int, just_fits: int | None) -> None:
    """`largest` matches a search that tries each size; None if all sizes fit."""
    if just_fits is not None:
        budget = trace_of(program, just_fits).peak_bytes
    envelope = envelope_of(program)
    tried = largest_by_trying(lambda m: trace_of(program, m).peak_bytes, budget, 300)
    found = envelope.largest(budget)

    assert min(300, 300 if found is None else found) == tried
    if found is None:
        assert trace_of(program, 10**6).peak_bytes == trace_of(program, 1).peak_bytes


def with_size(trace: MemoryTrace, number: int, num_bytes: int) -> MemoryTrace:
    """Return the trace with one allocation resized."""
    allocations = list(trace.allocations)
    allocations[number] = dataclasses.replace(allocations[number], num_bytes=num_bytes)
    return dataclasses.replace(trace, allocations=tuple(allocations))


PROGRAM: Program = [((100, 10), 3), ((0, 64), 1), ((40, 0), 9)]


def test_nonlinear_growth_is_refused() -> None:
    """Sizes that are not linear in the micro-batch size raise with the operation."""
    squares = {m: with_size(trace_of(PROGRAM, m), 1, m**2) for m in (2, 3, 4)}

    with pytest.raises(PlanError, match=r"aten.op1 \(forward\) took 16 bytes instead of 14"):
        check(fit(squares[2], 2, squares[3], 3), squares[4], 4)


def test_different_operations_are_refused() -> None:
    """Programs that differ in an operation, in a free or in length raise with the allocation."""
    trace = trace_of(PROGRAM, 2)
    other = dataclasses.replace(trace.allocations[1], operation="aten.other")
    renamed = dataclasses.replace(trace, allocations=(trace.allocations[0], other, trace.allocations[2]))
    longer = trace_of([*PROGRAM[:1], ((0, 64), 0), *PROGRAM[2:]], 3)
    shorter = dataclasses.replace(trace_of(PROGRAM, 3), events=trace.events[:-1])

    for second, number in ((renamed, 1), (longer, 1), (shorter, 1)):
        with pytest.raises(PlanError, match=f"allocation {number} is"):
            fit(trace, 2, second, 3)


def test_order_of_frees_does_not_matter() -> None:
    """Frees between two allocations may come in any order."""
    program: Program = [((1, 1), 2), ((2, 1), 1), ((3, 1), 9)]
    trace = dataclasses.replace(trace_of(program, 2), marks=())
    swapped = dataclasses.replace(trace_of(program, 3), events=(*trace.events[:3], *trace.events[:2:-1]), marks=())

    assert swapped.events != trace.events
    assert fit(trace, 2, swapped, 3).peak_bytes(4) == trace_of(program, 4).peak_bytes


def test_nothing_has_no_peak() -> None:
    """An empty trace has no memory and no peak."""
    nothing = fit(MemoryTrace((), ()), 2, MemoryTrace((), ()), 3)

    assert nothing.peak_bytes(5) == 0
    assert nothing.largest(0) is None
    with pytest.raises(PlanError, match="the trace is empty"):
        nothing.at_peak(5)


def traced_step(m: int) -> MemoryTrace:
    """Return the trace of a forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(m, 8)
    ledger = MemoryLedger()
    ledger.categorize("weights", model.parameters())
    ledger.categorize("inputs", [x])
    with ledger:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        del out, loss
        ledger.mark("backward done")
        ledger.categorize("gradients", [p.grad for p in model.parameters() if p.grad is not None])
    trace = ledger.trace()
    ledger.forget()
    return trace


def test_real_steps_are_predicted() -> None:
    """Two traces of a real step predict the peak at other sizes exactly."""
    envelope = fit(traced_step(2), 2, traced_step(3), 3)
    check(envelope, traced_step(32), 32)

    for m in (7, 64):
        assert envelope.peak_bytes(m) == traced_step(m).peak_bytes
        assert sum(envelope.at_peak(m).by_category.values()) == envelope.peak_bytes(m)
