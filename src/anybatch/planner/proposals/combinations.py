"""Which changes together let a step fit, and run fastest: searched level by level, in the order of what they cost.

A level is how far the step may lead from the one that is asked for: not at all; rounded to bf16; with weights in bf16;
with another optimizer's state; with other parameters trained. Within a level all that keeps the gradient is combined,
and the fastest combination that fits is taken. Only where a level's leanest does not fit is the next one looked at.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from anybatch.core.size_choice import NEAR_BEST
from anybatch.core.units import in_bytes
from anybatch.engine.strategy_choice import replica_bytes
from anybatch.errors import UserError
from anybatch.parallel.strategy import Strategy
from anybatch.planner.cost.device import Autocast
from anybatch.planner.cost.device_table import DEVICES
from anybatch.planner.cost.step_time import Rates, StepSeconds, rates_of
from anybatch.planner.envelopes import Envelopes
from anybatch.planner.proposals.changes import (
    Change,
    changed,
    modules_of,
    of_weights,
    offloading,
    other_steps,
    possible_changes,
)
from anybatch.planner.proposals.ranking import Fit, PlanTarget, envelopes_of, fit_of, reshaped, sharded_in_bfloat16
from anybatch.planner.trace.step_spec import StepSpec, built

HOST_BYTES_PER_SECOND: Final = 25e9
"""What pinned memory is copied at over PCIe 4 with 16 lanes, in one direction: four fifths of 32 GB/s."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """Changes of a step together, and what they let fit.

    Attributes:
        changes: in the order in which they are made; empty for the step as it is asked for.
        strategy: how ranks share the step, where that was chosen here; empty for what was asked for.
        spec: the step with them; a loss in chunks is in the memory below alone.
        fit: the largest micro-batch that fits; None if it cannot be planned.
        envelopes: memory at any size; None if it cannot be planned.
        why: why it is not the answer; empty for the answer.
        seconds: by which it is ranked; None where it does not fit.
    """

    changes: tuple[Change, ...]
    strategy: str
    spec: StepSpec
    fit: Fit | None
    envelopes: Envelopes | None = None
    why: str = ""
    seconds: float | None = None

    @property
    def name(self) -> str:
        """The changes by their names."""
        names = [one.name for one in self.changes] + [self.strategy] * bool(self.strategy)
        return " + ".join(names) or "as it is"

    @property
    def fits(self) -> bool:
        """Whether at least one sample fits, or as many as were asked for."""
        return self.fit is not None and self.fit.fits

    @property
    def same_step(self) -> bool:
        """Whether gradient and update are those of the step as it is asked for, up to rounding."""
        return all(one.same_step for one in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The fastest combination of the least costly level of which one fits.

    Attributes:
        best: the answer; None if nothing that was tried fits.
        tried: everything that was planned, in order, the answer among it.
    """

    best: Combination | None
    tried: tuple[Combination, ...]


def find_combination(spec: StepSpec, target: PlanTarget, *, precision_is_open: bool) -> Answer:
    """Return the changes that let a step fit at the least cost to what is computed, and the fastest of these.

    Args:
        spec: the step as it is asked for, with a function that makes what is trained.
        target: the hardware and batch size.
        precision_is_open: bf16 may be proposed where the step is in float32; fp16 where the device has no bf16.
    """
    search = _Search(target)
    best: Combination | None = None
    for level in _levels(spec, target.autocast if precision_is_open else None):
        found = search.level(spec, level)
        if best is None:
            best = found
        elif found is not None:
            search.set_aside(found, best)
        # bf16 is looked at beside float32 that fits, since it is what most ask for next.
        if best is not None and not (precision_is_open and not level):
            break
    return Answer(best=best, tried=tuple(search.tried))


def _levels(spec: StepSpec, autocast: Autocast | None) -> Iterator[tuple[Change, ...]]:
    """Yield the changes of each level: those that lead further and further from the step as it is."""
    yield ()
    rounded = _autocast(spec, autocast)
    if rounded:
        yield tuple(rounded)
    others = other_steps(spec)
    eight_bit = tuple(one for one in others if one.name == "8-bit AdamW")
    in_bf16 = (rounded and autocast == "bf16") or built(spec)[0].trained.precision == "bf16"
    weights = {one.name: one for one in of_weights(spec)} if in_bf16 else {}
    split, stochastic = (
        (one,) if (one := weights.get(name)) is not None else ()
        for name in ("bf16 weights, split", "bf16 weights, rounded stochastically")
    )
    adapters = ((one,) for one in others if one not in eight_bit)
    both = (*stochastic, *eight_bit) if stochastic and eight_bit else ()
    for level in (split, eight_bit, stochastic, both):
        if level:
            yield (*rounded, *level)
    # Their base is in bf16, whatever the device multiplies in.
    in_base = _autocast(spec, autocast and "bf16")
    for level in adapters:
        yield (*in_base, *level)


def _autocast(spec: StepSpec, kind: Autocast | None) -> list[Change]:
    """Return the change that multiplies in a format, where there is one to make."""
    return [] if kind is None else [one for one in possible_changes(spec, kind) if one.name == f"{kind} autocast"]


def simplest_of_the_fastest(fitting: Sequence[Combination]) -> Combination:
    """Return what takes the fewest changes, and the fewest lines, of all that is within 3% of the fastest.

    Predicted times are not so sure that they could tell these apart.

    Args:
        fitting: combinations that fit, with the seconds by which they are ranked.
    """
    limit = NEAR_BEST * min(one.seconds or 0.0 for one in fitting)
    near = [one for one in fitting if (one.seconds or 0.0) <= limit]

    def effort(one: Combination) -> tuple[int, int, float]:
        return len(one.changes), sum(change.code.count("\n") for change in one.changes), one.seconds or 0.0

    return min(near, key=effort)


class _Search:
    """Plans combinations, and keeps all that it has planned."""

    def __init__(self, target: PlanTarget) -> None:
        self._target = target
        self._rates = target.rates or _nearest_rates(target)
        self.tried: list[Combination] = []

    def level(self, spec: StepSpec, level: tuple[Change, ...]) -> Combination | None:
        """Return the fastest combination of a level that fits; None if none does."""
        first = len(self.tried)
        for name, strategy in _strategies(spec, level):
            under = dataclasses.replace(spec, strategy=strategy)
            self._of_strategy(under, level, name)
            fitting = [one for one in self.tried[first:] if one.fits]
            if fitting:
                best = simplest_of_the_fastest(fitting)
                for one in fitting:
                    self.set_aside(one, best)
                return best
        return None

    def set_aside(self, one: Combination, best: Combination) -> None:
        """Say of a combination that fits why it is not the answer."""
        if one is best:
            return
        # Under FSDP no time is printed, since what its gathers add to a step is not known.
        computing = (
            " in computing and gathering" if best.strategy and best.fit is not None and best.fit.seconds is None else ""
        )
        why = f"slower{computing}" if best.same_step or not one.same_step else "leads further"
        if (one.seconds or 0.0) <= (best.seconds or 0.0):
            why = f"within {NEAR_BEST - 1:.0%}, and more to change"
        if best.same_step and not one.same_step:
            faster = (one.seconds or 0.0) < 0.97 * (best.seconds or 0.0)
            why = "not needed: it computes another step" + (", faster" if faster else "")
        self.tried[self.tried.index(one)] = dataclasses.replace(one, why=why)

    def _of_strategy(self, spec: StepSpec, level: tuple[Change, ...], strategy: str) -> None:
        """Plan the combinations of a level under a strategy: the lightest, the leanest, and those between them."""
        start = changed(spec, level)
        stays, usable = _at_least(start), self._target.budget.usable_bytes
        if strategy in {"", "all_reduce"} and spec.strategy in {"auto", "single", "all_reduce"} and stays > usable:
            why = f"weights, gradients and optimizer state take {in_bytes(stays)} of {in_bytes(max(0, usable))}"
            self.tried.append(Combination(changes=level, strategy=strategy, spec=start, fit=None, why=why))
            return
        possible = {one.name: one for one in possible_changes(start)}
        fused = tuple(one for name, one in possible.items() if name == "fused optimizer")
        chunks = [one for name, one in possible.items() if name.startswith("loss in chunks")]
        lightest = self._plan(spec, (*level, *fused), strategy, chunks)
        share = self._target.share(spec.world_size)
        if lightest is None or (lightest.fit is not None and lightest.fit.largest >= share):
            return
        ways = [one for name, one in possible.items() if name.startswith("checkpointing")]
        # Where what stays from step to step is too much already, recomputing activations helps nothing.
        if not ways or _stays(lightest) >= self._target.budget.usable_bytes:
            return
        leanest = self._plan(spec, (*level, *fused, ways[0]), strategy, chunks)
        if leanest is not None and not self._any_fits(ways[0]):
            moved = offloading(spec)
            if moved:
                self._plan(spec, (*level, *fused, *moved), strategy, chunks, plain=lightest)
            return
        for way in ways[1:]:
            self._plan(spec, (*level, *fused, way), strategy, chunks)

    def _any_fits(self, way: Change) -> bool:
        return any(one.fits for one in self.tried if way in one.changes)

    def _plan(
        self,
        spec: StepSpec,
        changes: tuple[Change, ...],
        strategy: str,
        chunks: Sequence[Change],
        *,
        plain: Combination | None = None,
    ) -> Combination | None:
        """Plan changes together, with and without a loss in chunks; return that without, None if it has no plan."""
        step = changed(spec, changes)
        try:
            envelopes = envelopes_of(step, self._target)
        except UserError as error:
            self.tried.append(Combination(changes=changes, strategy=strategy, spec=step, fit=None, why=str(error)))
            return None
        first = self._fitted(step, changes, strategy, envelopes, plain)
        for chunk in chunks:
            self._fitted(step, (*changes, chunk), strategy, reshaped(envelopes, chunk), plain)
        return first

    def _fitted(
        self,
        step: StepSpec,
        changes: tuple[Change, ...],
        strategy: str,
        envelopes: Envelopes,
        plain: Combination | None,
    ) -> Combination:
        target = self._target
        fit = fit_of(step, envelopes, target)
        ranked = dataclasses.replace(target, rates=self._rates)
        steady = ranked.seconds(envelopes.costs, fit.micro_batch_size, step.world_size)
        moving = 0.0 if plain is None else _moving_seconds(plain, envelopes, fit)
        if envelopes.sharded and steady is not None:
            moving += _gathering_seconds(step, fit, steady, target)
        if fit.seconds is not None and moving:
            longer = dataclasses.replace(fit.seconds, micro_batches=fit.seconds.micro_batches + moving)
            fit = dataclasses.replace(fit, seconds=longer)
        usable = max(0, target.budget.usable_bytes)
        samples = f"{fit.asked} samples take" if fit.asked else "one sample takes"
        made = Combination(
            changes=changes,
            strategy=strategy,
            spec=step,
            fit=fit,
            envelopes=envelopes,
            why="" if fit.fits else f"{samples} {in_bytes(fit.reserved_bytes)} of {in_bytes(usable)}",
            seconds=(0.0 if steady is None else steady.total) + moving if fit.fits else None,
        )
        self.tried.append(made)
        return made


def _moving_seconds(plain: Combination, envelopes: Envelopes, fit: Fit) -> float:
    """Return how long a step's saved activations take to the host and back, nothing of it hidden."""
    if plain.envelopes is None:
        return 0.0
    size = fit.micro_batch_size
    held = [one.steady.at_peak(size).by_category["activations"] for one in (plain.envelopes, envelopes)]
    return fit.accumulation_steps * 2 * max(0, held[0] - held[1]) / HOST_BYTES_PER_SECOND


def _gathering_seconds(step: StepSpec, fit: Fit, computing: StepSeconds, target: PlanTarget) -> float:
    """Return what FSDP's messages add to a step at the least: what is longer than the micro-batch that hides it.

    Each micro-batch gathers the weights twice and reduces gradients in float32 once, and each rank receives all but
    its own share of these. The rest of what limits it (latency, buckets) is not known, so that no time is printed.
    """
    device = target.budget.device
    if device is None:
        return 0.0
    bf16 = built(step)[0].trained.precision == "bf16"
    num_bytes = (2 if bf16 else 3) * target.gradient_bytes * (step.world_size - 1) / step.world_size
    each = computing.micro_batches / fit.accumulation_steps
    return fit.accumulation_steps * max(0.0, num_bytes / device.link_bytes_per_second - each)


def _at_least(spec: StepSpec) -> int:
    """Return the bytes that a replica cannot do without from step to step, by arithmetic; no trace is taken."""
    train = built(spec)[0].trained
    needed = replica_bytes(train.optimizer, modules_of(train), train.bf16_weights, most=0)
    return needed.least + needed.update.state


def _stays(one: Combination) -> int:
    """Return the bytes that are there from step to step, and no change of activations makes fewer."""
    if one.envelopes is None:
        return 0
    held = one.envelopes.steady.at_peak(1).by_category
    return sum(held[name] for name in ("weights", "buffers", "gradients", "optimizer"))


def _strategies(spec: StepSpec, level: tuple[Change, ...]) -> list[tuple[str, str | Callable[[], Strategy]]]:
    """Return the ways to share a step over ranks, by what travels: the least first. One that is asked for stays."""
    if spec.world_size == 1 or spec.strategy != "auto":
        return [("", spec.strategy)]
    ready, _ = built(changed(spec, level))
    shards = sharded_in_bfloat16 if ready.trained.precision == "bf16" else "fsdp"
    return [("all_reduce", "all_reduce"), ("ZeRO-1", "zero1"), ("FSDP", shards)]


def _nearest_rates(target: PlanTarget) -> Rates:
    """Return the rates of the device whose memory is nearest: to rank by, where those of the own are not known."""
    return rates_of(min(DEVICES, key=lambda one: abs(one.memory_bytes - target.budget.total_bytes)))
