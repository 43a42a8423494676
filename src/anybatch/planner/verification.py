"""Verify a plan: run a step of the real engine on the device, and measure its memory."""

import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.core.units import in_bytes
from anybatch.diagnostics.memory_report import record_memory
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import PlanError
from anybatch.memory.device_memory import outside_bytes
from anybatch.parallel.world import World
from anybatch.planner.fit import Fit
from anybatch.planner.step_spec import NUM_MICRO_BATCHES, StepSpec, repeated, samples_in_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Predicted and measured memory of a step."""

    device: str  # the device that ran the step
    planned_bytes: int  # predicted peak of tensors
    measured_bytes: int  # measured peak of tensors
    planned_reserved_bytes: int | None  # predicted peak of the allocator, without a limit; None on a CPU
    measured_reserved_bytes: int | None  # measured peak of the allocator; None on a CPU
    outside_bytes: int | None  # memory used outside of the allocator, for context and libraries; None on a CPU
    too_large: tuple[int, ...]  # micro-batch sizes that ran out of memory
    num_micro_batches: int = NUM_MICRO_BATCHES

    def __str__(self) -> str:
        """Return a table of planned and measured memory."""
        pairs = [("tensors", self.planned_bytes, self.measured_bytes)]
        if self.planned_reserved_bytes is not None and self.measured_reserved_bytes is not None:
            pairs.append(("allocator", self.planned_reserved_bytes, self.measured_reserved_bytes))
        lines = [
            f"{name:<11}{in_bytes(planned)} planned, {in_bytes(found)} measured: {100 * (planned / found - 1):+.2f}%"
            for name, planned, found in pairs
        ]
        if self.outside_bytes is not None:
            lines.append(f"{'outside':<11}{in_bytes(self.outside_bytes)} measured: CUDA context and libraries")
        if self.too_large:
            lines.append(f"ran out of memory at {', '.join(map(str, self.too_large))}")
        pieces = f"{self.num_micro_batches} micro-batch{'es' * (self.num_micro_batches > 1)}"
        return "\n".join([f"verified on {self.device}, in a step of {pieces}", *lines])


def verify(spec: StepSpec, fit: Fit, device: str | torch.device) -> Verification:
    """Run the planned step on a device, with a new model and repeated samples; compare measured and planned memory."""
    if spec.world_size > 1 or isinstance(spec.train, TrainSpec):
        message = "only plans for one rank, with a `train` function, can be verified: pass a function () -> TrainSpec."
        raise PlanError(message)
    new_train = spec.train()
    if isinstance(new_train.optimizer, Optimizer):
        message = "only plans with an optimizer function can be verified. Pass named_parameters -> optimizer."
        raise PlanError(message)
    device = torch.device(device)
    size = fit.micro_batch_size
    # Run the traced number of micro-batches, or all if the plan holds the whole batch in memory.
    num_traced = min(NUM_MICRO_BATCHES, fit.accumulation_steps)
    built_spec = dataclasses.replace(spec, train=new_train)
    num_in_memory = samples_in_memory(built_spec, fit.accumulation_steps * size)
    num_micro_batches = num_traced if num_in_memory is None else fit.accumulation_steps
    # Like the plan, skip the check of the loss, whose extra forwards could raise the peak.
    norms = new_train.norms or "keep"
    train = dataclasses.replace(new_train, effective_batch_size=None, scheduler=None, check_loss=False, norms=norms)
    engine = Engine.from_spec(train, Hardware(micro_batch_size=size, world=World(device=device)))
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a real run shows the warnings
        batch = repeated(spec.sample, num_micro_batches * size)
        # The first step creates the optimizer's state; the plan is for a later step.
        too_large = engine.step(batch).too_large
        with record_memory(engine) as recording:
            too_large += engine.step(batch).too_large
        outside = outside_bytes(device)
    found = recording.report
    allocator = found.allocator
    return Verification(
        device=found.device,
        planned_bytes=fit.tensor_bytes,
        measured_bytes=found.timeline.peak_bytes if allocator is None else allocator.peak_bytes,
        # No memory limit is set in this run, so compare it with the prediction without a limit.
        planned_reserved_bytes=None if allocator is None else fit.reserved_bytes_without_limit,
        measured_reserved_bytes=None if allocator is None else allocator.reserved_bytes,
        outside_bytes=outside,
        too_large=too_large,
        num_micro_batches=num_micro_batches,
    )
