"""A plan against the device, where it is there: a step of the real engine, measured."""

import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.core.tree import Batch, resize_samples
from anybatch.core.units import in_bytes
from anybatch.diagnostics.memory.memory_report import record_memory
from anybatch.engine.engine import Engine
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.errors import PlanError
from anybatch.memory.device_memory import outside_bytes
from anybatch.memory.host_memory import device_name
from anybatch.parallel.world import World
from anybatch.planner.envelopes import of_tensors
from anybatch.planner.proposals.fit import Fit
from anybatch.planner.trace.step_spec import NUM_MICRO_BATCHES, StepSpec, samples_there


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Predicted memory of a step beside the measured one.

    Attributes:
        device: where it ran.
        name: the device's type, and what its driver calls it.
        planned_bytes: predicted peak of tensors.
        measured_bytes: measured peak of tensors.
        planned_reserved_bytes: predicted peak of the allocator, without a limit; None on a CPU.
        measured_reserved_bytes: measured peak of the allocator; None on a CPU.
        outside_bytes: memory of the device taken outside of the allocator; None on a CPU.
        too_large: micro-batch sizes that ran out of memory on the way.
        num_micro_batches: of the step.
    """

    device: str
    name: str
    planned_bytes: int
    measured_bytes: int
    planned_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    outside_bytes: int | None
    too_large: tuple[int, ...]
    num_micro_batches: int = NUM_MICRO_BATCHES

    def __str__(self) -> str:
        """Return predicted beside measured."""
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
    """Run the planned step on a device, and compare.

    A new model is made there, and nothing is kept. Samples are the planned one, over and over.

    Args:
        spec: what was planned, on one rank, with a function that makes what is trained.
        fit: what fits of it.
        device: where.

    Raises:
        PlanError: the spec is for several ranks, or its model or optimizer is made already.
    """
    if spec.world_size > 1 or isinstance(spec.train, TrainSpec):
        message = "a plan is verified on one rank, with a function that makes what is trained: plan it so."
        raise PlanError(message)
    made = spec.train()
    if isinstance(made.optimizer, Optimizer):
        message = "a plan is verified with a function that makes the optimizer: plan it so."
        raise PlanError(message)
    device = torch.device(device)
    size = fit.micro_batch_size
    # As many as were traced; all of them where the whole batch was planned to be there.
    several = min(NUM_MICRO_BATCHES, fit.accumulation_steps)
    built_spec = dataclasses.replace(spec, train=made)
    num_there = samples_there(built_spec, fit.accumulation_steps * size)
    num_micro_batches = several if num_there is None else fit.accumulation_steps
    # The loss is not checked, as the plan does not: the check's own forwards would be in the peak.
    norms = made.norms or "keep"
    train = dataclasses.replace(made, effective_batch_size=None, scheduler=None, check_loss=False, norms=norms)
    engine = Engine.from_spec(train, Hardware(micro_batch_size=size, world=World(device=device)))
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run shows them
        batch = _repeated(spec.sample, num_micro_batches * size)
        # The first step makes the optimizer's state, and is not the one that was planned.
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
        planned_bytes=fit.peak.num_bytes if allocator is not None else of_tensors(fit.envelope).peak_bytes(size),
        measured_bytes=found.timeline.peak_bytes if allocator is None else allocator.peak_bytes,
        # This run has no limit, so the prediction without a limit is the one to compare with.
        planned_reserved_bytes=None if allocator is None else fit.freely_reserved_bytes or fit.reserved_bytes,
        measured_reserved_bytes=None if allocator is None else allocator.reserved_bytes,
        outside_bytes=outside,
        too_large=too_large,
        num_micro_batches=num_micro_batches,
    )


def full_name(device: torch.device) -> str:
    """Return a device's type, and what its driver calls it."""
    return f"{device.type}: {device_name(device)}"


def _repeated(sample: Batch, num_samples: int) -> Batch:
    """Return a batch of the first samples of another one, over and over."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        return tensor[torch.arange(num_samples) % len(tensor)].contiguous()

    return resize_samples(sample, num_samples, repeat)
