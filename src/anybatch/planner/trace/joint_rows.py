"""Trace a loss across samples with the rows of a whole effective batch, although only two micro-batches run."""

from typing import Any

import torch
from torch import nn

from anybatch.core.geometry import ceil_div
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import AcrossSamples
from anybatch.core.tree import Batch, flatten_batch, map_tensors
from anybatch.errors import PlanError
from anybatch.planner.trace.step_spec import StepSpec


def joint_limit(spec: StepSpec) -> int | None:
    """Return the largest micro-batch size with more than two micro-batches per step, for a loss across samples.

    Args:
        spec: a built step.
    """
    loss, num_samples = spec.trained.loss, spec.trained.effective_batch_size
    if not isinstance(loss, Loss) or loss.kind.encode is None or num_samples is None:
        return None
    return (ceil_div(num_samples, spec.world_size) - 1) // 2


class AllRows(nn.Module):
    """Replaces the function of `ab.joint`: repeats the traced rows to fill a whole effective batch.

    Also allocates the outputs, and their gradients, that the engine keeps for micro-batches that are not traced, until
    the step ends. Plans a few rows too many, never too few, since traced outputs coexist with their repetition.

    Args:
        loss: a loss across samples.
        effective_batch_size: rows of all ranks.
        world_size: number of ranks.

    Raises:
        PlanError: the effective batch size is unknown.
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
        self._own_rows = ceil_div(effective_batch_size, world_size)
        self._function = loss.function
        self._encode = loss.kind.encode
        self._kept: list[torch.Tensor] = []
        self._num_encoded = 0
        self._differentiable: list[torch.Tensor] = []
        self._num_missing = 0

    def as_loss(self) -> Loss:
        """Return a loss that uses this module as its function."""
        return Loss(self, AcrossSamples(self.encode))

    def encode(self, model: Any, batch: Batch) -> Batch:  # noqa: ANN401 (the user's model)
        """Return the outputs of a micro-batch; for the first, allocate the outputs of untraced ones too."""
        assert self._encode is not None
        outputs = self._encode(model, batch)
        if not self._num_encoded:
            own, _ = flatten_batch(outputs)
            # The outputs of the two traced micro-batches are allocated anyway.
            self._keep(own, self._own_rows - 2 * len(own[0]) if own else 0)
        self._num_encoded += 1
        return outputs

    def forward(self, model: Any, outputs: Batch) -> Any:  # noqa: ANN401 (the user's model, and what the loss returns)
        """Return the function's result for the rows of a whole effective batch."""
        own, _ = flatten_batch(outputs)
        # Keep one detached row for its shape and type, without keeping the graph alive.
        self._differentiable = [tensor.detach()[:1] for tensor in own if tensor.requires_grad]
        self._num_missing = self._num_rows - len(own[0])
        if self._num_missing <= 0:
            return self._function(model, outputs)
        # Indexing allocates as much as concatenating the outputs of all micro-batches.
        rows = torch.arange(self._num_rows) % len(own[0])
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
