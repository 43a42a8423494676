"""Records of the memory of a rank's device after each step, and a warning if the headroom is used up."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from anybatch.core.headroom import Reserve, describe_reserve
from anybatch.core.records import DiagnosisRecord, MemoryRecord
from anybatch.core.torch_internals import sparse_bytes, storage_key
from anybatch.memory.device_memory import begin_peak, memory_in_use
from anybatch.memory.trace import Category

ResidentTensors = Mapping[Category, Sequence[torch.Tensor]]


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory of tensors; shared memory counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        else:
            # A sparse tensor has no single storage.
            sizes[id(tensor)] = sparse_bytes(tensor)
    return sum(sizes.values())


class StepMemory:
    """Reads the memory of the device once per step, without waiting for the device."""

    def __init__(self, device: torch.device, rank: int, resident: Callable[[], ResidentTensors]) -> None:
        self._device = device
        self._rank = rank
        self._resident = resident
        self._category_bytes: Mapping[str, int] = {}
        self._optimizer_is_known = False
        self._has_warned = False

    def begin(self) -> None:
        """Reset the peak."""
        begin_peak(self._device)

    def end(self, step: int, *, gradient_bytes: int, updated: bool) -> Iterator[MemoryRecord | DiagnosisRecord]:
        """Yield the record of a step, and possibly a warning; nothing if the system does not report memory."""
        usage = memory_in_use(self._device)
        if usage is None:
            return
        # Sizes stay the same once the optimizer state exists, so they are cached.
        if not self._optimizer_is_known:
            self._optimizer_is_known = updated
            sizes: dict[str, int] = {category: num_bytes_of(tensors) for category, tensors in self._resident().items()}
            self._category_bytes = {**sizes, "gradients": max(sizes["gradients"], gradient_bytes)}
        yield MemoryRecord(
            rank=self._rank,
            step=step,
            allocated_bytes=usage.allocated_bytes,
            reserved_bytes=usage.reserved_bytes,
            peak_bytes=usage.peak_bytes,
            limit_bytes=usage.limit_bytes,
            category_bytes=self._category_bytes,
        )
        if usage.limit_bytes is None or self._has_warned:
            return
        reserve = Reserve(usage.peak_bytes, usage.limit_bytes)
        if not reserve.kept:
            self._has_warned = True
            yield headroom_used_up(self._rank, step, reserve)


def headroom_used_up(rank: int, step: int, reserve: Reserve) -> DiagnosisRecord:
    """Return the warning that a step left too little headroom."""
    return DiagnosisRecord(
        rank=rank,
        step=step,
        code="headroom_used_up",
        level="warning",
        message=f"memory: {describe_reserve(reserve)}",
        remedy="A smaller micro_batch_size gives the same result with less memory.",
    )
