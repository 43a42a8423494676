"""Find the largest micro-batch that fits, for a step, for each change of it, and for combinations (`--fit`).

`--fit` changes the requested step in levels, the smallest first: products in TF32 or 16 bits if no precision was given;
bf16 weights; smaller optimizer state; fewer trained parameters. Each is combined with a fused update, checkpointing and
a chunked loss. The answer is the fastest of the first level that fits; next to adapters, one that trains everything.
"""

import contextlib
import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anybatch.core.geometry import NEAR_BEST, ceil_div, even_size
from anybatch.core.units import in_bytes
from anybatch.engine.strategy_choice import replica_bytes
from anybatch.errors import UserError
from anybatch.memory.trace import MemoryEnvelope, Peak
from anybatch.planner.budget import Budget
from anybatch.planner.caching_allocator import replay
from anybatch.planner.changes import (
    Change,
    all_changes,
    changed,
    code_of,
    modules_of,
    sharded_in_bfloat16,
    single_changes,
    strategy_change,
    update_changes,
)
from anybatch.planner.devices import DEVICES, Device
from anybatch.planner.envelopes import Binding, Envelopes, find_envelopes, with_alone
from anybatch.planner.step_spec import StepSpec, built
from anybatch.planner.step_time import CostLine, StepSeconds, step_seconds
from anybatch.planner.step_trace import trace_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The largest micro-batch that fits, with or without a change of the step."""

    change: Change  # the change; its name is empty for none
    world_size: int
    largest: int  # the largest micro-batch size that keeps the headroom; 0 if not even one sample fits
    micro_batch_size: int  # the proposed size: a rank's samples in even parts of at most `largest`; 1 if nothing fits
    accumulation_steps: int  # micro-batches per rank and step
    peak: Peak  # the moment of peak memory, at that size
    tensor_bytes: int  # the part of the peak that is tensors, without measured workspaces
    reserved_bytes: int  # memory that the allocator reserves at that size on the device
    envelope: MemoryEnvelope  # memory at any size, of the step (first or later) with the higher peak
    on_cpu: bool  # whether the memory belongs to a CPU, which has no caching allocator
    limit: Binding  # the limit that a larger size would exceed
    seconds: StepSeconds | None  # time of a step; None where it cannot be predicted
    reserved_bytes_without_limit: int  # memory that the allocator reserves at that size without a limit
    requested_size: int | None  # the requested micro-batch size; None for the largest that fits

    @property
    def name(self) -> str:
        """The name of the change."""
        return self.change.name

    @property
    def how(self) -> str:
        """The code that makes the change."""
        return code_of([self.change])

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


def fit_of(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, change: Change | None = None) -> Fit:
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
    if largest >= size:  # at the end of the device, not of the headroom, the allocator frees cached segments
        limit = target.budget.total_bytes - target.budget.overhead_bytes
        reserved = max(envelopes.peak_bytes(size), min(freely, limit))
    peak = envelope.at_peak(size)
    return Fit(
        change=change or Change(name=""),
        world_size=spec.world_size,
        largest=largest,
        micro_batch_size=size,
        accumulation_steps=ceil_div(share, size),
        peak=peak,
        tensor_bytes=peak.num_bytes - (0 if envelopes.workspaces is None else envelope.sizes(size)[-1]),
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
    found = find_envelopes(ready, usable, max_samples=share, max_size=target.micro_batch_size)
    is_split = target.micro_batch_size is not None and target.micro_batch_size < share
    return found if is_split else with_alone(found, ready, usable, share)


def propose(spec: StepSpec, envelopes: Envelopes, target: PlanTarget, *, fits: bool) -> list[Fit]:
    """Plan each possible change; skip changes that cannot be planned."""
    found = []
    by_category, usable = envelopes.steady.at_peak(1).by_category, target.budget.usable_bytes
    state = sum(by_category[name] for name in ("weights", "gradients", "optimizer"))
    single = single_changes(spec)
    sharding = strategies(spec)[1:] if spec.world_size > 1 and not envelopes.sharded else []
    for change in (*(single if fits or state < usable else ()), *sharding):
        is_traced = change.apply is not None or change.strategy is not None
        with contextlib.suppress(UserError):
            after = envelopes_of(changed(spec, [change]), target) if is_traced else envelopes
            found.append(fit_of(spec, reshaped(after, [change]), target, change))
    # Propose more devices only if nothing fits on the planned number.
    if not fits and not any(fit.fits for fit in found):
        with contextlib.suppress(UserError):  # the model, loss or optimizer cannot be sharded
            found += _smallest_world(spec, target, [one for one in single if one.name == "checkpointing"])
    return found


def reshaped(envelopes: Envelopes, changes: Iterable[Change]) -> Envelopes:
    """Return the memory and costs of a step with the parts of the changes that are derived from a trace."""
    for change in changes:
        if change.reshape is not None:
            steady, first = change.reshape(envelopes.steady), change.reshape(envelopes.first)
            envelopes = dataclasses.replace(envelopes, steady=steady, first=first)
        if change.change_costs is not None:
            envelopes = dataclasses.replace(envelopes, costs=change.change_costs(envelopes.costs))
        if envelopes.alone is not None:
            envelopes = dataclasses.replace(envelopes, alone=reshaped(envelopes.alone, [change]))
    return envelopes


def _smallest_world(spec: StepSpec, target: PlanTarget, checkpointed: Sequence[Change]) -> list[Fit]:
    """Plan FSDP, with checkpointing if possible, over the smallest sufficient number of devices."""
    sharding = strategies(spec)[-1]
    spec = changed(spec, [*checkpointed, sharding])
    smallest = smallest_world(spec, target.budget.usable_bytes)
    if smallest is None:
        return []
    name = ", ".join((f"FSDP over {smallest} ranks", *(change.name for change in checkpointed)))
    both = Change(name=name, how=code_of([*checkpointed, sharding]))
    spec = dataclasses.replace(spec, world_size=smallest)
    return [fit_of(spec, envelopes_of(spec, target), target, both)]


def smallest_world(spec: StepSpec, budget_bytes: int, *, max_ranks: int = 1024) -> int | None:
    """Return the fewest ranks, a power of two, on which FSDP2 fits micro-batches of one sample; None if none do."""
    ready, _ = built(dataclasses.replace(spec, world_size=2))  # once for all traces

    def fits(num_ranks: int) -> bool:
        trace = trace_step(dataclasses.replace(ready, world_size=num_ranks), 1).steady
        sizes = [allocation.num_bytes for allocation in trace.allocations]
        return replay(trace.events, sizes, limit_bytes=budget_bytes, pools=trace.pools).fits

    ranks = [2**power for power in range(1, max_ranks.bit_length())]
    return ranks[bisect_left(ranks[:-1], 1, key=fits)] if fits(ranks[-1]) else None


def gains(fit: Fit, baseline: Fit) -> bool:
    """Whether a change makes a step fit, or makes it faster by more than predicted times can distinguish."""
    if not baseline.fits or baseline.seconds is None:
        return fit.fits
    return fit.fits and fit.seconds is not None and fit.seconds.total * NEAR_BEST < baseline.seconds.total


def best_first(fits: Iterable[Fit], baseline: Fit) -> list[Fit]:
    """Sort plans: first those that gain, then by predicted time, number of micro-batches, and descending `largest`."""
    return sorted(
        fits,
        key=lambda fit: (
            *(not fit.fits, not gains(fit, baseline), float("inf") if fit.seconds is None else fit.seconds.total),
            *(fit.accumulation_steps, -fit.largest, fit.reserved_bytes),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """A combination of changes, and the memory of the step with them."""

    changes: tuple[Change, ...]  # the changes in order, and a strategy chosen by `--fit`; empty for the requested step
    fit: Fit | None  # the largest micro-batch that fits; None if it was not planned
    why: str = ""  # the reason why it was not chosen; empty for the answer
    seconds: float | None = None  # time used for ranking; None if it does not fit

    @property
    def name(self) -> str:
        """The names of the changes."""
        return " + ".join(change.name for change in self.changes) or "no change"

    @property
    def strategy(self) -> str:
        """The strategy chosen by `--fit`; empty for the requested strategy."""
        return "".join(change.name for change in self.changes if change.strategy is not None)

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
    alternative: Combination | None = None  # a combination that trains all parameters, if the answer does not


Changes = tuple[Change, ...]
Levels = Sequence[Changes]


def find_combination(spec: StepSpec, target: PlanTarget, *, may_change_precision: bool) -> Answer:
    """Return the fastest combination that fits, at the level closest to the requested step."""
    known = all_changes(spec)
    names = ("TF32 products", f"{spec.autocast} autocast") if may_change_precision else ()
    tf32, autocast = (tuple(known[name] for name in names[n : n + 1] if name in known) for n in (0, 1))
    search = _Search(target, known, tf32)
    best = next(filter(None, (search.fastest(spec, levels) for levels in _levels(spec, known, autocast))), None)
    other, alone = None, dataclasses.replace(spec, num_micro_batches=1)
    if best is None or any(change.name.startswith("LoRA") for change in best.changes):
        last = ([(change,)] for name, change in known.items() if name.endswith("in the backward"))
        other = next(filter(None, (search.fastest(alone, levels) for levels in last)), None)
    why = f"not faster by more than {NEAR_BEST - 1:.0%}"
    tried = (c if c in (best, other) or c.why else dataclasses.replace(c, why=why) for c in search.tried)
    return Answer(best=best, tried=tuple(tried), alternative=other)


def _levels(spec: StepSpec, known: Mapping[str, Change], autocast: tuple[Change, ...]) -> Iterator[Levels]:
    """Yield groups of levels, each a tuple of changes; the smallest change of the requested step first."""
    yield [(), autocast] if autocast else [()]
    in_bf16 = built(spec)[0].trained.precision == "bf16" or [change.name for change in autocast] == ["bf16 autocast"]
    split, stochastic, eight_bit = "bf16 weights, split", "bf16 weights, rounded stochastically", "8-bit AdamW"
    for names in ((split,), (eight_bit,), (stochastic,), (stochastic, eight_bit), (stochastic, "Adafactor")):
        if all(name in known and (in_bf16 or name == eight_bit) for name in names):
            yield [(*autocast, *(known[name] for name in names))]
    for name in known:
        if name.startswith("LoRA"):
            yield [(*autocast, known[name])]


def simplest_of_the_fastest(fitting: Sequence[Combination]) -> Combination:
    """Return the combination with the fewest changes, then lines, of those within 3% of the fastest (model error)."""
    limit = NEAR_BEST * min(combination.seconds or 0.0 for combination in fitting)
    return min(
        (choice for choice in fitting if (choice.seconds or 0.0) <= limit),
        key=lambda choice: (len(choice.changes), code_of(choice.changes).count("\n"), choice.seconds or 0.0),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """Plans combinations for a target, and keeps them."""

    target: PlanTarget
    known: Mapping[str, Change]
    formats: tuple[Change, ...]  # formats of products that need no trace, for steps without other changes
    tried: list[Combination] = field(default_factory=list)

    def fastest(self, spec: StepSpec, levels: Levels) -> Combination | None:
        """Plan some levels under each strategy, until one fits; return the fastest combination that fits."""
        chosen = spec.world_size > 1 and spec.strategy == "auto"
        rows = [strategies(changed(spec, level)) if chosen else [None] for level in levels]
        for row in zip(*rows, strict=True):
            found = [
                combination
                for level, strategy in zip(levels, row, strict=True)
                for combination in self._combinations(spec, level, () if strategy is None else (strategy,))
            ]
            self.tried.extend(found)
            if fitting := [combination for combination in found if combination.fits]:
                return simplest_of_the_fastest(fitting)
        return None

    def _combinations(self, spec: StepSpec, level: Changes, strategy: Changes) -> list[Combination]:
        """Plan a level under a strategy: with a fused update, and with checkpointing if that may help."""
        start, usable = changed(spec, (*level, *strategy)), self.target.budget.usable_bytes
        in_backward = any(change.reshape for change in level)
        least = 0 if in_backward else _min_bytes(start)
        if start.strategy in {"auto", "single", "all_reduce"} and least > usable:
            why = f"weights, gradients and optimizer state take {in_bytes(least)} of {in_bytes(max(0, usable))}"
            return [Combination(changes=(*level, *strategy), fit=None, why=why)]
        base = (*level, *([] if in_backward else update_changes(built(start)[0])))
        derived = [change for name, change in self.known.items() if name.startswith("loss in chunks")]
        derived += () if level else self.formats
        variants = [(), *((change,) for change in derived), *([tuple(derived)] if len(derived) > 1 else [])]
        plain = self._planned(spec, base, strategy, variants)
        fit = plain[0].fit
        if fit is None or "checkpointing" not in self.known:
            return plain
        state = sum(fit.peak.by_category[name] for name in ("weights", "buffers", "gradients", "optimizer"))
        # Fewer activations do not help if all samples of a rank fit, or if the state alone does not.
        if fit.largest >= self.target.share(spec.world_size) or state >= usable:
            return plain
        return [*plain, *self._planned(spec, (*base, self.known["checkpointing"]), strategy, variants)]

    def _planned(self, spec: StepSpec, changes: Changes, strategy: Changes, variants: Levels) -> list[Combination]:
        """Plan a combination, and its variants with changes that are derived from its trace."""
        target, step, usable = self.target, changed(spec, (*changes, *strategy)), self.target.budget.usable_bytes
        try:
            envelopes = reshaped(envelopes_of(step, target), changes)
        except UserError as error:
            return [Combination(changes=(*changes, *strategy), fit=None, why=str(error))]
        # For ranking, use the device with the nearest memory if only the memory is known.
        nearest = min(DEVICES, key=lambda device: abs(device.memory_bytes - target.budget.total_bytes))
        device = target.budget.device or nearest
        budget = dataclasses.replace(target.budget, device=device)
        ranked, found = dataclasses.replace(target, budget=budget), []
        for more in variants:
            memory, every = reshaped(envelopes, more), (*changes, *more, *strategy)
            fit = fit_of(step, memory, target)
            if not fit.fits:
                samples = f"{fit.requested_size} samples take" if fit.requested_size else "one sample takes"
                why = f"{samples} {in_bytes(fit.reserved_bytes)} of {in_bytes(max(0, usable))}"
                found.append(Combination(changes=every, fit=fit, why=why))
                continue
            seconds = ranked.seconds(memory.costs, fit.micro_batch_size, step.world_size)
            assert seconds is not None, "the device used for ranking has a known speed"
            gathering = _gathering_seconds(step, fit, seconds, target.gradient_bytes, device) if memory.sharded else 0.0
            found.append(Combination(changes=every, fit=fit, seconds=seconds.total + gathering))
        return found


def _gathering_seconds(step: StepSpec, fit: Fit, computing: StepSeconds, gradient_bytes: int, device: Device) -> float:
    """Return a lower bound on FSDP's exposed messages, for ranking: two gathers and a reduction per micro-batch."""
    num_bytes = (2 if built(step)[0].trained.precision == "bf16" else 3) * gradient_bytes
    received = num_bytes * (step.world_size - 1) / step.world_size / device.link_bytes_per_second
    return max(0.0, fit.accumulation_steps * received - computing.micro_batches)


def _min_bytes(spec: StepSpec) -> int:
    """Return the bytes of a replica's persistent state, computed without a trace."""
    train = built(spec)[0].trained
    needed = replica_bytes(train.optimizer, modules_of(train), train.bf16_weights, limit=0)
    return needed.replicated_bytes + needed.update.state


def strategies(spec: StepSpec) -> list[Change]:
    """Return the strategies for several ranks by increasing traffic."""
    fsdp = sharded_in_bfloat16 if built(spec)[0].trained.precision == "bf16" else "fsdp"
    return [strategy_change(*one) for one in (("all_reduce", "all_reduce"), ("ZeRO-1", "zero1"), ("FSDP", fsdp))]
