"""The planner's limit for "auto": the largest micro-batch that fits this device."""

from collections.abc import Callable

import torch

from anybatch.core.torch_internals import outside_modes
from anybatch.core.tree import Batch
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import PlanError, UserError
from anybatch.memory.device_memory import limit_of, memory_in_use, outside_bytes
from anybatch.memory.host_memory import read_host
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.world import World
from anybatch.planner.budget import COMMUNICATOR_BYTES, WORKSPACE_BYTES, DeviceMeasurements, measured_of
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.measurements import KnownDevices
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.step_spec import MakeTrainSpec, StepSpec, built
from anybatch.recipes.job import Job

Largest = Callable[[Batch, int], int | None]
"""The argument of `Auto(largest=...)`: function (batch, num_samples) -> largest size; None: no limit."""


def planned_largest(
    train: TrainSpec | MakeTrainSpec,
    *,
    device: torch.device | None = None,
    world_size: int = 1,
    budget_bytes: int | None = None,
    headroom: float | None = None,
    known: KnownDevices | None = None,
) -> Largest:
    """Return a function for `Auto(largest=...)` that plans the engine's step on the first batch.

    ```python
    auto = Auto(largest=planned_largest(make_train_spec))
    engine = ab.Engine.from_spec(make_train_spec(), Hardware(micro_batch_size=auto))
    ```

    The plan is for one rank; a rank of `all_reduce` also needs memory for a communicator.

    Args:
        train: function () -> `TrainSpec`; the modules of an existing `TrainSpec` are traced as they are at the first
            batch, with their hooks.
        device: where to train; None: torch's accelerator if there is one, else the CPU.
        world_size: number of ranks.
        budget_bytes: memory for tensors; None: the free memory of the device.
        headroom: part of the device to keep free; None: 10% if it was measured, else 15%.
        known: cache of measured steps by device; None: no measurements.

    Returns:
        Function (batch, num_samples) -> size, at least 1. It raises `PlanError` if the step cannot be planned.
    """

    def largest(batch: Batch, num_samples: int) -> int:
        place = _accelerator_or_cpu() if device is None else device
        profile: Profile = "cpu" if place.type == "cpu" else "cuda"
        try:
            with outside_modes():  # an enforced budget would count the copy
                spec, _ = built(StepSpec(train=train, sample=batch, strategy="single", profile=profile))
                spec = spec.with_train(effective_batch_size=num_samples)
                precision = spec.trained.precision
                measured = DeviceMeasurements() if known is None else measured_of(place, "", precision, known)
                left = measured.headroom if headroom is None else headroom
                usable = (
                    _usable_bytes(place, world_size, left) if budget_bytes is None else int(budget_bytes * (1.0 - left))
                )
                envelopes = find_envelopes(spec, usable, most_samples=num_samples)
        except PlanError:
            raise
        except UserError as error:  # the engine raises it again a moment later
            raise PlanError(str(error)) from error
        found = envelopes.largest_allocated(max(0, usable - _other_bytes(place, envelopes.steady)))
        if found == 0:
            message = "the plan does not fit even one sample"
            raise PlanError(message)
        return num_samples if found is None else min(found, num_samples)

    return largest


def planned_for_job(job: Job, world: World, known: KnownDevices | None) -> Largest:
    """Return the limit of `planned_largest` for a job with its default settings."""
    return planned_largest(job.train_spec, device=world.device, world_size=world.size, known=known)


def _accelerator_or_cpu() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def _usable_bytes(device: torch.device, world_size: int, headroom: float) -> int:
    """Return the memory of a device that is free for tensors, without other processes and the context."""
    limit = limit_of(device)
    if limit is not None:
        communicator = COMMUNICATOR_BYTES if world_size > 1 else 0  # allocated by the first reduction
        return int(limit * (1.0 - headroom)) - (outside_bytes(device) or 0) - communicator - WORKSPACE_BYTES
    host = read_host() if device.type == "cpu" else None
    if host is None:
        message = f"the memory of {device} is not known"
        raise PlanError(message)
    return int(host.available_bytes * (1.0 - headroom)) // world_size


def _other_bytes(device: torch.device, envelope: MemoryEnvelope) -> int:
    """Return the bytes that this process has allocated beyond the plan, for example for another model."""
    used = memory_in_use(device) if device.type == "cuda" else None
    if used is None:
        return 0
    planned = envelope.at_peak(1).by_category
    counted = sum(planned[name] for name in ("weights", "buffers", "gradients", "optimizer"))
    return max(0, used.allocated_bytes - counted)
