"""Peak memory of torch's CPU allocator, measured by its profiler, to check the ledger against."""

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile


def most_allocated(run: Callable[[], object], within: str | None = None) -> int:
    """Return the peak of memory allocated during a call.

    Frees of blocks that were allocated before the call do not count, such as a cycle that an earlier test left and that
    is garbage-collected during the call.

    Args:
        run: the call; memory allocated before it is not counted.
        within: name of the `record_function` to look at; all that `run` allocates before it counts.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    kineto: Any = profiler.profiler
    events = sorted(_all(kineto.kineto_results.experimental_event_tree()), key=lambda one: one.start_time_ns)
    spans = [(event.start_time_ns, event.end_time_ns) for event in events if event.name == within]
    (start, stop) = spans[0] if within else (0, math.inf)
    taken: dict[int, int] = {}
    held = most = 0
    for event in events:
        if event.name != "[memory]":
            continue
        block = event.extra_fields
        held += max(block.alloc_size, 0) - taken.pop(block.ptr, 0)
        if block.alloc_size > 0:
            taken[block.ptr] = block.alloc_size
        if start <= event.start_time_ns <= stop:
            most = max(most, held)
    return most


def _all(events: list[Any]) -> Iterator[Any]:
    """Yield events and their descendants."""
    for event in events:
        yield event
        yield from _all(event.children)
