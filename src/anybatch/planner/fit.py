"""Find the largest micro-batch that fits, for a step, for each change of it, and for combinations (`--fit`).

`--fit` tries levels in increasing distance from the requested step: products in bf16; weights in bf16; optimizer state
in 8 bits; other trained parameters. Each level is combined with changes that keep the gradient (fused update,
checkpointing, chunked loss), and the fastest combination that fits is chosen. A level is tried only if no combination
of the previous one fits.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    modules_of,
    possible_changes,
    shards,
    strategy_lines,
)
from anybatch.planner.devices import DEVICES, Autocast
from anybatch.planner.envelopes import Binding, Envelopes, find_envelopes, with_alone
from anybatch.planner.step_time import CostLine, Rates, Reduction, StepSeconds, rates_of, step_seconds
from anybatch.planner.trace.step_spec import StepSpec, as_module, built
from anybatch.planner.trace.step_trace import trace_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The largest micro-batch that fits, with or without a change of the step."""

    name: str  # the change; empty for none
    how: str  # the code to write for it
    world_size: int
    largest: int  # the largest micro-batch size that keeps the headroom; 0 if not even one sample fits
    micro_batch_size: int  # the proposed size: the share in even parts of at most `largest`; 1 if nothing fits
    accumulation_steps: int  # micro-batches per rank and step
    peak: Peak  # the moment of peak memory, at that size
    reserved_bytes: int  # memory that the allocator reserves at that size under the budget
    envelope: MemoryEnvelope  # memory at any size, of the step (first or later) with the higher peak
    on_cpu: bool  # whether the memory belongs to a CPU, which has no caching allocator
    binds: Binding | None = None  # the limit that a larger size would exceed; None if unknown
    seconds: StepSeconds | None = None  # time of a step; None where it cannot be predicted
    freely_reserved_bytes: int | None = None  # memory that the allocator reserves at that size without a limit
    asked: int | None = None  # the requested micro-batch size; None for the largest that fits

    @property
    def fits(self) -> bool:
        """Return whether the requested number of samples fits; at least one, if none was requested."""
        return self.largest >= (self.asked or 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTarget:
    """The hardware and batch size that a step is planned for."""

    budget: Budget  # the device's memory
    effective_batch_size: int  # samples of one step, over all ranks
    rates: Rates | None = None  # rates of the device; None if unknown
    gradient_bytes: int = 0  # payload of the gradient all-reduce
    micro_batch_size: int | None = None  # the requested micro-batch size; None for the largest that fits
    expandable_segments: bool = False  # whether `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` is set

    @property
    def autocast(self) -> Autocast:
        """The proposed 16-bit format: the device's, or bf16 for an unknown device."""
        return "bf16" if self.budget.device is None else self.budget.device.autocast

    def share(self, world_size: int) -> int:
        """Return the samples of the largest rank share."""
        return ceil_div(self.effective_batch_size, world_size)

    def seconds(self, costs: CostLine, size: int, world_size: int) -> StepSeconds | None:
        """Return the time of a step on `world_size` ranks in micro-batches of at most `size`."""
        if self.rates is None:
            return None
        share, reduction, device = self.share(world_size), None, self.budget.device
        sizes = [size] * (share // size) + [share % size] * (share % size > 0)
        if world_size > 1 and device is not None:
            link = device.link_bytes_per_second
            reduction = Reduction(num_bytes=self.gradient_bytes, world_size=world_size, link_bytes_per_second=link)
        return step_seconds(costs, self.rates, sizes, reduction=reduction)


def fit_of(
    spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, name: str = "", how: str = "", timed: bool = True
) -> Fit:
    """Return the largest micro-batch that fits, and the resulting cut of a rank share."""
    usable, share, expandable = target.budget.usable_bytes, target.share(spec.world_size), target.expandable_segments
    # A share that is one micro-batch needs no accumulated gradients, and may fit only for that reason.
    alone, asked, costs = envelopes.alone, target.micro_batch_size, envelopes.costs
    if alone is not None and (asked is None or asked >= share) and _largest(alone, target, share) == share:
        envelopes = alone
    largest = _largest(envelopes, target, share)
    # If nothing fits, plan one sample, to show how much memory is missing.
    size = even_size(share, max(1, largest)) if asked is None else min(asked, share)
    # The first step also allocates the optimizer's state, and may need more than all later ones.
    envelope = max((envelopes.steady, envelopes.first), key=lambda one: one.peak_bytes(size))
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
        binds=envelopes.binding(largest, usable, share),
        # The time to gather sharded weights is unknown.
        seconds=target.seconds(costs, size, spec.world_size) if timed and not envelopes.sharded else None,
        freely_reserved_bytes=freely,
        asked=None if asked is None else size,
    )


def _largest(envelopes: Envelopes, target: PlanTarget, share: int) -> int:
    """Return the largest micro-batch size that fits, at most a rank's share; 0 if none does."""
    usable = target.budget.usable_bytes
    # Overheads may exceed the memory of a small device, so the budget can be negative.
    found = envelopes.largest_allocated(usable, expandable=target.expandable_segments) if usable > 0 else 0
    return share if found is None else min(share, found)


def envelopes_of(spec: StepSpec, target: PlanTarget) -> Envelopes:
    """Return the memory of a step, and of a step with a single micro-batch if a rank share may fit into one."""
    ready, _ = built(spec)
    usable, share = target.budget.usable_bytes, target.share(spec.world_size)
    # Sizes beyond a rank share never run, so do not trace them.
    found = find_envelopes(ready, usable, most_samples=share)
    several = target.micro_batch_size is not None and target.micro_batch_size < share
    return found if several else with_alone(found, ready, usable, share)


def propose(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan each possible change; skip changes that cannot be planned."""
    found = []
    by_category, usable = envelopes.steady.at_peak(1).by_category, target.budget.usable_bytes
    stays = sum(by_category[name] for name in ("weights", "gradients", "optimizer"))
    for change in possible_changes(spec, target.autocast) if fits or stays < usable else []:
        try:
            after = reshaped(envelopes, change) if change.reshape else envelopes_of(changed(spec, [change]), target)
        except UserError:
            continue
        found.append(fit_of(spec, after, target, name=change.name, how=change.code))
    return [*found, *_dealt(spec, envelopes, target, fits=fits)]


def reshaped(envelopes: Envelopes, change: Change) -> Envelopes:
    """Return the memory of a step with a change that is derived from its traces."""
    assert change.reshape is not None, "other changes are traced"
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
            found += [_under(spec, "zero1", target, "ZeRO-1"), _fsdp(spec, target)]
        # Propose more devices only if nothing fits on the planned number.
        if not fits and not any(one.fits for one in found):
            found += _smallest_world(spec, target)
    except UserError:  # the model, loss or optimizer cannot be sharded
        pass
    return found


def _smallest_world(spec: StepSpec, target: PlanTarget) -> list[Fit]:
    """Plan FSDP, with checkpointing if possible, over the smallest sufficient number of devices."""
    checkpointed = next((one for one in possible_changes(spec) if one.name == "checkpointing"), None)
    spec, _ = built(changed(spec, [] if checkpointed is None else [checkpointed]))
    # The budget may be negative; one byte has the same result, as nothing fits into it either.
    usable = max(1, target.budget.usable_bytes)
    smallest = smallest_world(dataclasses.replace(spec, strategy=shards(spec.trained)), usable)
    if smallest is None:
        return []
    fit = _fsdp(dataclasses.replace(spec, world_size=smallest), target)
    if checkpointed is None:
        return [fit]
    how = f"{checkpointed.code}\n{fit.how}"
    return [dataclasses.replace(fit, name=f"{fit.name}, checkpointing", how=how)]


def smallest_world(spec: StepSpec, budget_bytes: int, *, max_ranks: int = 1024) -> int | None:
    """Return the fewest ranks on which FSDP2 fits micro-batches of one sample; None if `max_ranks` are too few.

    Candidates are 2, 4 and multiples of 8. The search starts where weights, gradients and Adam's state fit.
    """
    candidates = [size for size in (2, 4, *range(8, max_ranks + 1, 8)) if size <= max_ranks]
    ready, _ = built(dataclasses.replace(spec, world_size=2))  # once for all traces
    weights = sum(one.numel() * one.element_size() for one in as_module(ready.trained.model).parameters())

    def fits(world_size: int) -> bool:
        trace = trace_step(dataclasses.replace(ready, world_size=world_size), 1).steady
        sizes = [one.num_bytes for one in trace.allocations]
        return replay(trace.events, sizes, limit_bytes=budget_bytes, pools=trace.pools).fits

    low, high, step = (*(bisect_left(candidates, times * weights / budget_bytes) for times in (1, 4)), 1)
    high = min(high, len(candidates) - 1)
    while high < len(candidates) and not fits(candidates[high]):
        low, high, step = high + 1, high + step, 2 * step
    at = bisect_left(candidates, True, low, min(high, len(candidates)), key=fits)  # noqa: FBT003 (the searched value)
    return candidates[at] if at < len(candidates) else None


def _under(spec: StepSpec, strategy: str | Callable[[], Strategy], target: PlanTarget, name: str) -> Fit:
    """Plan the step under another strategy."""
    spec = dataclasses.replace(spec, strategy=strategy)
    before, argument = strategy_lines(strategy)
    how = "\n".join((*before, engine_line(argument)))
    return fit_of(spec, envelopes_of(spec, target), target, name=f"{name} over {spec.world_size} ranks", how=how)


def _fsdp(spec: StepSpec, target: PlanTarget) -> Fit:
    spec, _ = built(spec)
    return _under(spec, shards(spec.trained), target, "FSDP")


def best_first(fits: Iterable[Fit]) -> list[Fit]:
    """Return the fits by predicted time; without times, by fewer and larger micro-batches."""

    def place(one: Fit) -> tuple[bool, float, int, int, int]:
        seconds = float("inf") if one.seconds is None else one.seconds.total
        return not one.fits, seconds, one.accumulation_steps, -one.largest, one.reserved_bytes

    return sorted(fits, key=place)


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
        names = [one.name for one in self.changes] + [self.strategy] * bool(self.strategy)
        return " + ".join(names) or "as it is"

    @property
    def fits(self) -> bool:
        """Whether the requested number of samples fits; at least one, if none was requested."""
        return self.fit is not None and self.fit.fits

    @property
    def same_step(self) -> bool:
        """Whether gradient and update equal the requested step's, up to rounding."""
        return all(one.same_step for one in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The fastest fitting combination, of the first level that has one."""

    best: Combination | None  # the answer; None if nothing fits
    tried: tuple[Combination, ...]  # all planned combinations, in order, including the answer


def find_combination(spec: StepSpec, target: PlanTarget, *, precision_is_open: bool) -> Answer:
    """Return the fastest combination that fits, at the level closest to the requested step."""
    search, best, known = _Search(target), None, all_changes(spec)
    rounded = _named(known, f"{target.autocast} autocast") if precision_is_open else ()
    for level in _levels(spec, known, rounded):
        best = search.level(spec, level)
        if best is not None:
            if not level and rounded:  # show 16-bit products too, the most common next step
                search.level(spec, rounded)
            break
    return Answer(best=best, tried=tuple(_explained(one, best) for one in search.tried))


def _levels(spec: StepSpec, known: Mapping[str, Change], rounded: tuple[Change, ...]) -> Iterator[tuple[Change, ...]]:
    """Yield the changes of each level, in increasing distance from the requested step."""
    yield ()
    if rounded:
        yield rounded
    bf16 = _named(known, "bf16 autocast") if rounded else ()
    in_bf16 = rounded == bf16 if rounded else built(spec)[0].trained.precision == "bf16"
    split, stochastic, eight_bit = "bf16 weights, split", "bf16 weights, rounded stochastically", "8-bit AdamW"
    for names in ((split,), (eight_bit,), (stochastic,), (stochastic, eight_bit)):
        if all(name in known and (in_bf16 or name == eight_bit) for name in names):
            yield (*rounded, *_named(known, *names))
    for name in known:
        if name.startswith("LoRA"):  # its base is in bf16 on every device
            yield (*bf16, known[name])


def _named(known: Mapping[str, Change], *names: str) -> tuple[Change, ...]:
    """Return the known changes with these names."""
    return tuple(known[name] for name in names if name in known)


def simplest_of_the_fastest(fitting: Sequence[Combination]) -> Combination:
    """Of all combinations within 3% of the fastest, return one with the fewest changes, and then the fewest lines.

    Predicted times are not accurate enough to distinguish these.
    """
    limit = NEAR_BEST * min(one.seconds or 0.0 for one in fitting)
    near = [one for one in fitting if (one.seconds or 0.0) <= limit]

    def effort(one: Combination) -> tuple[int, int, float]:
        return len(one.changes), sum(change.code.count("\n") for change in one.changes), one.seconds or 0.0

    return min(near, key=effort)


def _explained(one: Combination, best: Combination | None) -> Combination:
    """Return a combination with the reason why it was not chosen."""
    if one is best or not one.fits or best is None:
        return one
    seconds, fastest = one.seconds or 0.0, best.seconds or 0.0
    if best.same_step and not one.same_step:
        why = "not needed: it computes another step" + (", faster" if seconds < 0.97 * fastest else "")
    elif seconds <= fastest:
        why = f"within {NEAR_BEST - 1:.0%}, and more to change"
    else:  # under FSDP no time is printed, since the time of its gathers is unknown
        gathers = best.strategy and best.fit is not None and best.fit.seconds is None
        why = f"slower{' in computing and gathering' if gathers else ''}"
    return dataclasses.replace(one, why=why)


class _Search:
    """Plans combinations and stores them in `tried`."""

    def __init__(self, target: PlanTarget) -> None:
        self._target = target
        # For ranking, use the rates of a similar device if the device's are unknown.
        nearest = min(DEVICES, key=lambda one: abs(one.memory_bytes - target.budget.total_bytes))
        self._ranked = dataclasses.replace(target, rates=target.rates or rates_of(nearest))
        self.tried: list[Combination] = []

    def level(self, spec: StepSpec, level: tuple[Change, ...]) -> Combination | None:
        """Return the fastest fitting combination of a level, under the first strategy that has one, or None."""
        first = len(self.tried)
        for name, strategy in _strategies(spec, level):
            self._of_strategy(dataclasses.replace(spec, strategy=strategy), level, name)
            if fitting := [one for one in self.tried[first:] if one.fits]:
                return simplest_of_the_fastest(fitting)
        return None

    def _of_strategy(self, spec: StepSpec, level: tuple[Change, ...], strategy: str) -> None:
        """Plan a level under a strategy: without recomputation, then with full and less recomputation or offloading."""
        start, usable = changed(spec, level), self._target.budget.usable_bytes
        least = _min_bytes(start)
        if strategy in {"", "all_reduce"} and spec.strategy in {"auto", "single", "all_reduce"} and least > usable:
            why = f"weights, gradients and optimizer state take {in_bytes(least)} of {in_bytes(max(0, usable))}"
            self.tried.append(Combination(changes=level, strategy=strategy, spec=start, fit=None, why=why))
            return
        possible = possible_changes(start)
        base = (*level, *(one for one in possible if one.name == "fused optimizer"))
        chunks = [one for one in possible if one.reshape is not None]
        ways = [one for one in possible if one.name.startswith("checkpointing")]
        plain = self._plan(spec, base, strategy, chunks)
        if not plain or not ways or not _recomputing_helps(plain[0], self._target):
            return
        if not any(one.fits for one in self._plan(spec, (*base, ways[0]), strategy, chunks)):
            for moved in _named(all_changes(spec), "offloading"):
                self._plan(spec, (*base, moved), strategy, chunks)
            return
        for way in ways[1:]:
            self._plan(spec, (*base, way), strategy, chunks)

    def _plan(
        self, spec: StepSpec, changes: tuple[Change, ...], strategy: str, chunks: Sequence[Change]
    ) -> list[Combination]:
        """Plan a combination without and with a chunked loss; return the ones that could be planned."""
        step, target, found = changed(spec, changes), self._target, list[Combination]()
        try:
            envelopes = envelopes_of(step, target)
        except UserError as error:
            self.tried.append(Combination(changes=changes, strategy=strategy, spec=step, fit=None, why=str(error)))
            return []
        for chunk in (None, *chunks):
            every = changes if chunk is None else (*changes, chunk)
            memory = envelopes if chunk is None else reshaped(envelopes, chunk)
            fit = fit_of(step, memory, target, timed=all(one.timed for one in every))
            steady = self._ranked.seconds(memory.costs, fit.micro_batch_size, step.world_size)
            seconds, why = 0.0 if steady is None else steady.total, ""
            if envelopes.sharded and steady is not None:
                seconds += _gathering_seconds(step, fit, steady, target)
            if not fit.fits:
                samples = f"{fit.asked} samples take" if fit.asked else "one sample takes"
                why = f"{samples} {in_bytes(fit.reserved_bytes)} of {in_bytes(max(0, target.budget.usable_bytes))}"
            by = seconds if fit.fits else None
            found.append(Combination(changes=every, strategy=strategy, spec=step, fit=fit, why=why, seconds=by))
        self.tried += found
        return found


def _recomputing_helps(plain: Combination, target: PlanTarget) -> bool:
    """Whether saving activations may help: the whole rank share does not fit, but the state alone does."""
    assert plain.fit is not None, "it is planned"
    held = plain.fit.peak.by_category
    state = sum(held[name] for name in ("weights", "buffers", "gradients", "optimizer"))
    return plain.fit.largest < target.share(plain.spec.world_size) and state < target.budget.usable_bytes


def _gathering_seconds(step: StepSpec, fit: Fit, computing: StepSeconds, target: PlanTarget) -> float:
    """Return a lower bound of FSDP's communication time that computation does not hide.

    Each micro-batch gathers the weights twice and reduces float32 gradients once, and each rank receives all but its
    share. Latency and buckets are unknown, so this is used for ranking but not printed.
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
    needed = replica_bytes(train.optimizer, modules_of(train), train.bf16_weights, most=0)
    return needed.least + needed.update.state


def _strategies(spec: StepSpec, level: tuple[Change, ...]) -> list[tuple[str, str | Callable[[], Strategy]]]:
    """Return the strategies for several ranks by increasing traffic, or only the requested one."""
    if spec.world_size == 1 or spec.strategy != "auto":
        return [("", spec.strategy)]
    ready, _ = built(changed(spec, level))
    return [("all_reduce", "all_reduce"), ("ZeRO-1", "zero1"), ("FSDP", shards(ready.trained))]
