"""`ab.plan`: the memory plan of a job, a model or a model's name."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from anybatch.core.compatibility import PrecisionName
from anybatch.core.geometry import ceil_div, checked_int, require
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.torch_internals import outside_modes
from anybatch.core.tree import Batch
from anybatch.core.units import HEADROOM
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.precision import OptimizerFunction
from anybatch.engine.user_code import Model
from anybatch.errors import BatchSizeError, PlanError, UserError
from anybatch.memory.device_memory import limit_of, memory_in_use, outside_bytes, read_host
from anybatch.memory.trace import MemoryEnvelope
from anybatch.parallel.strategy import Strategy
from anybatch.planner.budget import COMMUNICATOR_BYTES, WORKSPACE_BYTES, budget_of
from anybatch.planner.changes import changed, named_change
from anybatch.planner.cuda_emulation import Profile
from anybatch.planner.devices import Device
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.plan import Plan, make_plan
from anybatch.planner.step_spec import MakeTrainSpec, StepSpec, build, built
from anybatch.recipes.job import Job
from anybatch.recipes.planning.subjects import (
    PlanSubject,
    adamw,
    load_subject,
    subject_of_config,
    subject_of_job,
    with_optimizer,
)

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "headroom": ((int, float), "a number from 0 to below 1, or None"),
        "optimizer": ((str,), "a function named_parameters -> optimizer, the name of an optimizer, or None"),
        "precision": ((str,), "'fp32', 'bf16', 'fp16' or None"),
        "strategy": ((str,), "a name, or a function () -> strategy"),
        "changes": ((list, tuple), "a list of names"),
        "proposals": ((bool,), "True or False"),
        "fit": ((bool,), "True or False"),
        "expandable_segments": ((bool,), "True or False"),
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

    The engine's real step runs on tensors without data that allocate as CUDA tensors do; see docs/memory.md.

    Args:
        what: a `Job`, the name of a recipe or of a published model, a configuration of transformers, a `TrainSpec`, a
            module, or a function that returns a `TrainSpec` or a module.
        optimizer: function `named_parameters -> optimizer`, only for a module; or a name ("sgd", "adafactor", ...);
            None: the optimizer of `what`, or AdamW.
        loss: the loss for a module, as for `Engine`; None if `what` is a function that returns a `TrainSpec`.
        sample: a batch of one sample, for a module or a `TrainSpec`; only its shapes and types are used.
        device: a name such as "RTX 4090", a size such as "24GiB" ("cpu:8GiB" for a CPU), bytes, or a `Device`.
        effective_batch_size: samples of one step over all ranks; None: the size of a job or a `TrainSpec`.
        world_size: number of ranks.
        precision: number format of forward and backward; None: the format of a `TrainSpec`, else "fp32".
        sequence_length: tokens per sample of a published language model; None: the model's maximum, at most 8,192.
        strategy: a name, as for `Engine`, or a function () -> strategy, such as `lambda: FSDP(replicas=2)`.
        headroom: fraction of the device to keep free; None: 15%.
        proposals: also plan each change that would make more fit; each takes as long as the plan.
        fit: find the fastest combination of changes that fits and affects the computation least, instead of planning
            each change.
        changes: names of changes to apply, as plans list them: "checkpointing", "fused optimizer", "8-bit AdamW",
            "LoRA of rank 16", "bf16 weights", ...
        micro_batch_size: samples of a micro-batch; None: the largest that fits.
        expandable_segments: plan for `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Raises:
        CannotPlanError: the memory of a step cannot be determined without running it; the message has the reason.
        UserError: an argument is invalid, or the engine refuses the step.
    """
    _check(locals())
    subject = _subject(what, None if isinstance(optimizer, str) else optimizer, loss, sample, sequence_length)
    if isinstance(optimizer, str):
        subject = with_optimizer(subject, optimizer)
    mask = subject.sample.get("attention_mask") if isinstance(subject.sample, dict) else None
    if isinstance(mask, torch.Tensor) and mask.device.type != "meta" and bool(mask.all()):
        notes = (*subject.notes, "left out the sample's attention_mask of ones, as models of transformers do")
        rest = {name: value for name, value in subject.sample.items() if name != "attention_mask"}
        subject = dataclasses.replace(subject, sample=rest, notes=notes)
    size, is_open = effective_batch_size, precision is None
    if size is None and subject.settings is not None:
        size = subject.settings.largest_batch_size
    if size is None:
        size = build(subject.train)[0].effective_batch_size
    if size is None:
        message = (
            f"effective_batch_size (--effective-batch-size) is required: {subject.name} has no default batch size."
        )
        raise UserError(message)
    on_cpu = isinstance(device, str) and device.startswith("cpu:")
    budget = budget_of(device, world_size=world_size, headroom=headroom)
    spec = StepSpec(
        train=partial(_with_settings, subject.train, size, precision),
        sample=subject.sample,
        strategy=strategy,
        world_size=world_size,
        input_samples=ceil_div(size, world_size) if on_cpu and subject.makes_batches else None,  # the whole batch
        called=subject.called,
        device=budget.device,
        profile="cpu" if on_cpu else "cuda",
    )
    requested = []
    for name in changes:
        requested.append(named_change(spec, name))
        spec = changed(spec, requested[-1:])
    found = make_plan(
        spec,
        budget,
        size,
        name=subject.name,
        proposals=proposals,
        fit=fit,
        may_change_precision=is_open,
        requested=requested,
        micro_batch_size=micro_batch_size,
        expandable_segments=expandable_segments,
    )
    return dataclasses.replace(found, notes=(*found.notes, *subject.notes))


def _with_settings(make: MakeTrainSpec, effective_batch_size: int, precision: PrecisionName | None) -> TrainSpec:
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
    if isinstance(what, nn.Module | dict):
        what = TrainSpec(model=what, optimizer=optimizer, loss=cast("Loss", loss))
    if isinstance(what, TrainSpec):
        # Copied, because a change may replace blocks, and the user's model must not change.
        train: MakeTrainSpec = partial(_copied, what)
        return PlanSubject(name=type(what.model).__name__, train=train, sample=sample, makes_batches=True)
    train = what if loss is None else lambda: TrainSpec(model=what(), optimizer=optimizer, loss=loss)
    return PlanSubject(name=getattr(what, "__name__", "model"), train=train, sample=sample, makes_batches=True)


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuse sizes that are not integers of at least 1, and arguments of a wrong type."""
    checked_int("world_size", arguments["world_size"])
    for name in ("effective_batch_size", "micro_batch_size", "sequence_length"):
        if arguments[name] is not None:
            checked_int(name, arguments[name], error=UserError if name == "sequence_length" else BatchSizeError)
    for name, (types, expected) in _TYPES.items():
        value = arguments[name]
        is_none = value is None and expected.endswith("None")
        is_function = callable(value) and "function" in expected
        is_flag = isinstance(value, bool) and bool not in types
        require(is_none or is_function or (isinstance(value, types) and not is_flag), name, value, expected)


def _copied(train: TrainSpec) -> TrainSpec:
    """Return a copy with new modules and the same tensors, so that changed blocks do not affect the user's model."""
    if isinstance(train.optimizer, Optimizer):  # no change replaces the blocks of such a model
        return train
    modules = [train.model] if isinstance(train.model, nn.Module) else list(train.model.values())
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    with _SameTensors():
        return dataclasses.replace(train, model=copy.deepcopy(train.model, {id(tensor): tensor for tensor in tensors}))


class _SameTensors(TorchFunctionMode):
    """A mode in which a deep copy shares all tensors, even tensors with a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
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
) -> Largest:
    """Return a function for `Auto(largest=...)` that plans the engine's step on the first batch.

    ```python
    auto = Auto(largest=planned_largest(make_train_spec))
    engine = ab.Engine.from_spec(make_train_spec(), Hardware(micro_batch_size=auto))
    ```

    The plan is for one rank; a rank of `all_reduce` also needs memory for a communicator.

    Args:
        train: function () -> `TrainSpec`, or a `TrainSpec`, whose modules are traced in their state at the first batch,
            with their hooks.
        device: where to train; None: torch's accelerator if there is one, else the CPU.
        world_size: number of ranks.
        budget_bytes: memory for tensors; None: the free memory of the device.
        headroom: fraction of the device to keep free; None: 15%.

    Returns:
        Function (batch, num_samples) -> size, at least 1. It raises `PlanError` if the step cannot be planned.
    """
    free = HEADROOM if headroom is None else headroom
    require(0.0 <= free < 1.0, "headroom", free, "from 0 to below 1, or None")

    def largest(batch: Batch, num_samples: int) -> int:
        target = _accelerator_or_cpu() if device is None else device
        profile: Profile = "cpu" if target.type == "cpu" else "cuda"
        try:
            with outside_modes():  # an enforced budget would count the copy
                spec, _ = built(StepSpec(train=train, sample=batch, strategy="single", profile=profile))
                spec = spec.with_train(effective_batch_size=num_samples)
                usable = int((budget_bytes or 0) * (1.0 - free))
                if budget_bytes is None:
                    usable = _usable_bytes(target, world_size, free)
                envelopes = find_envelopes(spec, usable, max_samples=num_samples)
        except PlanError:
            raise
        except UserError as error:  # the engine's first step raises it again
            raise PlanError(str(error)) from error
        found = envelopes.largest_allocated(max(0, usable - _other_bytes(target, envelopes.steady)))
        if found == 0:
            message = "according to the plan, not even one sample fits"
            raise PlanError(message)
        return num_samples if found is None else min(found, num_samples)

    return largest


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
        message = f"the memory of {device} is unknown"
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
