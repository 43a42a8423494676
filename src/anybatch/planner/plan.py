"""Plan a training step without the device: the micro-batch size that fits, memory by purpose, and changes that help."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from anybatch.core.splitting import BatchPlan, SplitOptions, plan_batch
from anybatch.core.units import columns, in_bytes, per_second, three_digits
from anybatch.diagnostics.memory_pictures import draw_memory, memory_bars
from anybatch.memory.device_memory import Counted, counting_text
from anybatch.memory.trace import ORDER, timeline
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.planner.budget import Budget
from anybatch.planner.changes import Change, code_of, optimizer_name
from anybatch.planner.envelopes import Binding
from anybatch.planner.fit import (
    Answer,
    Combination,
    Fit,
    PlanTarget,
    best_first,
    envelopes_of,
    find_combination,
    fit_of,
    gains,
    propose,
    reshaped,
)
from anybatch.planner.stand_ins import FourBitLinear
from anybatch.planner.step_spec import StepSpec, as_module, built
from anybatch.planner.step_time import StepSeconds
from anybatch.planner.verification import Verification

_NAME_WIDTH, _COLUMNS = 11, 80


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The micro-batch size that fits on a device, and the reason for it; `print(plan)` shows the plan as text."""

    name: str  # name of the recipe, model or class
    spec: StepSpec  # the step
    num_parameters: int  # number of parameters, including frozen ones
    optimizer: str  # class name of the optimizer
    precision: str  # number formats of forward and backward
    target: PlanTarget  # the device, and the effective batch size
    batch: BatchPlan  # the split of the effective batch into micro-batches and over ranks at the proposed size
    baseline: Fit  # the step without proposed changes, with the largest micro-batch that fits
    changes: tuple[Fit, ...]  # the step with each proposed change, the fastest first
    notes: tuple[str, ...]  # notes for the user about the plan
    seconds: float  # time that planning took
    requested: tuple[Change, ...] = ()  # changes that the user has requested, included in the step
    answer: Answer | None = None  # the combination of changes that fits, if requested

    @property
    def budget(self) -> Budget:
        """The device's memory, and the part of it available to tensors."""
        return self.target.budget

    @property
    def micro_batch_size(self) -> int:
        """The proposed size in samples; 0 if not even one sample fits."""
        return self.baseline.micro_batch_size if self.baseline.fits else 0

    @property
    def fits(self) -> bool:
        """Whether the step fits without changes, or with the combination of changes in `answer`."""
        return self.baseline.fits or (self.answer is not None and self.answer.best is not None)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per rank and step at the proposed size."""
        return self.baseline.accumulation_steps

    def summary(self) -> Mapping[str, str]:
        """Return the rows of the printed summary by label.

        The labels are fits, peak, left and largest; if not even one sample fits: fits, because, peak and smallest.
        """
        return _fitting(self) if self.baseline.fits else _nothing_fits(self)

    def bytes_by_purpose(self) -> Mapping[str, int]:
        """Return the device's memory at the peak: tensors by category, the allocator's rounding, and libraries."""
        fit = self.baseline
        sizes: dict[str, int] = {name: fit.peak.by_category[name] for name in ORDER}
        sizes["allocator"] = fit.reserved_bytes - fit.peak.num_bytes
        sizes["libraries"] = self.budget.overhead_bytes
        return {name: size for name, size in sizes.items() if size}

    def __str__(self) -> str:
        """Return the plan as text, 80 columns wide."""
        lines = [
            f"{self.name}: {self.num_parameters:,} parameters, {self.optimizer}, {self.precision}",
            f"on {self.batch.world_size} x {self.budget}, {self.batch.num_samples:,} samples a step",
            *(f"with {change.name}: {change.costs}" for change in self.requested),
            "",
            *_rows(**self.summary()),
            *_time(self),
            "",
            *memory_bars(self.bytes_by_purpose(), self.budget.total_bytes).splitlines(),
        ]
        if self.changes:
            lines += ["", *_table(self)]
        if self.answer is not None:
            lines += ["", *_answer(self, self.answer)]
        lines += ["", *counting_text(*counted_kinds(self.baseline)).splitlines()]
        lines += [f"note: {note}" for note in (*self.budget.notes, *self.notes)]
        checked = "; memory grows linearly with the micro-batch, checked at a third size" if self.baseline.fits else ""
        lines.append(f"planned in {self.seconds:.1f} s without the device{checked}")
        return "\n".join(lines)


def in_seconds(seconds: float) -> str:
    """Format a time with three digits: `85.0 ms`, `1.23 s`."""
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def counted_kinds(fit: Fit) -> tuple[Counted, ...]:
    """Return the kinds of memory in `peak_text`; on a CPU, tensors, and workspaces if they were measured."""
    if not fit.on_cpu:
        return "in tensors", "in all"
    return ("in tensors", "allocated") if fit.tensor_bytes < fit.peak.num_bytes else ("in tensors",)


def peak_text(fit: Fit, budget: Budget) -> str:
    """Format the peak memory of a step: of its tensors, and of the device."""
    device_bytes = fit.reserved_bytes + budget.overhead_bytes
    sizes: dict[Counted, int] = {
        "in tensors": fit.tensor_bytes,
        "allocated": fit.peak.num_bytes,
        "in all": device_bytes,
    }
    return ", ".join(f"{in_bytes(sizes[kind])} {kind}" for kind in counted_kinds(fit))


def _time(plan: Plan) -> list[str]:
    """Return the row with the time of a step and the samples per second."""
    seconds = plan.baseline.seconds
    if seconds is None or not plan.baseline.fits:
        return []
    rate = per_second(plan.batch.num_samples / seconds.total)
    return _rows(time=f"{_seconds_text(seconds)}; {rate} samples/s")


def _seconds_text(seconds: StepSeconds) -> str:
    band = f"{in_seconds(seconds.least)} and {in_seconds(seconds.greatest)}"
    return f"{in_seconds(seconds.total)} a step, between {band} (from the data sheet)"


def _fitting(plan: Plan) -> dict[str, str]:
    fit, budget = plan.baseline, plan.budget
    left, headroom = 1.0 - (fit.reserved_bytes + budget.overhead_bytes) / budget.total_bytes, budget.headroom
    kept = "at least the" if left >= headroom else "after the allocator's cache, which may use the"
    return {
        "fits": f"micro-batches of {fit.micro_batch_size}: {plan.batch}",
        "peak": f"{peak_text(fit, budget)}, {_moment(fit)}",
        "left": f"{left:.0%} of the device, {kept} headroom of {headroom:.0%} ({budget.why})",
        "largest": f"{fit.largest}{_bound(plan)}",
    }


def _bound(plan: Plan) -> str:
    """Format the limit that a larger micro-batch would exceed."""
    fit, usable = plan.baseline, plan.budget.usable_bytes
    if fit.limit == "batch":
        return ", all samples of a rank"
    if fit.limit == "allocator":
        return f": by tensor sizes alone {fit.envelope.largest(usable)} would fit, but the allocator rounds sizes up"
    what = "the optimizer's step" if fit.limit == "optimizer step" else "tensors"
    return (
        f"; one more would need {in_bytes(fit.envelope.peak_bytes(fit.largest + 1))} for {what}, "
        f"but {in_bytes(usable)} are available"
    )


def _nothing_fits(plan: Plan) -> dict[str, str]:
    """Return the rows if not even one sample fits, with the fastest change that would fit."""
    fit, usable = plan.baseline, max(0, plan.budget.usable_bytes)
    state = {name: fit.peak.by_category[name] for name in ("weights", "buffers", "gradients", "optimizer")}
    nothing_left = (
        f"libraries take {in_bytes(plan.budget.overhead_bytes)} of "
        f"{in_bytes(plan.budget.total_bytes)}, and {100 * plan.budget.headroom:.0f}% is kept free"
    )
    alone = [(size, name) for name, size in fit.peak.by_category.items() if size > usable]
    if not usable:
        term = nothing_left
    elif sum(state.values()) > usable and not any(name in state for _, name in alone):
        term = " and ".join(f"{name} ({in_bytes(size)})" for name, size in state.items() if size) + " alone exceed it"
    elif alone:
        size, name = max(alone, key=lambda row: (row[1] in state, row[0]))
        term = f"the {name} alone {'takes' if name == 'optimizer' else 'take'} {in_bytes(size)}"
    else:
        largest = sorted(((size, name) for name, size in fit.peak.by_category.items()), reverse=True)[:3]
        term = "no part alone is too large; " + ", ".join(f"{name} {in_bytes(size)}" for size, name in largest)
    samples = "one sample takes" if fit.micro_batch_size == 1 else f"{fit.micro_batch_size} samples take"
    fitting = [change for change in plan.changes if change.fits]
    change = f"{fitting[0].name}: {fitting[0].how}" if fitting else "none of the changes that were tried"
    return {
        "fits": f"nothing: {samples} {in_bytes(fit.peak.num_bytes)}, but {in_bytes(usable)} are available",
        "because": term,
        "peak": _moment(fit),
        # A combination is printed below.
        **({} if plan.answer is not None else {"fastest": f"change that would fit: {change}"}),
    }


def _moment(fit: Fit) -> str:
    phase = {"setup": "before the step", "update": "in the update"}.get(fit.peak.phase, f"in the {fit.peak.phase}")
    return f"{phase}, at {fit.peak.operation}" if fit.peak.operation else phase


def _table(plan: Plan) -> list[str]:
    """Return the table of changes, with the baseline first and then the fastest, and the code of the best change."""
    rows = [("change", "micro-batch", "steps", "memory", "s/step")]
    rows += [_row(fit.name or "no change", fit, plan.budget) for fit in (plan.baseline, *plan.changes)]
    lines, best = columns(rows), plan.changes[0]
    if others := [fit.name for fit in plan.changes if not fit.change.same_step]:
        lines += _wrapped("not equal", [f"the results of {', '.join(others)}"])
    # The first change is the fastest, if any makes a difference.
    if not gains(best, plan.baseline):
        return lines
    return [*lines, *_wrapped("costs", [best.change.costs or "none"]), *best.how.splitlines()]


def _answer(plan: Plan, answer: Answer) -> list[str]:
    """Return the combination that fits, its costs, its code, an alternative, and the other attempts."""
    lines = _chosen(plan, "fits with", answer.best)
    if answer.best is None:
        lines = _wrapped("fits with", ["none of the changes that were tried"])
    lines += _chosen(plan, "or with", answer.alternative)
    rows, none = [("tried", "micro-batch", "steps", "memory", "s/step")], ("", "-", "-", "-", "-")
    rows += [none if one.fit is None else _row("", one.fit, plan.budget) for one in answer.tried]
    head, *sizes = columns(rows)
    lines += ["", head]
    for combination, row in zip(answer.tried, sizes, strict=True):
        lines += [combination.name, f"{row}  {combination.why or 'the answer'}"]
    return lines


def _chosen(plan: Plan, label: str, choice: Combination | None) -> list[str]:
    """Return a combination with its costs and its code."""
    if choice is None or choice.fit is None:
        return []
    equal = ["same gradient and update as without changes, up to rounding"] if choice.same_step else []
    return [
        *_wrapped(label, [choice.name, *_sizes_of(choice.fit, plan.target)]),
        *_wrapped("costs", [f"{change.name}: {change.costs}" for change in choice.changes if change.costs]),
        *_wrapped("exact", equal),
        *([""] if choice.changes else []),
        *(f"  {line}" for line in code_of(choice.changes).splitlines()),
    ]


def _sizes_of(fit: Fit, target: PlanTarget) -> list[str]:
    batch = plan_batch(target.effective_batch_size, fit.world_size, SplitOptions(micro_batch_size=fit.micro_batch_size))
    peak = f"{peak_text(fit, target.budget)}, of {in_bytes(target.budget.total_bytes)}"
    seconds = [] if fit.seconds is None else [_seconds_text(fit.seconds)]
    return [f"micro-batches of {fit.micro_batch_size}: {batch}", peak, *seconds]


def _row(name: str, fit: Fit, budget: Budget) -> tuple[str, str, str, str, str]:
    memory = in_bytes(fit.reserved_bytes + budget.overhead_bytes)
    if not fit.fits:
        return name, "-", "-", memory, "-"
    seconds = "-" if fit.seconds is None else in_seconds(fit.seconds.total)
    return name, str(fit.micro_batch_size), str(fit.accumulation_steps), memory, seconds


def _wrapped(name: str, texts: Sequence[str]) -> list[str]:
    lines = [line for text in texts for line in wrap(text, _COLUMNS - _NAME_WIDTH, subsequent_indent="  ")]
    return [f"{name if not number else '':<{_NAME_WIDTH}}{line}" for number, line in enumerate(lines)]


def _rows(**texts: str) -> list[str]:
    return [f"{name:<{_NAME_WIDTH}}{text}" for name, text in texts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The step of a plan with some changes; values about memory are None if it was not planned."""

    name: str  # names of the changes
    changes: tuple[str, ...]  # the same, one by one
    strategy: str | None  # strategy that `--fit` chose
    how: str  # code that makes the changes
    costs: Mapping[str, str]  # drawback of each change
    same_step: bool  # whether gradient and update are those of the requested step, up to rounding
    why_not: str | None  # why the combination was not chosen
    fits: bool
    micro_batch_size: int | None = None  # proposed size, in samples
    accumulation_steps: int | None = None  # micro-batches per rank and step
    largest: int | None = None  # largest micro-batch size that keeps the headroom; 0 if not even one sample fits
    binds: Binding | None = None  # limit that a larger size would exceed
    peak_bytes: int | None = None  # peak of live tensors, on a CPU with measured workspaces
    tensor_bytes: int | None = None  # the part of the peak that is tensors
    reserved_bytes: int | None = None  # peak of the allocator
    peak: Mapping[str, str] | None = None  # phase and operation of the peak
    seconds: StepSeconds | None = None  # predicted time; None where it cannot be predicted, or nothing fits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValues:
    """A plan as plain values, for JSON. Names are stable; later versions may add some."""

    name: str  # name of the recipe, model or class
    num_parameters: int  # number of parameters, including frozen ones
    optimizer: str  # class name of the optimizer
    precision: str  # number formats of forward and backward
    asked: tuple[str, ...]  # requested changes
    device: Mapping[str, str | float | None]  # name, total_bytes, usable_bytes and headroom
    world_size: int  # number of ranks
    effective_batch_size: int  # samples of a step, over all ranks
    fits: bool  # whether the step fits without changes, or with those of `answer`
    baseline: PlannedStep  # the requested step
    bytes_by_purpose: Mapping[str, int]  # memory at the peak
    changes: tuple[PlannedStep, ...]  # the step with each proposed change, the fastest first
    answer: PlannedStep | None  # the combination of changes that fits, with `--fit`
    alternative: PlannedStep | None  # a combination that trains all parameters, if the answer does not
    tried: tuple[PlannedStep, ...]  # all planned combinations
    notes: tuple[str, ...]
    verified: Verification | None  # the measured step, with `--verify`


def values_of(plan: Plan, verified: Verification | None = None) -> PlanValues:
    """Return a plan as plain values."""
    budget, answer = plan.budget, plan.answer or Answer(best=None, tried=())
    combinations = [
        None if choice is None else _planned_step(choice.changes, choice.fit, choice.why)
        for choice in (answer.best, answer.alternative, *answer.tried)
    ]
    return PlanValues(
        name=plan.name,
        num_parameters=plan.num_parameters,
        optimizer=plan.optimizer,
        precision=plan.precision,
        asked=tuple(change.name for change in plan.requested),
        device={
            "name": None if budget.device is None else budget.device.name,
            **{name: getattr(budget, name) for name in ("total_bytes", "usable_bytes", "headroom")},
        },
        world_size=plan.batch.world_size,
        effective_batch_size=plan.batch.num_samples,
        fits=plan.fits,
        baseline=_planned_step((), plan.baseline),
        bytes_by_purpose=plan.bytes_by_purpose(),
        changes=tuple(_planned_step((fit.change,), fit) for fit in plan.changes),
        answer=combinations[0],
        alternative=combinations[1],
        tried=tuple(filter(None, combinations[2:])),
        notes=(*budget.notes, *plan.notes),
        verified=verified,
    )


def _planned_step(changes: Sequence[Change], fit: Fit | None, why: str = "") -> PlannedStep:
    memory: dict[str, Any] = {}
    if fit is not None:
        sizes = ("micro_batch_size", "accumulation_steps", "largest", "tensor_bytes", "reserved_bytes")
        seconds = None if fit.seconds is None or not fit.fits else fit.seconds
        memory = {name: getattr(fit, name) for name in sizes} | {"binds": fit.limit, "seconds": seconds}
        memory["peak_bytes"] = fit.peak.num_bytes
        memory["peak"] = {"phase": fit.peak.phase, "operation": fit.peak.operation}
    return PlannedStep(
        name=" + ".join(change.name for change in changes),
        changes=tuple(change.name for change in changes if change.strategy is None),
        strategy="".join(change.name for change in changes if change.strategy is not None) or None,
        how=code_of(changes),
        costs={change.name: change.costs for change in changes if change.costs},
        same_step=all(change.same_step for change in changes),
        why_not=why or None,
        fits=fit is not None and fit.fits,
        **memory,
    )


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the predicted memory of tensors over a step, at the proposed micro-batch size.

    The limit is drawn at the memory available to tensors, without context, libraries and the allocator's rounding.

    Raises:
        UserError: matplotlib is not installed, or the file name does not end in .png, .svg or .pdf.
        OSError: the file cannot be written.
    """
    fit, budget = plan.baseline, plan.budget
    overhead = budget.overhead_bytes + fit.reserved_bytes - fit.peak.num_bytes
    shown = "two of " if fit.accumulation_steps > 1 else "all of "
    planned = timeline(fit.envelope.at(fit.micro_batch_size))
    draw_memory(
        dataclasses.replace(planned, marks=_beginnings(planned.marks)),
        path,
        title=f"{plan.name} on {plan.budget}, planned: micro-batches of {fit.micro_batch_size}",
        subtitle=f"{plan.optimizer}, {plan.precision}; {shown}{fit.accumulation_steps} micro-batches are shown; "
        f"plus {in_bytes(overhead)} overhead",
        limit_bytes=budget.total_bytes - overhead,
        headroom=budget.headroom,
    )


def _beginnings(marks: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return the marks at the beginning of each micro-batch, counted from 1, and of the update."""
    found = []
    for moment, name in marks:
        if match := re.fullmatch(r"micro-batch (\d+) begins", name):
            found.append((moment, f"micro-batch {int(match[1]) + 1}"))
        elif name == "update begins":
            found.append((moment, "update"))
    return tuple(found)


def make_plan(
    spec: StepSpec,
    budget: Budget,
    effective_batch_size: int,
    *,
    name: str = "",
    proposals: bool = True,
    fit: bool = False,
    may_change_precision: bool = False,
    requested: Sequence[Change] = (),
    micro_batch_size: int | None = None,
    expandable_segments: bool = False,
) -> Plan:
    """Plan a training step for a device."""
    start = time.perf_counter()
    # A CPU has no device limit for strategies to use.
    device_bytes = None if spec.profile == "cpu" else budget.total_bytes
    spec = dataclasses.replace(spec, device_bytes=device_bytes, device=budget.device)
    ready, reason = built(spec)
    parameters, modules = (list(getattr(as_module(ready.trained.model), name)()) for name in ("parameters", "modules"))
    target = PlanTarget(
        budget=budget,
        effective_batch_size=effective_batch_size,
        gradient_bytes=gradient_bytes(p for p in parameters if p.requires_grad),
        micro_batch_size=micro_batch_size,
        expandable_segments=expandable_segments,
    )
    envelopes = envelopes_of(ready, target)
    spec = dataclasses.replace(spec, workspaces=envelopes.workspaces)
    envelopes = reshaped(envelopes, requested)
    baseline = fit_of(spec, envelopes, target)
    changes = propose(spec, envelopes, target, fits=baseline.fits) if proposals and not fit else []
    answer = find_combination(spec, target, may_change_precision=may_change_precision) if fit else None
    split = SplitOptions(micro_batch_size=baseline.micro_batch_size)
    shown = ("strategy", "sharding", "reduction") if spec.world_size > 1 else ()
    return Plan(
        name=name,
        spec=spec,
        num_parameters=sum(parameter.numel() for parameter in parameters if parameter.dtype is not torch.uint8)
        + sum(each.shape[0] * each.shape[1] for each in modules if isinstance(each, FourBitLinear)),
        optimizer=optimizer_name(ready.trained),
        precision=ready.trained.precision,
        target=target,
        batch=plan_batch(effective_batch_size, spec.world_size, split),
        baseline=baseline,
        changes=tuple(best_first(changes, baseline)),
        requested=tuple(requested),
        answer=answer,
        notes=(
            *([] if reason is None else [f"the model could not be created on the meta device: {reason}"]),
            *(f"{name}: {envelopes.decisions[name]}" for name in shown if name in envelopes.decisions),
            *envelopes.notes,
        ),
        seconds=time.perf_counter() - start,
    )
