"""Plans every possible change of a step, and ranks them by time."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from anybatch.core.geometry import ceil_div
from anybatch.core.size_choice import even_size
from anybatch.errors import UserError
from anybatch.memory.trace import MemoryEnvelope, Peak
from anybatch.parallel.strategy import Strategy
from anybatch.planner.budget import Budget
from anybatch.planner.cost.device import Autocast
from anybatch.planner.cost.step_time import CostLine, Rates, Reduction, StepSeconds, step_seconds
from anybatch.planner.envelopes import Binding, Envelopes, find_envelopes, of_tensors, with_alone
from anybatch.planner.proposals.changes import Change, changed, possible_changes
from anybatch.planner.proposals.how_to_write import engine_line, strategy_lines
from anybatch.planner.proposals.more_ranks import smallest_world
from anybatch.planner.trace.step_spec import StepSpec, built


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The largest micro-batch that fits, as the step is or with a change.

    Attributes:
        name: the change; empty for none.
        how: the code to write for it.
        world_size: number of ranks.
        largest: the largest micro-batch size that keeps the headroom; 0 if not even one sample fits.
        micro_batch_size: the size to take: the share in even parts no larger than that; that of one sample, if
            nothing fits.
        accumulation_steps: micro-batches per rank and step.
        binds: the limit that a larger size would exceed; None where that is not known.
        peak: the moment of the most memory, at that size.
        reserved_bytes: memory that the allocator reserves at that size under the budget.
        envelope: memory at any other size, of the step (first or later) that needs most.
        asked: the micro-batch size that was asked for; None for the largest that fits.
        seconds: time of a step; None where the device's rates are not known.
        tensor_bytes: the most that tensors hold at that size; `peak` counts the workspaces of a CPU's kernels too.
        on_cpu: it is a CPU's memory, of which nothing is kept back.
        freely_reserved_bytes: memory that the allocator reserves at that size without a limit; None where that was not
            computed.
    """

    name: str
    how: str
    world_size: int
    largest: int
    micro_batch_size: int
    accumulation_steps: int
    peak: Peak
    reserved_bytes: int
    envelope: MemoryEnvelope
    tensor_bytes: int
    on_cpu: bool
    binds: Binding | None = None
    seconds: StepSeconds | None = None
    freely_reserved_bytes: int | None = None
    asked: int | None = None

    @property
    def fits(self) -> bool:
        """Return whether at least one sample fits, or as many as were asked for."""
        return self.largest >= (self.asked or 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTarget:
    """The hardware and batch size that a step is planned for.

    Attributes:
        budget: the device's memory.
        effective_batch_size: samples of one step, over all ranks.
        rates: of the device; None if they are not known.
        gradient_bytes: payload of the gradient all-reduce.
        micro_batch_size: samples of a micro-batch, where these are asked for; None for the largest that fits.
        expandable_segments: the allocator's segments grow, as `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` says.
    """

    budget: Budget
    effective_batch_size: int
    rates: Rates | None = None
    gradient_bytes: int = 0
    micro_batch_size: int | None = None
    expandable_segments: bool = False

    @property
    def autocast(self) -> Autocast:
        """The format of 16 bits that is proposed: bf16, where the device is not known to do without."""
        return "bf16" if self.budget.device is None else self.budget.device.autocast

    def share(self, world_size: int) -> int:
        """Return the samples of the largest rank share."""
        return ceil_div(self.effective_batch_size, world_size)

    def seconds(self, costs: CostLine, size: int, world_size: int) -> StepSeconds | None:
        """Return how long a step takes on `world_size` ranks in micro-batches of `size` at most.

        Args:
            costs: of the step's operations.
            size: largest number of samples of a micro-batch.
            world_size: number of ranks.
        """
        if self.rates is None:
            return None
        share, reduction, device = self.share(world_size), None, self.budget.device
        sizes = [size] * (share // size) + [share % size] * (share % size > 0)
        if world_size > 1 and device is not None:
            link = device.link_bytes_per_second
            reduction = Reduction(num_bytes=self.gradient_bytes, world_size=world_size, link_bytes_per_second=link)
        return step_seconds(costs, self.rates, sizes, reduction=reduction)


def fit_of(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, name: str = "", how: str = "") -> Fit:
    """Return the largest micro-batch that fits, and the cut of a rank share it gives.

    Args:
        spec: the step.
        envelopes: its memory at any micro-batch size.
        target: the hardware and batch size.
        name: the change that `spec` makes; empty for none.
        how: the code to write for it.
    """
    usable, share, expandable = target.budget.usable_bytes, target.share(spec.world_size), target.expandable_segments
    # A share that fits as one micro-batch has no gradients beneath it, and may fit for that alone.
    alone, asked, costs = envelopes.alone, target.micro_batch_size, envelopes.costs
    if alone is not None and (asked is None or asked >= share) and _largest(alone, target, share) == share:
        envelopes = alone
    largest = _largest(envelopes, target, share)
    # Where nothing fits, one sample is shown, so that a plan can say by how much it does not.
    size = even_size(share, max(1, largest)) if asked is None else min(asked, share)
    # The first step also allocates the optimizer's state, and may need more than all later ones.
    envelope = max((envelopes.steady, envelopes.first), key=lambda one: one.peak_bytes(size))
    reserved = freely = envelopes.reserved_bytes(size, expandable=expandable)
    if largest >= size:  # under the limit it returns cached segments instead of reserving more
        reserved = max(envelopes.peak_bytes(size), min(reserved, usable))
    return Fit(
        name=name,
        how=how,
        world_size=spec.world_size,
        largest=largest,
        micro_batch_size=size,
        accumulation_steps=ceil_div(share, size),
        peak=envelope.at_peak(size),
        reserved_bytes=reserved,
        envelope=envelope,
        tensor_bytes=max(of_tensors(one).peak_bytes(size) for one in (envelopes.steady, envelopes.first)),
        on_cpu=envelopes.profile == "cpu",
        binds=envelopes.binding(largest, usable, share),
        # How long weights travel within micro-batches is not known.
        seconds=None if envelopes.sharded else target.seconds(costs, size, spec.world_size),
        freely_reserved_bytes=freely,
        asked=None if asked is None else size,
    )


def _largest(envelopes: Envelopes, target: PlanTarget, share: int) -> int:
    """Return the largest micro-batch size that fits, at most a rank's share; 0 if none does."""
    usable = target.budget.usable_bytes
    # Overheads alone may exceed a small device, and a negative budget has no largest size.
    found = envelopes.largest_allocated(usable, expandable=target.expandable_segments) if usable > 0 else 0
    return share if found is None else min(share, found)


def envelopes_of(spec: StepSpec, target: PlanTarget) -> Envelopes:
    """Return the memory of a step, and of one of a single micro-batch where a rank's share may be one.

    Args:
        spec: the step.
        target: the hardware and batch size.

    Raises:
        CannotPlanError, UserError: as `find_envelopes`.
    """
    ready, _ = built(spec)
    usable, share = target.budget.usable_bytes, target.share(spec.world_size)
    # Sizes beyond a rank's share are never run, so none of them is traced.
    found = find_envelopes(ready, usable, most_samples=share)
    several = target.micro_batch_size is not None and target.micro_batch_size < share
    return found if several else with_alone(found, ready, usable, share)


def propose(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan each possible change; changes that cannot be planned are left out.

    Args:
        spec: the step as it is.
        envelopes: its memory.
        target: the hardware and batch size.
        fits: whether anything fits as it is. Where what stays from step to step is too large already, only dealing it
            to ranks is planned: no other change makes it smaller.
    """
    found = []
    by_category, usable = envelopes.steady.at_peak(1).by_category, target.budget.usable_bytes
    stays = sum(by_category[name] for name in ("weights", "gradients", "optimizer"))
    for change in possible_changes(spec, target.autocast) if fits or stays < usable else []:
        try:
            after = _with(change, spec, envelopes, target)
        # A change that cannot be planned must not keep the others from the table.
        except UserError:
            continue
        found.append(fit_of(spec, after, target, name=change.name, how=change.code))
    return [*found, *_dealt(spec, envelopes, target, fits=fits)]


def _with(change: Change, spec: StepSpec, envelopes: Envelopes, target: PlanTarget) -> Envelopes:
    if change.reshape is None:
        return envelopes_of(changed(spec, [change]), target)
    return reshaped(envelopes, change)


def reshaped(envelopes: Envelopes, change: Change) -> Envelopes:
    """Return the memory of a step with a change that is worked out from its traces.

    Args:
        envelopes: the step's.
        change: one with `reshape`.
    """
    assert change.reshape is not None, "others are traced"
    return dataclasses.replace(
        envelopes,
        steady=change.reshape(envelopes.steady),
        first=change.reshape(envelopes.first),
        costs=envelopes.costs if change.recost is None else change.recost(envelopes.costs),
        alone=None if envelopes.alone is None else reshaped(envelopes.alone, change),
    )


def _dealt(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan sharding of weights, gradients or the optimizer's state over ranks."""
    found = []
    try:
        if spec.world_size > 1 and not envelopes.sharded:
            found.append(_under(spec, "zero1", target, name="ZeRO-1"))
            found.append(_fsdp(spec, target))
        # More devices than planned are a proposal only where nothing on the planned number of them helps.
        if not fits and not any(one.fits for one in found):
            found += _smallest_world(spec, target)
    except UserError:  # a model, a loss or an optimizer that cannot be dealt
        pass
    return found


def _smallest_world(spec: StepSpec, target: PlanTarget) -> list[Fit]:
    """Plan FSDP over the fewest devices that suffice, its blocks checkpointed where it has blocks."""
    checkpointed = next((one for one in possible_changes(spec) if one.name == "checkpointing"), None)
    spec, _ = built(changed(spec, [] if checkpointed is None else [checkpointed]))
    # Negative where overheads take more than there is; no step fits into one byte, which is the answer then.
    sharded = dataclasses.replace(spec, strategy=sharded_in_bfloat16 if spec.trained.precision == "bf16" else "fsdp")
    smallest = smallest_world(sharded, max(1, target.budget.usable_bytes)).world_size
    if smallest is None:
        return []
    fit = _fsdp(dataclasses.replace(spec, world_size=smallest), target)
    if checkpointed is None:
        return [fit]
    how = f"{checkpointed.code}\n{fit.how}"
    return [dataclasses.replace(fit, name=f"{fit.name}, checkpointing", how=how)]


def _under(spec: StepSpec, strategy: str | Callable[[], Strategy], target: PlanTarget, *, name: str) -> Fit:
    """Plan the step under another strategy."""
    spec = dataclasses.replace(spec, strategy=strategy)
    before, argument = strategy_lines(strategy)
    how = "\n".join((*before, engine_line(argument)))
    return fit_of(spec, envelopes_of(spec, target), target, name=f"{name} over {spec.world_size} ranks", how=how)


def _fsdp(spec: StepSpec, target: PlanTarget) -> Fit:
    """Plan FSDP2; under bf16 its weights are gathered in bf16 too, and gradients reduced in float32."""
    spec, _ = built(spec)
    return _under(spec, sharded_in_bfloat16 if spec.trained.precision == "bf16" else "fsdp", target, name="FSDP")


def sharded_in_bfloat16() -> Strategy:
    """Return FSDP2 that gathers weights in bf16 and reduces gradients in float32."""
    # Here, because what FSDP2 needs of torch takes two seconds to import.
    from anybatch.parallel.fsdp import FSDP  # noqa: PLC0415
    from anybatch.parallel.sharding import Sharding  # noqa: PLC0415

    return FSDP(Sharding(param_dtype=torch.bfloat16))


def best_first(fits: Iterable[Fit]) -> list[Fit]:
    """Return the fits by predicted time; where that is not known, those with fewer and larger micro-batches first.

    Args:
        fits: in any order.
    """

    def place(one: Fit) -> tuple[bool, float, int, int, int]:
        seconds = float("inf") if one.seconds is None else one.seconds.total
        # False sorts before True: changes that fit come first.
        return not one.fits, seconds, one.accumulation_steps, -one.largest, one.reserved_bytes

    return sorted(fits, key=place)
