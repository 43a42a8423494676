"""Memory over the course of a step as a page takes it: its peak, and few enough of its moments to draw."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from anybatch.memory.timeline import ORDER, MemoryTimeline
from anybatch.memory.trace import Category


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
    """Return a course in few points: of each of so many equal stretches its highest and its lowest turn.

    No point is made up, and the highest of all is among them. Only turns are taken, where the course begins to rise or
    to fall: within one fall the order in which tensors go may differ from run to run, as it does when autocast drops
    its copies of the weights. A category that never changes is one number, any other a first value and what it changes
    by from point to point.
    """
    totals = course.totals.tolist()
    size = -(-len(totals) // num_buckets)
    stretches = itertools.groupby(_turns(totals), key=lambda moment: moment // size)
    kept = sorted(
        {
            pick(turns, key=totals.__getitem__)
            for _, stretch in stretches
            for turns in [list(stretch)]
            for pick in (max, min)
        }
        | {0, len(totals) - 1}
    )
    held = dict(zip(course.categories, course.held_bytes[kept].T.tolist(), strict=True))
    return {
        "num_moments": len(totals),
        "moments": _differences(kept),
        "held": [_differences(held.get(name, [0])) for name in ORDER],
        "marks": [list(mark) for mark in course.marks],
    }


def _turns(totals: Sequence[int]) -> list[int]:
    """Return the moments after which a course goes the other way, with its first and last."""
    turns, rises = [0], None
    for moment, (before, after) in enumerate(itertools.pairwise(totals)):
        if after != before and (after > before) is not rises:
            if rises is not None:
                turns.append(moment)
            rises = after > before
    return [*turns, len(totals) - 1]


def _differences(values: list[int]) -> list[int]:
    """Return the first value and what follows as changes; only the first if nothing changes."""
    changes = [after - before for before, after in itertools.pairwise(values)]
    return [values[0], *(changes if any(changes) else ())]
