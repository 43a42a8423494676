"""Programs of allocations and frees, drawn by Hypothesis, with their memory counted in the simplest way."""

from collections.abc import Callable
from typing import get_args

from hypothesis import strategies as st

from anybatch.memory.trace import Allocation, Category, MemoryTrace, Phase

Coefficients = tuple[int, int]
"""A size is `a + b m`."""


def size_at(coefficients: Coefficients, m: int) -> int:
    """Return the bytes of an allocation."""
    constant, slope = coefficients
    return constant + slope * m


def trace_of(program: list[tuple[Coefficients, int]], m: int) -> MemoryTrace:
    """Return a program's trace at micro-batch size `m`; each entry is (size, later allocations until it is freed)."""
    categories, phases = get_args(Category), get_args(Phase)
    allocations = []
    events: list[int] = []
    marks: list[tuple[int, str]] = []
    for number, (coefficients, _) in enumerate(program):
        kind = number % 3
        allocations.append(
            Allocation(size_at(coefficients, m), categories[number % len(categories)], phases[kind], f"aten.op{kind}")
        )
        events.append(number + 1)
        ended = [one for one, (_, lifetime) in enumerate(program[: number + 1]) if one + lifetime == number]
        events += [-(one + 1) for one in ended]
        if kind == 0:
            marks.append((len(events), f"after {number}"))
    return MemoryTrace(tuple(allocations), tuple(events), tuple(marks))


def held_after_each_event(trace: MemoryTrace) -> list[int]:
    """Return the live bytes after each event, counted one by one."""
    held: set[int] = set()
    counted = []
    for event in trace.events:
        if event > 0:
            held.add(event - 1)
        else:
            held.remove(-event - 1)
        counted.append(sum(trace.allocations[number].num_bytes for number in held))
    return counted


def programs() -> st.SearchStrategy[list[tuple[Coefficients, int]]]:
    """Return a strategy of programs with at least one allocation; some are never freed."""
    sizes = st.tuples(st.integers(0, 5000), st.integers(0, 900))
    return st.lists(st.tuples(sizes, st.integers(0, 12)), min_size=1, max_size=25)


def largest_by_trying(peak: Callable[[int], int], budget_bytes: int, most: int) -> int:
    """Return the largest micro-batch size up to which all fit, by trying each."""
    for m in range(1, most + 1):
        if peak(m) > budget_bytes:
            return m - 1
    return most
