"""`ab.plan`: the memory plan of a job, a model or a model's name."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from anybatch.core.geometry import ceil_div, checked_int, refuse_unless
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.run_config import PrecisionName
from anybatch.core.torch_internals import outside_modes
from anybatch.core.tree import Batch
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.precision import OptimizerFunction
from anybatch.engine.user_code import Model
from anybatch.errors import BatchSizeError, PlanError, UserError
from anybatch.memory.device_memory import limit_of, memory_in_use, outside_bytes, read_host
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World
from anybatch.planner.budget import COMMUNICATOR_BYTES, WORKSPACE_BYTES, DeviceMeasurements, budget_of, measured_of
from anybatch.planner.changes import changed, named_change
from anybatch.planner.devices import Device
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.measurements import KnownDevices
from anybatch.planner.plan import Plan, make_plan
from anybatch.planner.step_time import Rates
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.step_spec import MakeTrainSpec, StepSpec, build, built
from anybatch.recipes.job import Job
from anybatch.recipes.planning.subjects import (
    PlanSubject,
    adamw,
    load_subject,
    subject_of_config,
    subject_of_job,
    with_optimizer,
)

_FUNCTIONS = ("optimizer", "strategy")
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "headroom": ((int, float), "a number from 0 to below 1, or None"),
        "optimizer": ((str,), "a function named_parameters -> optimizer, the name of an optimizer, or None"),
        "precision": ((str,), "'fp32', 'bf16', 'fp16' or None"),
        "strategy": ((str,), "a name, or a function () -> strategy"),
        "known": ((KnownDevices,), "a KnownDevices, or None"),
        "rates": ((Rates,), "the Rates of a device, or None"),
        "changes": ((list, tuple), "a list of names"),
    }
)


def plan(
    what: "str | Job | TrainSpec | MakeTrainSpec | Model | Callable[[], Model] | object",
    optimizer: OptimizerFunction | str | None = None,
    loss: Loss | LossFunction | None = None,
    sample: Batch | None = None,
    *,
    device: str | int | Device,
    effective_batch_size: int | None = None,
    world_size: int = 1,
    precision: PrecisionName | None = None,
    sequence_length: int | None = None,
    strategy: str | Callable[[], Strategy] = "auto",
    headroom: float | None = None,
    known: KnownDevices | None = None,
    rates: Rates | None = None,
    proposals: bool = True,
    fit: bool = False,
    changes: Sequence[str] = (),
    micro_batch_size: int | None = None,
    expandable_segments: bool = False,
) -> Plan:
    """Plan the memory of a training step without its device, and without allocating its memory.

    ```python
    print(ab.plan("llama-3.2-1b", device="RTX 4090", effective_batch_size=64, precision="bf16", sequence_length=1024))
    print(ab.plan(lambda: Net(), torch.optim.AdamW, loss, batch_of_one, device="24GiB", effective_batch_size=256))
    print(ab.plan(make_train_spec, sample=batch_of_one, device="24GiB", effective_batch_size=256))
    print(ab.plan("llama-3.1-8b", device="RTX 4090", effective_batch_size=64, sequence_length=1024, fit=True))
    ```

    The engine's own step runs on tensors without data that allocate as CUDA tensors do; see docs/memory.md.

    Args:
        what: a `Job`, the name of a recipe or of a published model, a configuration of transformers, a `TrainSpec`, a
            module, or a function that makes one of the last two.
        optimizer: function `named_parameters -> optimizer`, only for a module; or a name ("sgd", "adafactor", ...);
            None: the optimizer of `what`, or AdamW.
        loss: for a module, as for `Engine`. None: if `what` is a function, it makes a `TrainSpec`.
        sample: a batch of one sample, for a module or a `TrainSpec`; only its shapes and types are used.
        device: a name such as "RTX 4090" or "H100", a size such as "24GiB", or bytes; "cpu:8GiB" is for a CPU; or a
            `Device`.
        effective_batch_size: samples of one step over all ranks; None: the size of a job or a `TrainSpec`.
        world_size: number of ranks.
        precision: number format of forward and backward; None: the format of a `TrainSpec`, else "fp32".
        sequence_length: tokens per sample of a published language model; None: the model's maximum, at most 8,192.
        strategy: a name, as for `Engine`, or a function () -> strategy, such as `lambda: FSDP(replicas=2)`.
        headroom: part of the device to keep free; None: 10% if steps were measured on it, else 15%.
        known: cache of measured steps by device, used if `headroom` is None; None: no measurements.
        rates: speed of the device, from `anybatch.planner.calibration.measure_rates`; None: the data sheet of a
            device with a name.
        proposals: also plan single changes, each of which takes as long as the plan.
        fit: find the fastest combination of changes that fits, with the least effect on the computation, instead of
            planning single changes.
        changes: names of changes to apply, as plans list them: "checkpointing", "fused optimizer", "8-bit AdamW",
            "LoRA of rank 16", "bf16 weights", "offloading", ...
        micro_batch_size: samples of a micro-batch; None: the largest that fits.
        expandable_segments: plan for `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Raises:
        CannotPlanError: the memory of a step cannot be determined without running it; the message has the reason.
        UserError: an argument is invalid, or the engine refuses the step.
    """
    _check_sizes(effective_batch_size, micro_batch_size, world_size, sequence_length)
    _check_flags(proposals=proposals, fit=fit, expandable_segments=expandable_segments)
    _check_types(
        headroom=headroom,
        optimizer=optimizer,
        precision=precision,
        strategy=strategy,
        known=known,
        rates=rates,
        changes=changes,
    )
    subject = _subject(what, None if isinstance(optimizer, str) else optimizer, loss, sample, sequence_length)
    if isinstance(optimizer, str):
        subject = with_optimizer(subject, optimizer)
    size, is_open = effective_batch_size, precision is None
    if size is None and subject.settings is not None:
        size = subject.settings.largest_batch_size
    # Measurements are stored by precision, so the precision is resolved first.
    if size is None or (precision is None and known is not None):
        train, _ = build(subject.train)
        size, precision = size or train.effective_batch_size, precision or train.precision
    if size is None:
        message = (
            f"effective_batch_size (--effective-batch-size) is required: {subject.name} has no default batch size."
        )
        raise UserError(message)
    # An explicit headroom is used unchanged; the default is smaller on a device with verified plans.
    measured = None
    if known is not None and headroom is None:
        measured = measured_of(device, subject.name, precision or "fp32", known)
    on_cpu = isinstance(device, str) and device.startswith("cpu:")
    spec = StepSpec(
        train=partial(_chosen, subject.train, size, precision),
        sample=subject.sample,
        strategy=strategy,
        world_size=world_size,
        # The user's own batch occupies planned memory on a CPU; an accelerator receives it piece by piece.
        input_samples=ceil_div(size, world_size) if on_cpu and subject.own_batch else None,
        called=subject.called,
        profile="cpu" if on_cpu else "cuda",
    )
    asked = []
    for name in changes:
        asked.append(named_change(spec, name))
        spec = changed(spec, asked[-1:])
    found = make_plan(
        spec,
        budget_of(device, world_size=world_size, headroom=headroom, measured=measured),
        size,
        name=subject.name,
        rates=rates,
        proposals=proposals,
        fit=fit,
        precision_is_open=is_open,
        asked=asked,
        micro_batch_size=micro_batch_size,
        expandable_segments=expandable_segments,
    )
    return dataclasses.replace(found, notes=(*found.notes, *subject.notes))


def _chosen(make: MakeTrainSpec, effective_batch_size: int, precision: PrecisionName | None) -> TrainSpec:
    train = make()
    return dataclasses.replace(train, effective_batch_size=effective_batch_size, precision=precision or train.precision)


def _subject(
    what: object,
    optimizer: OptimizerFunction | None,
    loss: Loss | LossFunction | None,
    sample: Batch | None,
    sequence_length: int | None,
) -> PlanSubject:
    """Return the step to plan."""
    if isinstance(what, str):
        return load_subject(what, sequence_length=sequence_length)
    if isinstance(what, Job):
        return subject_of_job(what)
    # Recognised by attributes, because importing transformers is slow and optional.
    if hasattr(what, "model_type") and hasattr(what, "architectures"):
        return subject_of_config(what, sequence_length=sequence_length)
    if not isinstance(what, nn.Module | dict | TrainSpec) and not callable(what):
        message = (
            f"what={what!r} cannot be planned. Pass an ab.Job, the name of a recipe or model, a configuration of "
            "transformers, a TrainSpec, a module, or a function that makes one."
        )
        raise UserError(message)
    is_model = isinstance(what, nn.Module | dict)
    if sample is None or (is_model and loss is None):
        message = "a module needs its loss and a batch of one sample: ab.plan(model, optimizer, loss, sample)."
        raise UserError(message)
    return _subject_of_python(what, optimizer or adamw, loss, sample)


def _subject_of_python(
    what: Any,  # noqa: ANN401 (a TrainSpec, a module, or a function that makes one of them)
    optimizer: OptimizerFunction,
    loss: Loss | LossFunction | None,
    sample: Batch,
) -> PlanSubject:
    """Return a `TrainSpec`, a module, or a function that makes one of them, with its sample."""
    if isinstance(what, TrainSpec):
        name = type(what.model).__name__
        return PlanSubject(
            name=name,
            train=partial(_copied, what),
            sample=sample,
            own_batch=True,
        )
    if isinstance(what, nn.Module | dict):
        train = TrainSpec(model=what, optimizer=optimizer, loss=cast("Loss", loss))
        return PlanSubject(name=type(what).__name__, train=partial(_copied, train), sample=sample, own_batch=True)
    name = getattr(what, "__name__", "model")
    if loss is None:
        return PlanSubject(name=name, train=what, sample=sample, own_batch=True)

    def train_what() -> TrainSpec:
        return TrainSpec(model=what(), optimizer=optimizer, loss=loss)

    return PlanSubject(name=name, train=train_what, sample=sample, own_batch=True)


def _check_sizes(
    effective_batch_size: int | None, micro_batch_size: int | None, world_size: int, sequence_length: int | None
) -> None:
    """Refuse sizes that are not integers of at least 1."""
    if effective_batch_size is not None:
        checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    if micro_batch_size is not None:
        checked_int("micro_batch_size", micro_batch_size, error=BatchSizeError)
    checked_int("world_size", world_size)
    if sequence_length is not None:
        checked_int("sequence_length", sequence_length)


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        refuse_unless(isinstance(value, bool), name, value, "True or False")


def _check_types(**arguments: object) -> None:
    """Refuse arguments of a wrong type."""
    for name, (types, expected) in _TYPES.items():
        value = arguments[name]
        is_valid = (
            (value is None and name != "changes")
            or isinstance(value, types)
            or (name in _FUNCTIONS and callable(value))
        )
        refuse_unless(is_valid and not isinstance(value, bool), name, value, expected)


def _copied(train: TrainSpec) -> TrainSpec:
    """Return a copy with new modules and the same tensors: changes of its blocks do not affect the user's model."""
    if isinstance(train.optimizer, Optimizer):  # it holds these parameters, and its model is not changed
        return train
    modules = [train.model] if isinstance(train.model, nn.Module) else list(train.model.values())
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with _SameTensors():
        return dataclasses.replace(train, model=copy.deepcopy(train.model, {id(tensor): tensor for tensor in tensors}))


class _SameTensors(TorchFunctionMode):
    """A mode in which a deep copy shares all tensors, even tensors with a graph."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (any return type)
        """Handle the functions that deep copies of tensors call."""
        del types
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


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
