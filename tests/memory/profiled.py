"""What torch's CPU allocator hands out, as its profiler sees it: the measure that the ledger is held against."""

import gc
import math
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def most_allocated(run: Callable[[], object], within: str | None = None) -> int:
    """Return the most that is allocated at once during a call.

    Args:
        run: the call; what was allocated before it is not counted.
        within: name of the `record_function` to look at; all that `run` allocates before it counts.
    """
    gc.collect()  # what an earlier profile saw being taken would be seen being let go in this one
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    events: list[Any] = list(profiler.profiler.kineto_results.events())
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == within]
    (start, stop) = spans[0] if within else (0, math.inf)
    held = most = 0
    for moment, num_bytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        held += num_bytes
        if start <= moment <= stop:
            most = max(most, held)
    return most
