"""Find the largest micro-batch that fits, for a step, for each change of it, and for combinations (`--fit`).

`--fit` tries changes of the requested step in levels, the smallest first: matrix products in bf16; weights in bf16;
optimizer state in 8 bits; other trained parameters. Each level is combined with changes that keep the gradient (fused
update, checkpointing, chunked loss), and the fastest combination of the first level that fits is the answer.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from anybatch.core.geometry import NEAR_BEST, ceil_div, even_size
from anybatch.core.units import in_bytes
from anybatch.engine.strategy_choice import replica_bytes
from anybatch.errors import UserError
from anybatch.memory.trace import MemoryEnvelope, Peak
from anybatch.parallel.strategy import Strategy
from anybatch.planner.budget import Budget
from anybatch.planner.caching_allocator import replay
from anybatch.planner.changes import (
    Change,
    all_changes,
    changed,
    engine_line,
    fsdp_strategy,
    modules_of,
    single_changes,
    strategy_lines,
)
from anybatch.planner.devices import DEVICES, Autocast
from anybatch.planner.envelopes import Binding, Envelopes, find_envelopes, with_alone
from anybatch.planner.step_spec import StepSpec, as_module, built
from anybatch.planner.step_time import CostLine, StepSeconds, step_seconds
from anybatch.planner.step_trace import trace_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The largest micro-batch that fits, with or without a change of the step."""

    name: str  # the change; empty for none
    how: str  # code that makes the change
    world_size: int
    largest: int  # the largest micro-batch size that keeps the headroom; 0 if not even one sample fits
    micro_batch_size: int  # the proposed size: a rank's samples in even parts of at most `largest`; 1 if nothing fits
    accumulation_steps: int  # micro-batches per rank and step
    peak: Peak  # the moment of peak memory, at that size
    reserved_bytes: int  # memory that the allocator reserves at that size under the budget
    envelope: MemoryEnvelope  # memory at any size, of the step (first or later) with the higher peak
    on_cpu: bool  # whether the memory belongs to a CPU, which has no caching allocator
    limit: Binding  # the limit that a larger size would exceed
    seconds: StepSeconds | None  # time of a step; None where it cannot be predicted
    reserved_bytes_without_limit: int  # memory that the allocator reserves at that size without a limit
    requested_size: int | None  # the requested micro-batch size; None for the largest that fits

    @property
    def fits(self) -> bool:
        """Whether the requested micro-batch size fits; without a request, whether one sample fits."""
        return self.largest >= (self.requested_size or 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTarget:
    """The hardware and batch size that a step is planned for."""

    budget: Budget  # the device's memory
    effective_batch_size: int  # samples of one step, over all ranks
    gradient_bytes: int = 0  # payload of the gradient all-reduce
    micro_batch_size: int | None = None  # the requested micro-batch size; None for the largest that fits
    expandable_segments: bool = False  # whether `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` is set

    @property
    def autocast(self) -> Autocast:
        """The proposed 16-bit format: the device's, or bf16 for an unknown device."""
        return "bf16" if self.budget.device is None else self.budget.device.autocast

    def share(self, world_size: int) -> int:
        """Return the maximum number of samples that a rank has in a step."""
        return ceil_div(self.effective_batch_size, world_size)

    def seconds(self, costs: CostLine, size: int, world_size: int) -> StepSeconds | None:
        """Return the time of a step on `world_size` ranks in micro-batches of at most `size`; None if unknown."""
        device = self.budget.device
        if device is None:
            return None
        share = self.share(world_size)
        sizes = [size] * (share // size) + [share % size] * (share % size > 0)
        return step_seconds(costs, device, sizes, world_size=world_size, gradient_bytes=self.gradient_bytes)


def fit_of(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, name: str = "", how: str = "") -> Fit:
    """Return the largest micro-batch that fits, and the split of a rank share; `envelopes` give memory at any size."""
    usable, share, expandable = target.budget.usable_bytes, target.share(spec.world_size), target.expandable_segments
    # A step with one micro-batch (`alone`) needs less memory, because no earlier micro-batch has left gradients.
    alone, requested, costs = envelopes.alone, target.micro_batch_size, envelopes.costs
    if alone is not None and (requested is None or requested >= share) and _largest(alone, target, share) == share:
        envelopes = alone
    largest = _largest(envelopes, target, share)
    # If nothing fits, plan one sample, to show how much memory is missing.
    size = even_size(share, max(1, largest)) if requested is None else min(requested, share)
    # The first step also allocates the optimizer's state, and may need more than all later ones.
    envelope = max((envelopes.steady, envelopes.first), key=lambda envelope: envelope.peak_bytes(size))
    reserved = freely = envelopes.reserved_bytes(size, expandable=expandable)
    if largest >= size:  # with a limit, the allocator frees cached segments instead of reserving more
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
        on_cpu=envelopes.profile == "cpu",
        limit=envelopes.binding(largest, usable, share),
        # The time to gather sharded weights is unknown.
        seconds=None if envelopes.sharded else target.seconds(costs, size, spec.world_size),
        reserved_bytes_without_limit=freely,
        requested_size=None if requested is None else size,
    )


def _largest(envelopes: Envelopes, target: PlanTarget, share: int) -> int:
    """Return the largest micro-batch size that fits, at most a rank's share; 0 if none does."""
    found = envelopes.largest_allocated(target.budget.usable_bytes, expandable=target.expandable_segments)
    return share if found is None else min(share, found)


def envelopes_of(spec: StepSpec, target: PlanTarget) -> Envelopes:
    """Return the memory of a step, and of a step with one micro-batch if all samples of a rank may fit into one."""
    ready, _ = built(spec)
    usable, share = target.budget.usable_bytes, target.share(spec.world_size)
    # Sizes above the number of a rank's samples never run, so they are not traced.
    found = find_envelopes(ready, usable, max_samples=share)
    is_split = target.micro_batch_size is not None and target.micro_batch_size < share
    return found if is_split else with_alone(found, ready, usable, share)


def propose(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan each possible change; skip changes that cannot be planned."""
    found = []
    by_category, usable = envelopes.steady.at_peak(1).by_category, target.budget.usable_bytes
    state = sum(by_category[name] for name in ("weights", "gradients", "optimizer"))
    for change in single_changes(spec, target.autocast) if fits or state < usable else []:
        try:
            after = reshaped(envelopes, change) if change.reshape else envelopes_of(changed(spec, [change]), target)
        except UserError:
            continue
        found.append(fit_of(spec, after, target, name=change.name, how=change.code))
    return [*found, *_sharded(spec, envelopes, target, fits=fits)]


def reshaped(envelopes: Envelopes, change: Change) -> Envelopes:
    """Return the memory of a step with a change that can be derived from the traces without it."""
    assert change.reshape is not None, "other changes are traced"
    return dataclasses.replace(
        envelopes,
        steady=change.reshape(envelopes.steady),
        first=change.reshape(envelopes.first),
        costs=envelopes.costs if change.change_costs is None else change.change_costs(envelopes.costs),
        alone=None if envelopes.alone is None else reshaped(envelopes.alone, change),
    )


def _sharded(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan sharding of weights, gradients or the optimizer's state over ranks."""
    found = []
    try:
        if spec.world_size > 1 and not envelopes.sharded:
            found += [_plan_with_strategy(spec, "zero1", target, "ZeRO-1"), _fsdp(spec, target)]
        # Propose more devices only if nothing fits on the planned number.
        if not fits and not any(fit.fits for fit in found):
            found += _smallest_world(spec, target)
    except UserError:  # the model, loss or optimizer cannot be sharded
        pass
    return found


def _smallest_world(spec: StepSpec, target: PlanTarget) -> list[Fit]:
    """Plan FSDP, with checkpointing if possible, over the smallest sufficient number of devices."""
    checkpointed = all_changes(spec).get("checkpointing")
    spec, _ = built(changed(spec, [] if checkpointed is None else [checkpointed]))
    sharded = dataclasses.replace(spec, strategy=fsdp_strategy(spec.trained))
    smallest = smallest_world(sharded, target.budget.usable_bytes)
    if smallest is None:
        return []
    fit = _fsdp(dataclasses.replace(spec, world_size=smallest), target)
    if checkpointed is None:
        return [fit]
    how = f"{checkpointed.code}\n{fit.how}"
    return [dataclasses.replace(fit, name=f"{fit.name}, checkpointing", how=how)]


def smallest_world(spec: StepSpec, budget_bytes: int, *, max_ranks: int = 1024) -> int | None:
    """Return the fewest ranks, a power of two, on which FSDP2 fits micro-batches of one sample; None if there is none.

    Numbers of ranks that are too small for the weights alone are skipped.
    """
    ready, _ = built(dataclasses.replace(spec, world_size=2))  # once for all traces
    weights = sum(weight.numel() * weight.element_size() for weight in as_module(ready.trained.model).parameters())
    size = 2
    while size <= max_ranks:
        if weights <= size * budget_bytes:
            trace = trace_step(dataclasses.replace(ready, world_size=size), 1).steady
            sizes = [allocation.num_bytes for allocation in trace.allocations]
            if replay(trace.events, sizes, limit_bytes=budget_bytes, pools=trace.pools).fits:
                return size
        size *= 2
    return None


def _plan_with_strategy(spec: StepSpec, strategy: str | Callable[[], Strategy], target: PlanTarget, name: str) -> Fit:
    """Plan the step under another strategy."""
    spec = dataclasses.replace(spec, strategy=strategy)
    before, argument = strategy_lines(strategy)
    how = "\n".join((*before, engine_line(argument)))
    return fit_of(spec, envelopes_of(spec, target), target, name=f"{name} over {spec.world_size} ranks", how=how)


def _fsdp(spec: StepSpec, target: PlanTarget) -> Fit:
    spec, _ = built(spec)
    return _plan_with_strategy(spec, fsdp_strategy(spec.trained), target, "FSDP")


def best_first(fits: Iterable[Fit]) -> list[Fit]:
    """Sort plans: fitting plans first, then by predicted time, number of micro-batches, and descending `largest`."""

    def sort_key(fit: Fit) -> tuple[bool, float, int, int, int]:
        seconds = float("inf") if fit.seconds is None else fit.seconds.total
        return not fit.fits, seconds, fit.accumulation_steps, -fit.largest, fit.reserved_bytes

    return sorted(fits, key=sort_key)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """A combination of changes, and the memory of the step with them."""

    changes: tuple[Change, ...]  # the changes in order; empty for the requested step
    strategy: str  # the strategy chosen by `--fit`; empty for the requested strategy
    spec: StepSpec  # the step with the changes, except for a chunked loss
    fit: Fit | None  # the largest micro-batch that fits; None if it was not planned
    why: str = ""  # the reason why it was not chosen; empty for the answer
    seconds: float | None = None  # time used for ranking; None if it does not fit

    @property
    def name(self) -> str:
        """The names of the changes and of the strategy."""
        names = [change.name for change in self.changes] + [self.strategy] * bool(self.strategy)
        return " + ".join(names) or "no change"

    @property
    def fits(self) -> bool:
        """Whether the requested micro-batch size fits; without a request, whether one sample fits."""
        return self.fit is not None and self.fit.fits

    @property
    def same_step(self) -> bool:
        """Whether gradient and update are those of the requested step, up to rounding."""
        return all(change.same_step for change in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The fastest fitting combination, of the first level that has one."""

    best: Combination | None  # the answer; None if nothing fits
    tried: tuple[Combination, ...]  # all planned combinations, in order, including the answer


def find_combination(spec: StepSpec, target: PlanTarget, *, may_change_precision: bool) -> Answer:
    """Return the fastest combination that fits, at the level closest to the requested step."""
    known, tried = all_changes(spec), list[Combination]()
    autocast = _named(known, f"{target.autocast} autocast") if may_change_precision else ()
    for level in _levels(spec, known, autocast):
        for name, strategy in _strategies(spec, level):
            found = _combinations(dataclasses.replace(spec, strategy=strategy), target, level, name)
            tried += found
            if fitting := [combination for combination in found if combination.fits]:
                best = simplest_of_the_fastest(fitting)
                return Answer(best=best, tried=tuple(_explained(combination, best) for combination in tried))
    return Answer(best=None, tried=tuple(tried))


def _levels(spec: StepSpec, known: Mapping[str, Change], autocast: tuple[Change, ...]) -> Iterator[tuple[Change, ...]]:
    """Yield the changes of each level, the smallest change of the requested step first."""
    yield ()
    if autocast:
        yield autocast
    bf16 = _named(known, "bf16 autocast") if autocast else ()
    in_bf16 = autocast == bf16 if autocast else built(spec)[0].trained.precision == "bf16"
    split, stochastic, eight_bit = "bf16 weights, split", "bf16 weights, rounded stochastically", "8-bit AdamW"
    for names in ((split,), (eight_bit,), (stochastic,), (stochastic, eight_bit)):
        if all(name in known and (in_bf16 or name == eight_bit) for name in names):
            yield (*autocast, *_named(known, *names))
    for name in known:
        if name.startswith("LoRA"):  # its base is in bf16 on every device
            yield (*bf16, known[name])


def _named(known: Mapping[str, Change], *names: str) -> tuple[Change, ...]:
    """Return the known changes with these names."""
    return tuple(known[name] for name in names if name in known)


def simplest_of_the_fastest(fitting: Sequence[Combination]) -> Combination:
    """Of all combinations within 3% of the fastest, return the one with the fewest changes, and then the fewest lines.

    Predicted times are not accurate enough to distinguish such combinations.
    """
    limit = NEAR_BEST * min(combination.seconds or 0.0 for combination in fitting)
    near = [combination for combination in fitting if (combination.seconds or 0.0) <= limit]

    def effort(choice: Combination) -> tuple[int, int, float]:
        return len(choice.changes), sum(change.code.count("\n") for change in choice.changes), choice.seconds or 0.0

    return min(near, key=effort)


def _explained(choice: Combination, best: Combination) -> Combination:
    """Return a combination with the reason why it was not chosen."""
    if choice is best or not choice.fits:
        return choice
    is_slower = (choice.seconds or 0.0) > (best.seconds or 0.0)
    return dataclasses.replace(
        choice, why="slower" if is_slower else f"not faster by more than {NEAR_BEST - 1:.0%}, and needs more changes"
    )


def _combinations(spec: StepSpec, target: PlanTarget, level: tuple[Change, ...], strategy: str) -> list[Combination]:
    """Plan a level under a strategy: with a fused update, and with checkpointing if that may help."""
    start, usable = changed(spec, level), target.budget.usable_bytes
    least = _min_bytes(start)
    if strategy in {"", "all_reduce"} and spec.strategy in {"auto", "single", "all_reduce"} and least > usable:
        why = f"weights, gradients and optimizer state take {in_bytes(least)} of {in_bytes(max(0, usable))}"
        return [Combination(changes=level, strategy=strategy, spec=start, fit=None, why=why)]
    possible = {change.name: change for change in single_changes(start)}
    base = (*level, *_named(possible, "fused optimizer"))
    chunks = [change for change in possible.values() if change.reshape is not None]
    plain = _planned(spec, target, base, strategy, chunks)
    fit = plain[0].fit
    if fit is None or "checkpointing" not in possible:
        return plain
    state = sum(fit.peak.by_category[name] for name in ("weights", "buffers", "gradients", "optimizer"))
    # Fewer activations do not help if all samples of a rank fit, or if the state alone does not.
    if fit.largest >= target.share(spec.world_size) or state >= usable:
        return plain
    return [*plain, *_planned(spec, target, (*base, possible["checkpointing"]), strategy, chunks)]


def _planned(
    spec: StepSpec, target: PlanTarget, changes: tuple[Change, ...], strategy: str, chunks: Sequence[Change]
) -> list[Combination]:
    """Plan a combination without and with a chunked loss."""
    step, usable = changed(spec, changes), target.budget.usable_bytes
    combination = partial(Combination, strategy=strategy, spec=step)
    try:
        envelopes = envelopes_of(step, target)
    except UserError as error:
        return [combination(changes=changes, fit=None, why=str(error))]
    # For ranking, use the device with the nearest memory if only the memory is known.
    nearest = min(DEVICES, key=lambda device: abs(device.memory_bytes - target.budget.total_bytes))
    budget = dataclasses.replace(target.budget, device=target.budget.device or nearest)
    ranked, found = dataclasses.replace(target, budget=budget), []
    for chunk in (None, *chunks):
        memory = envelopes if chunk is None else reshaped(envelopes, chunk)
        fit, every = fit_of(step, memory, target), changes if chunk is None else (*changes, chunk)
        if not fit.fits:
            samples = f"{fit.requested_size} samples take" if fit.requested_size else "one sample takes"
            why = f"{samples} {in_bytes(fit.reserved_bytes)} of {in_bytes(max(0, usable))}"
            found.append(combination(changes=every, fit=fit, why=why))
            continue
        seconds = ranked.seconds(memory.costs, fit.micro_batch_size, step.world_size)
        assert seconds is not None, "the device used for ranking has a known speed"
        gathering = _gathering_seconds(step, fit, seconds, target) if memory.sharded else 0.0
        found.append(combination(changes=every, fit=fit, seconds=seconds.total + gathering))
    return found


def _gathering_seconds(step: StepSpec, fit: Fit, computing: StepSeconds, target: PlanTarget) -> float:
    """Return a lower bound on the communication time of FSDP that does not overlap with computation.

    Each micro-batch gathers the weights twice and reduces float32 gradients once; each rank receives all but its own
    part. Latency and buckets are unknown, so the bound is used for ranking, but not printed.
    """
    device = target.budget.device
    if device is None:
        return 0.0
    bf16 = built(step)[0].trained.precision == "bf16"
    num_bytes = (2 if bf16 else 3) * target.gradient_bytes * (step.world_size - 1) / step.world_size
    each = computing.micro_batches / fit.accumulation_steps
    return fit.accumulation_steps * max(0.0, num_bytes / device.link_bytes_per_second - each)


def _min_bytes(spec: StepSpec) -> int:
    """Return the bytes of a replica's persistent state, computed without a trace."""
    train = built(spec)[0].trained
    needed = replica_bytes(train.optimizer, modules_of(train), train.bf16_weights, limit=0)
    return needed.replicated_bytes + needed.update.state


def _strategies(spec: StepSpec, level: tuple[Change, ...]) -> list[tuple[str, str | Callable[[], Strategy]]]:
    """Return the strategies for several ranks by increasing traffic, or only the requested one."""
    if spec.world_size == 1 or spec.strategy != "auto":
        return [("", spec.strategy)]
    ready, _ = built(changed(spec, level))
    return [("all_reduce", "all_reduce"), ("ZeRO-1", "zero1"), ("FSDP", fsdp_strategy(ready.trained))]
