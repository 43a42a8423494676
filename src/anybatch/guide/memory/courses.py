"""Memory over the course of a step as a page takes it: its peak, and few enough of its moments to draw."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from anybatch.core.memory_model import Category
from anybatch.core.memory_timeline import ORDER, MemoryTimeline


def peak_of(course: MemoryTimeline) -> dict[str, Any]:
    """Return the peak as a page takes it: bytes by category in the order in which they are stacked, and when."""
    moment = course.peak_moment
    return {
        "num_bytes": course.peak_bytes,
        "held": in_order(course.at(moment)),
        "phase": course.phases[moment],
        "operation": course.operations[moment],
        "mark": course.mark_before(moment),
    }


def in_order(held: Mapping[Category, int] | Mapping[str, int]) -> list[int]:
    """Return bytes by category as a row, in the order in which they are stacked."""
    by_name: dict[str, int] = {name: size for name, size in held.items()}  # noqa: C416 (a mapping's keys are invariant)
    return [by_name.get(name, 0) for name in ORDER]


def drawn(course: MemoryTimeline, num_buckets: int) -> dict[str, Any]:
    """Return a course in few points: of each of so many equal stretches its highest and its lowest moment.

    No point is made up, and the highest of all is among them. A category that never changes is one number, any other
    a first value and what it changes by from point to point.
    """
    totals = course.totals
    num_moments = len(totals)
    size = -(-num_moments // num_buckets)
    kept = sorted(
        {
            start + int(pick(totals[start : start + size]))
            for start in range(0, num_moments, size)
            for pick in (torch.argmax, torch.argmin)
        }
        | {num_moments - 1}
    )
    held = dict(zip(course.categories, course.held_bytes[kept].T.tolist(), strict=True))
    return {
        "num_moments": num_moments,
        "moments": _differences(kept),
        "held": [_differences(held.get(name, [0])) for name in ORDER],
        "marks": [list(mark) for mark in course.marks],
    }


def _differences(values: list[int]) -> list[int]:
    """Return the first value and what follows as changes; only the first if nothing changes."""
    changes = [after - before for before, after in itertools.pairwise(values)]
    return [values[0], *(changes if any(changes) else ())]
