"""`ab.plan`: from a job, a model or the name of one to a plan of its memory."""

from collections.abc import Callable
from typing import cast

from torch import nn

from anybatch.core.loss import Loss, LossFunction
from anybatch.core.tree import Batch
from anybatch.engine.inputs import Model
from anybatch.engine.update.precision import OptimizerFunction, PrecisionName
from anybatch.errors import UserError
from anybatch.planner.budget import budget_of
from anybatch.planner.cache.measured_devices import KnownDevices
from anybatch.planner.cost.step_time import Rates
from anybatch.planner.measured import measured_of
from anybatch.planner.plan import make_plan
from anybatch.planner.report import Plan
from anybatch.planner.trace.step_spec import StepSpec
from anybatch.recipes.job import Job
from anybatch.recipes.planning.subjects import Subject, adamw, load_subject, subject_of_config, subject_of_job


def plan(
    what: "str | Job | Model | Callable[[], Model] | object",
    optimizer: OptimizerFunction | None = None,
    loss: Loss | LossFunction | None = None,
    sample: Batch | None = None,
    *,
    device: str | int,
    effective_batch_size: int | None = None,
    world_size: int = 1,
    precision: PrecisionName = "fp32",
    sequence_length: int | None = None,
    strategy: str = "auto",
    headroom: float | None = None,
    known: KnownDevices | None = None,
    rates: Rates | None = None,
    proposals: bool = True,
) -> Plan:
    """Plan the memory of a training step without its device, and without taking memory for it.

    ```python
    print(ab.plan("llama-3.2-1b", device="RTX 4090", effective_batch_size=64, precision="bf16", sequence_length=1024))
    print(ab.plan(lambda: Net(), torch.optim.AdamW, loss, batch_of_one, device="24GiB", effective_batch_size=256))
    ```

    The engine's own step runs on tensors without data, which are made to allocate as CUDA's do; see docs/memory.md.

    Args:
        what: a `Job`, the name of a recipe or of a published model, a configuration of transformers, a module, or a
            function that makes one.
        optimizer: function `named_parameters -> optimizer`, for a module; None for AdamW.
        loss: for a module, as `Engine` takes it.
        sample: for a module, a batch of one sample; only its shapes and types are used.
        device: a name such as "RTX 4090" or "H100", a size such as "24GiB", or bytes; "cpu:8GiB" plans a CPU's.
        effective_batch_size: samples of one step over all ranks; None for what a job says.
        world_size: number of ranks.
        precision: number formats of forward and backward.
        sequence_length: tokens of a sample of a published language model; None for its whole context.
        strategy: as `Engine` takes it by name.
        headroom: part of the device to leave free; None for 10% of what was measured on it, or 15% if nothing was.
        known: remembers what steps were measured to take of devices, which counts where no headroom is named; None
            takes every device for one on which nothing has been measured.
        rates: how fast the device is, as `anybatch.planner.cost.calibration.measure_rates` finds out; None for what
            is known of it by name.
        proposals: also plan what could be changed, which takes as long for each change.

    Raises:
        CannotPlanError: what a step holds cannot be told without running it; says why.
        UserError: an argument cannot be used, or the engine refuses the step.
    """
    subject = _subject(what, optimizer, loss, sample, sequence_length)
    size = effective_batch_size or subject.effective_batch_size
    if size is None:
        message = f"effective_batch_size must be given: nothing says how many samples a step of {subject.name} has."
        raise UserError(message)
    measured = None if known is None or headroom is not None else measured_of(device, subject.name, precision, known)
    budget = budget_of(device, world_size=world_size, headroom=headroom, measured=measured)
    spec = StepSpec(
        model=subject.model,
        optimizer=subject.optimizer,
        loss=subject.loss,
        sample=subject.sample,
        precision=precision,
        clip=subject.clip,
        norms=subject.norms,
        rng=subject.rng,
        effective_batch_size=size,
        strategy=strategy,
        world_size=world_size,
        profile="cpu" if isinstance(device, str) and device.startswith("cpu:") else "cuda",
    )
    return make_plan(spec, budget, size, name=subject.name, rates=rates, proposals=proposals)


def _subject(
    what: object,
    optimizer: OptimizerFunction | None,
    loss: Loss | LossFunction | None,
    sample: Batch | None,
    sequence_length: int | None,
) -> Subject:
    """Return what is to be planned.

    Raises:
        UserError: it is of no kind that can be.
    """
    if isinstance(what, str):
        return load_subject(what, sequence_length=sequence_length)
    if isinstance(what, Job):
        return subject_of_job(what)
    if hasattr(what, "model_type") and hasattr(what, "architectures"):
        return subject_of_config(what, sequence_length=sequence_length)
    if not isinstance(what, nn.Module | dict) and not callable(what):
        message = (
            f"what={what!r} cannot be planned. Give an ab.Job, the name of a recipe or model, a configuration of "
            "transformers, a module, or a function that makes one."
        )
        raise UserError(message)
    if loss is None or sample is None:
        message = (
            "a module is planned with its loss and a batch of one sample: ab.plan(model, optimizer, loss, sample)."
        )
        raise UserError(message)
    is_model = isinstance(what, nn.Module | dict)
    return Subject(
        name=type(what).__name__ if is_model else getattr(what, "__name__", "model"),
        model=cast("Callable[[], Model]", (lambda: what) if is_model else what),
        optimizer=optimizer or adamw,
        loss=loss,
        sample=sample,
    )
