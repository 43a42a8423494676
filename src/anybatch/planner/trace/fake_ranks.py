"""A fake process group, whose collectives return immediately, and the memory that FSDP2 allocates in unusual ways."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from anybatch.errors import CannotPlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace
from anybatch.parallel.world import World
from anybatch.planner.torch_internals import imagined_store


@contextmanager
def fake_ranks(size: int, device_bytes: int | None = None) -> Iterator[World]:
    """Make this process rank 0 of `size` ranks without starting other processes.

    Args:
        size: number of ranks.
        device_bytes: memory of each rank's device; None for no limit.

    Raises:
        CannotPlanError: this process already belongs to a process group.
    """
    if size == 1:
        yield World()
        return
    if dist.is_initialized():
        message = (
            f"cannot plan, will probe: planning {size} ranks needs a fake process group, but this process is rank "
            f"{dist.get_rank()} of a real one with {dist.get_world_size()} ranks. Plan before init_process_group, or "
            "in another process."
        )
        raise CannotPlanError(message)
    hook = sys.excepthook  # torch replaces it by a hook that prints "[rank0]:", and never restores it
    dist.init_process_group("fake", rank=0, world_size=size, store=imagined_store())
    try:
        yield World(rank=0, size=size, device_bytes=device_bytes)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class StreamPools:
    """Numbers the streams that allocate memory, in order of first use.

    FSDP2 allocates its buffers for gathering and reducing in separate streams. CPU streams do nothing, but report which
    one is current.
    """

    def __init__(self) -> None:
        self._streams: list[Any] = [torch.cpu.current_stream()]

    def __call__(self) -> int:
        """Return the number of the current stream."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)


@contextmanager
def resizes_booked(ledger: MemoryLedger) -> Iterator[None]:
    """Record resized storages too: FSDP2 frees gathered weights by a resize, which is not an operation."""
    storage_class: Any = torch.UntypedStorage
    resize = storage_class.resize_

    def resize_and_book(storage: torch.UntypedStorage, num_bytes: int) -> Any:  # noqa: ANN401 (what torch returns)
        resized = resize(storage, num_bytes)
        ledger.resized("weights", storage)
        return resized

    storage_class.resize_ = resize_and_book
    try:
        yield
    finally:
        storage_class.resize_ = resize


def with_gradients(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace with temporaries that outlive their backward as gradients: FSDP2 keeps these outside `.grad`."""
    gone_at = {-event - 1: position for position, event in enumerate(trace.events) if event < 0}
    ends = [position for position, name in trace.marks if name.startswith("micro-batch") and name.endswith("ends")]
    kept = set()
    for position, event in enumerate(trace.events):
        one = trace.allocations[abs(event) - 1]
        if event > 0 and one.phase == "backward" and one.category == "temporaries":
            # An allocation of the backward that outlives its micro-batch is a gradient.
            end = next((end for end in ends if end > position), None)
            if end is not None and gone_at.get(event - 1, end) >= end:
                kept.add(event - 1)
    allocations = (
        replace(one, category="gradients") if number in kept else one for number, one in enumerate(trace.allocations)
    )
    return replace(trace, allocations=tuple(allocations))
