"""Record memory that FSDP2 allocates in separate streams, or frees by resizing storages."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace


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
