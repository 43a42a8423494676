"""Verify a plan: run a step of the real engine on the device, measure its memory, and keep it for later plans."""

import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.core.tree import Batch, resize_samples
from anybatch.core.units import in_bytes
from anybatch.diagnostics.memory_report import record_memory
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import PlanError
from anybatch.memory.device_memory import outside_bytes
from anybatch.parallel.world import World
from anybatch.planner.budget import catalogued
from anybatch.planner.fit import Fit
from anybatch.planner.measurements import (
    LEAST_OUTSIDE_BYTES,
    MOST_EXCESS,
    MOST_OUTSIDE_BYTES,
    KnownDevices,
    MeasuredStep,
    full_name,
    subject,
    versions_here,
)
from anybatch.planner.plan import Plan
from anybatch.planner.trace.step_spec import NUM_MICRO_BATCHES, StepSpec, samples_in_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Predicted and measured memory of a step."""

    device: str  # the device that ran the step
    name: str  # the device's type, and its driver's name
    planned_bytes: int  # predicted peak of tensors
    measured_bytes: int  # measured peak of tensors
    planned_reserved_bytes: int | None  # predicted peak of the allocator, without a limit; None on a CPU
    measured_reserved_bytes: int | None  # measured peak of the allocator; None on a CPU
    outside_bytes: int | None  # memory used outside of the allocator; None on a CPU
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
        if self.too_large:
            lines.append(f"ran out of memory at {', '.join(map(str, self.too_large))}")
        pieces = f"{self.num_micro_batches} micro-batch{'es' * (self.num_micro_batches > 1)}"
        return "\n".join([f"verified on {self.device}, in a step of {pieces}", *lines])


def verify(spec: StepSpec, fit: Fit, device: str | torch.device) -> Verification:
    """Run the planned step on a device with a new model and repeated samples, and compare the memory.

    Raises:
        PlanError: the spec is for several ranks, or its model or optimizer already exists.
    """
    if spec.world_size > 1 or isinstance(spec.train, TrainSpec):
        message = "only a plan for one rank whose train is a function can be verified: plan it that way."
        raise PlanError(message)
    made = spec.train()
    if isinstance(made.optimizer, Optimizer):
        message = "only a plan whose optimizer is a function can be verified: plan it that way."
        raise PlanError(message)
    device = torch.device(device)
    size = fit.micro_batch_size
    # Run the traced number of micro-batches, or all if the plan holds the whole batch in memory.
    several = min(NUM_MICRO_BATCHES, fit.accumulation_steps)
    built_spec = dataclasses.replace(spec, train=made)
    num_there = samples_in_memory(built_spec, fit.accumulation_steps * size)
    num_micro_batches = several if num_there is None else fit.accumulation_steps
    # Like the plan, skip the check of the loss, whose extra forwards could raise the peak.
    norms = made.norms or "keep"
    train = dataclasses.replace(made, effective_batch_size=None, scheduler=None, check_loss=False, norms=norms)
    engine = Engine.from_spec(train, Hardware(micro_batch_size=size, world=World(device=device)))
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run shows them
        batch = _repeated(spec.sample, num_micro_batches * size)
        # The first step creates the optimizer's state; the plan is for a later step.
        too_large = engine.step(batch).too_large
        recording = record_memory(engine)
        with recording:
            too_large += engine.step(batch).too_large
        outside = outside_bytes(device)
    found = recording.report
    allocator = found.allocator
    return Verification(
        device=found.device,
        name=full_name(device),
        planned_bytes=fit.peak.num_bytes,
        measured_bytes=found.timeline.peak_bytes if allocator is None else allocator.peak_bytes,
        # This run has no limit, so compare with the prediction without a limit.
        planned_reserved_bytes=None if allocator is None else fit.freely_reserved_bytes or fit.reserved_bytes,
        measured_reserved_bytes=None if allocator is None else allocator.reserved_bytes,
        outside_bytes=outside,
        too_large=too_large,
        num_micro_batches=num_micro_batches,
    )


def keep(found: Verification, plan: Plan, known: KnownDevices) -> str:
    """Store the measurements of a plan; return a sentence with the file, or with the reason for not storing them."""
    step, device = _step(found, plan, known.today()), plan.budget.device
    if found.too_large:
        return "not kept: the planned size ran out of memory, so a smaller one was measured"
    if device is not None and catalogued(step.device) is not device:
        return f"not kept: this device is a {step.device.partition(': ')[2]}, and the plan is for {device.name}"
    if step.excess > MOST_EXCESS:
        return "not kept: the step needed more than twice the planned memory, so other plans cannot use the result"
    if not known.keep(step):
        return f"not kept for later plans: cannot write {known.path}"
    return (
        f"kept in {known.path}\nlater plans for this device keep 10% free; override with --headroom, or delete the file"
    )


def _step(found: Verification, plan: Plan, today: str) -> MeasuredStep:
    """Return the measured step, with the bytes of tensors or of the allocator: the ones with the larger error."""
    workspace, outside = plan.budget.workspace_bytes, found.outside_bytes
    pairs = [(found.planned_bytes + workspace, found.measured_bytes)]
    if found.planned_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        pairs.append((found.planned_reserved_bytes + workspace, found.measured_reserved_bytes))
    # The larger error determines the headroom of later plans.
    planned, measured = max(pairs, key=lambda pair: pair[1] / pair[0])
    of_a_context = outside is not None and LEAST_OUTSIDE_BYTES <= outside <= MOST_OUTSIDE_BYTES
    return MeasuredStep(
        device=found.name,
        budget_bytes=plan.budget.total_bytes,
        subject=subject(plan.name, plan.precision),
        planned_bytes=planned,
        measured_bytes=measured,
        outside_bytes=outside if of_a_context else None,
        versions=versions_here(on_cpu=found.name.startswith("cpu:")),
        date=today,
    )


def _repeated(sample: Batch, num_samples: int) -> Batch:
    """Return a batch with the samples repeated in order."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        return tensor[torch.arange(num_samples) % len(tensor)].contiguous()

    return resize_samples(sample, num_samples, repeat)
