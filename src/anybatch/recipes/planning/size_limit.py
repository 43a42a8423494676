"""The planner's bound for "auto": how large a micro-batch can be on the device at hand."""

from collections.abc import Callable
from functools import partial

import torch

from anybatch.core.torch_internals import outside_modes
from anybatch.core.tree import Batch
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.precision import PrecisionName
from anybatch.errors import PlanError, UserError
from anybatch.memory.device_memory import limit_of, memory_in_use, outside_bytes
from anybatch.memory.host_memory import read_host
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.world import World
from anybatch.planner.budget import COMMUNICATOR_BYTES, WORKSPACE_BYTES, DeviceMeasurements
from anybatch.planner.cache.measured_devices import KnownDevices
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.measured import measured_here
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.step_spec import MakeTrainSpec, StepSpec, built
from anybatch.recipes.job import Job

Largest = Callable[[Batch, int], int | None]
"""The argument of `Auto(largest=...)`: function (batch, num_samples) -> largest size, None for no limit."""


def planned_largest(
    train: TrainSpec | MakeTrainSpec,
    *,
    device: torch.device | None = None,
    world_size: int = 1,
    budget_bytes: int | None = None,
    headroom: float | None = None,
    known: KnownDevices | None = None,
) -> Largest:
    """Return a function for `Auto(largest=...)` that plans the engine's step when the first batch is there.

    ```python
    auto = Auto(largest=planned_largest(make_train_spec))
    engine = ab.Engine.from_spec(make_train_spec(), Hardware(micro_batch_size=auto))
    ```

    It is planned as on one rank, which is what a rank of `all_reduce` holds too, beside a communicator.

    Args:
        train: function () -> what is trained; a `TrainSpec` that is made already is traced as its modules are when the
            first batch comes, hooks and all.
        device: where it will run; None for the accelerator that torch takes where there is one, else the CPU.
        world_size: number of ranks.
        budget_bytes: memory for tensors; None for the rest of the device's memory.
        headroom: part of the device to leave free; None for 10% where it has been measured, and 15% elsewhere.
        known: remembers what devices were measured to take; None for none.

    Returns:
        Function (batch, num_samples) -> size, at least 1. It raises `PlanError` where nothing can be planned.
    """

    def largest(batch: Batch, num_samples: int) -> int:
        place = _accelerator_or_cpu() if device is None else device
        profile: Profile = "cpu" if place.type == "cpu" else "cuda"
        try:
            with outside_modes():  # an enforced budget would count the twin
                spec, _ = built(StepSpec(train=train, sample=batch, strategy="single", profile=profile))
                spec = spec.with_train(effective_batch_size=num_samples)
                precision = spec.trained.precision
                measured = DeviceMeasurements() if known is None else measured_here(place, "", precision, known)
                left = measured.headroom if headroom is None else headroom
                usable = (
                    _usable_bytes(place, world_size, left) if budget_bytes is None else int(budget_bytes * (1.0 - left))
                )
                envelopes = find_envelopes(spec, usable, most_samples=num_samples)
        except PlanError:
            raise
        except UserError as error:  # the engine says it in earnest a moment later
            raise PlanError(str(error)) from error
        found = envelopes.largest_allocated(max(0, usable - _others_bytes(place, envelopes.steady)))
        if found == 0:
            message = "not even one sample is planned to fit"
            raise PlanError(message)
        return num_samples if found is None else min(found, num_samples)

    return largest


def planned_for_job(
    job: Job, learning_rate: float, precision: PrecisionName, world: World, known: KnownDevices | None
) -> Largest:
    """Return the limit that `planned_largest` finds for a job."""
    train = partial(job.train_spec, learning_rate=learning_rate, precision=precision)
    return planned_largest(train, device=world.device, world_size=world.size, known=known)


def _accelerator_or_cpu() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def _usable_bytes(device: torch.device, world_size: int, headroom: float) -> int:
    """Return the memory of a device left for torch's tensors: that of other processes and the context is subtracted.

    Raises:
        PlanError: the device does not report its memory.
    """
    limit = limit_of(device)
    if limit is not None:
        communicator = COMMUNICATOR_BYTES if world_size > 1 else 0  # it is made by the first reduction
        return int(limit * (1.0 - headroom)) - (outside_bytes(device) or 0) - communicator - WORKSPACE_BYTES
    host = read_host() if device.type == "cpu" else None
    if host is None:
        message = f"how much memory {device} has is not known"
        raise PlanError(message)
    return int(host.available_bytes * (1.0 - headroom)) // world_size


def _others_bytes(device: torch.device, envelope: MemoryEnvelope) -> int:
    """Return the bytes this process's allocator has handed out beyond those of the plan: for another model, say."""
    used = memory_in_use(device) if device.type == "cuda" else None
    if used is None:
        return 0
    planned = envelope.at_peak(1).by_category
    counted = sum(planned[name] for name in ("weights", "buffers", "gradients", "optimizer"))
    return max(0, used.allocated_bytes - counted)
