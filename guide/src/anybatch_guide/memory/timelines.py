"""Memory timelines of a step as JSON for the page: the peak, and a limited number of points."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from anybatch.memory.trace import ORDER, Category, MemoryTimeline


def peak_of(timeline: MemoryTimeline) -> dict[str, Any]:
    """Return the peak for the page: bytes by category in stacking order, and its moment in the step."""
    moment = timeline.peak_moment
    return {
        "num_bytes": timeline.peak_bytes,
        "held": in_order(timeline.at(moment)),
        "phase": timeline.phases[moment],
        "operation": timeline.operations[moment],
        "mark": timeline.mark_before(moment),
    }


def in_order(by_category: Mapping[Category, int] | Mapping[str, int]) -> list[int]:
    """Return bytes by category as a list, in stacking order."""
    by_name: dict[str, int] = {name: size for name, size in by_category.items()}  # noqa: C416 (a mapping's keys are invariant)
    return [by_name.get(name, 0) for name in ORDER]


def downsampled(timeline: MemoryTimeline, num_buckets: int) -> dict[str, Any]:
    """Return a smaller timeline: the highest and the lowest turning point of each of `num_buckets` equal parts.

    At a turning point, memory starts to rise or to fall. Other points are dropped, because the order of frees may
    differ between runs, for example when autocast drops its copies of the weights. A constant category becomes
    one number; any other becomes its first value and the differences from point to point.
    """
    totals = timeline.totals.tolist()
    size = -(-len(totals) // num_buckets)
    buckets = itertools.groupby(_turns(totals), key=lambda moment: moment // size)
    moments = sorted(
        {
            extreme(turns, key=totals.__getitem__)
            for _, bucket in buckets
            for turns in [list(bucket)]
            for extreme in (max, min)
        }
        | {0, len(totals) - 1}
    )
    category_bytes = dict(zip(timeline.categories, timeline.held_bytes[moments].T.tolist(), strict=True))
    return {
        "num_moments": len(totals),
        "moments": _differences(moments),
        "held": [_differences(category_bytes.get(name, [0])) for name in ORDER],
        "marks": [list(mark) for mark in timeline.marks],
    }


def _turns(totals: Sequence[int]) -> list[int]:
    """Return the moments at which memory starts to rise or to fall, with the first and the last."""
    turns, rises = [0], None
    for moment, (before, after) in enumerate(itertools.pairwise(totals)):
        if after != before and (after > before) is not rises:
            if rises is not None:
                turns.append(moment)
            rises = after > before
    return [*turns, len(totals) - 1]


def _differences(values: list[int]) -> list[int]:
    """Return the first value and the differences between values; only the first value if all are equal."""
    changes = [after - before for before, after in itertools.pairwise(values)]
    return [values[0], *(changes if any(changes) else ())]
