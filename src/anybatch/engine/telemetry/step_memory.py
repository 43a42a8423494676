"""Memory of a rank's device at the end of a step, as a record; and a warning when the headroom is used up."""

from collections.abc import Callable, Iterator, Mapping

import torch

from anybatch.core.headroom import Reserve, describe_reserve
from anybatch.core.records import DiagnosisRecord, MemoryRecord
from anybatch.engine.update.resident_tensors import ResidentTensors, num_bytes_of
from anybatch.memory.device_memory import begin_peak, memory_in_use


class StepMemory:
    """Asks once per step for the memory of the device, without waiting for it.

    Args:
        device: of this rank.
        rank: this rank.
        resident: function () -> the tensors that the engine keeps from step to step.
    """

    def __init__(self, device: torch.device, rank: int, resident: Callable[[], ResidentTensors]) -> None:
        self._device = device
        self._rank = rank
        self._resident = resident
        self._category_bytes: Mapping[str, int] = {}
        self._optimizer_is_known = False
        self._has_warned = False

    def begin(self) -> None:
        """Begin a new peak."""
        begin_peak(self._device)

    def end(self, step: int, *, gradient_bytes: int, updated: bool) -> Iterator[MemoryRecord | DiagnosisRecord]:
        """Yield the record of a step, and a warning if there is one; nothing where the system does not say.

        Args:
            step: number of the step, from 0 on.
            gradient_bytes: bytes of one copy of the gradients, which are freed before the step is over.
            updated: whether the optimizer has made its step, and so its state.
        """
        found = memory_in_use(self._device)
        if found is None:
            return
        # Sizes stay the same once the optimizer has made its state, so they are looked up no more.
        if not self._optimizer_is_known:
            self._optimizer_is_known = updated
            sizes: dict[str, int] = {category: num_bytes_of(tensors) for category, tensors in self._resident().items()}
            self._category_bytes = {**sizes, "gradients": max(sizes["gradients"], gradient_bytes)}
        yield MemoryRecord(
            rank=self._rank,
            step=step,
            allocated_bytes=found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            peak_bytes=found.peak_bytes,
            limit_bytes=found.limit_bytes,
            category_bytes=self._category_bytes,
        )
        if found.limit_bytes is None or self._has_warned:
            return
        reserve = Reserve(found.peak_bytes, found.limit_bytes)
        if not reserve.kept:
            self._has_warned = True
            yield headroom_used_up(self._rank, step, reserve)


def headroom_used_up(rank: int, step: int, reserve: Reserve) -> DiagnosisRecord:
    """Return the warning that a step came nearer to the limit than it should."""
    return DiagnosisRecord(
        rank=rank,
        step=step,
        code="headroom_used_up",
        level="warning",
        message=f"memory: {describe_reserve(reserve)}",
        remedy="A smaller micro_batch_size gives the same result with less memory.",
    )
