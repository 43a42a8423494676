"""Emulates parts that a trace of one rank lacks: other ranks, allocations by FSDP2, and further micro-batches."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anybatch.core.geometry import ceil_div
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import ONLY_TERM, LossKind, Term
from anybatch.core.tree import Batch, flatten_batch, map_tensors
from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace
from anybatch.parallel.world import World
from anybatch.planner.step_spec import StepSpec
from anybatch.planner.torch_internals import fake_store


@contextmanager
def fake_ranks(size: int, device_bytes: int | None = None) -> Iterator[World]:
    """Make this process rank 0 of `size` ranks without starting other processes."""
    if size == 1:
        yield World()
        return
    if dist.is_initialized():
        message = (
            f"cannot plan this step: planning {size} ranks needs a fake process group, but this process is rank "
            f"{dist.get_rank()} of a real one with {dist.get_world_size()} ranks. Plan before init_process_group, or "
            "in another process."
        )
        raise CannotPlanError(message)
    hook = sys.excepthook  # torch replaces this hook with one that prints "[rank0]:", and never restores it
    dist.init_process_group("fake", rank=0, world_size=size, store=fake_store())
    try:
        yield World(rank=0, size=size, device_bytes=device_bytes)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


class StreamPools:
    """Assigns a number to each stream that allocates memory, in order of first use.

    FSDP2 allocates its buffers for gathering and reducing in separate streams. CPU streams have no effect, but torch
    reports which one is current.
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
def recorded_resizes(ledger: MemoryLedger) -> Iterator[None]:
    """Record resizes of storages too: FSDP2 frees gathered weights by a resize, which is not an operation."""
    storage_class: Any = torch.UntypedStorage
    resize = storage_class.resize_

    def resize_and_record(storage: torch.UntypedStorage, num_bytes: int) -> Any:  # noqa: ANN401 (what torch returns)
        resized = resize(storage, num_bytes)
        ledger.record_resize("weights", storage)
        return resized

    storage_class.resize_ = resize_and_record
    try:
        yield
    finally:
        storage_class.resize_ = resize


def with_gradients(trace: MemoryTrace) -> MemoryTrace:
    """Categorize temporaries that outlive a backward as "gradients", which FSDP2 keeps outside of `.grad`."""
    freed_at = {-event - 1: position for position, event in enumerate(trace.events) if event < 0}
    ends = [position for position, name in trace.marks if name.startswith("micro-batch") and name.endswith("ends")]
    kept = set()
    for position, event in enumerate(trace.events):
        allocation = trace.allocations[abs(event) - 1]
        if event > 0 and allocation.phase == "backward" and allocation.category == "temporaries":
            # An allocation of the backward that outlives its micro-batch is a gradient.
            end = next((end for end in ends if end > position), None)
            if end is not None and freed_at.get(event - 1, end) >= end:
                kept.add(event - 1)
    allocations = (
        replace(each, category="gradients") if number in kept else each for number, each in enumerate(trace.allocations)
    )
    return replace(trace, allocations=tuple(allocations))


def joint_limit(spec: StepSpec) -> int | None:
    """For an `ab.joint` loss, return the largest size that splits a rank's samples into more than two micro-batches."""
    loss, num_samples = spec.trained.loss, spec.trained.effective_batch_size
    if not isinstance(loss, Loss) or loss.kind.encode is None or num_samples is None:
        return None
    return (ceil_div(num_samples, spec.world_size) - 1) // 2


class AllRows(nn.Module):
    """Replaces the function of `ab.joint`: repeats the traced rows to fill a whole effective batch.

    It also allocates, until the step ends, the outputs and gradients that the engine keeps of untraced micro-batches.
    Slightly too much memory is planned, never too little, since the traced outputs stay in memory with their copies.
    """

    def __init__(self, loss: Loss, effective_batch_size: int | None, world_size: int) -> None:
        super().__init__()
        if effective_batch_size is None:
            message = (
                "effective_batch_size is missing: the memory of a loss across samples (ab.joint) depends on it. "
                "Set it to the number of samples of a step."
            )
            raise PlanError(message)
        self._num_rows = effective_batch_size
        self._rank_rows = ceil_div(effective_batch_size, world_size)
        self._function = loss.function
        self._encode = loss.kind.encode
        self._kept: list[torch.Tensor] = []
        self._num_encoded = 0
        self._differentiable: list[torch.Tensor] = []
        self._num_missing = 0

    def as_loss(self) -> Loss:
        """Return a loss that uses this module as its function."""
        return Loss(self, LossKind({ONLY_TERM: Term(None)}, encode=self.encode))

    def encode(self, model: Any, batch: Batch) -> Batch:  # noqa: ANN401 (the user's model)
        """Return the outputs of a micro-batch; in the first, also allocate the outputs of untraced micro-batches."""
        assert self._encode is not None
        outputs = self._encode(model, batch)
        if not self._num_encoded:
            tensors, _ = flatten_batch(outputs)
            # The outputs of the two traced micro-batches are allocated anyway.
            self._keep(tensors, self._rank_rows - 2 * len(tensors[0]) if tensors else 0)
        self._num_encoded += 1
        return outputs

    def forward(self, model: Any, outputs: Batch) -> Any:  # noqa: ANN401 (the user's model, and what the loss returns)
        """Return the function's result for the rows of a whole effective batch."""
        tensors, _ = flatten_batch(outputs)
        # Keep one detached row for its shape and type, without keeping the graph alive.
        self._differentiable = [tensor.detach()[:1] for tensor in tensors if tensor.requires_grad]
        self._num_missing = self._num_rows - len(tensors[0])
        if self._num_missing <= 0:
            return self._function(model, outputs)
        # Indexing allocates as much as concatenating the outputs of all micro-batches.
        rows = torch.arange(self._num_rows) % len(tensors[0])
        return self._function(model, map_tensors(outputs, lambda tensor: tensor[rows]))

    def begin_second_pass(self) -> None:
        """Allocate the gradients of the outputs of micro-batches that are not traced."""
        if self._differentiable:
            self._keep(self._differentiable, self._num_missing)
            self._differentiable = []

    def release(self) -> None:
        """Free the tensors kept for this step."""
        self._kept.clear()
        self._num_encoded = 0

    def _keep(self, tensors: list[torch.Tensor], num_rows: int) -> None:
        if num_rows > 0:
            self._kept += [tensor.new_empty((num_rows, *tensor.shape[1:])) for tensor in tensors]
