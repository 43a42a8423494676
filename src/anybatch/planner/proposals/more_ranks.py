"""How many ranks it takes: FSDP2 over ever more of them until a step fits, and ZeRO-1 from a trace without it."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from anybatch.core.geometry import ceil_div
from anybatch.errors import PlanError
from anybatch.memory.trace import Allocation, MemoryTrace, check_same_structure
from anybatch.planner.cost.caching_allocator import replay
from anybatch.planner.trace.fsdp_trace import ShardedTrace, Sharding, refuse_what_cannot_be_sharded, trace_sharded
from anybatch.planner.trace.step_spec import StepSpec, built

RANKS_PER_NODE = 8
"""Above one node, whole nodes are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSizeTrial:
    """Memory that a step needs on one number of ranks.

    Attributes:
        world_size: number of ranks.
        peak_bytes: the most that tensors hold on a rank.
        reserved_bytes: the most that the allocator holds for them, under the budget; less than it needs if that is too
            little.
        fits: whether the budget is enough.
    """

    world_size: int
    peak_bytes: int
    reserved_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestWorld:
    """The fewest ranks over which a step fits.

    Attributes:
        world_size: their number; None if even the most did not fit.
        tried: the traced numbers of ranks, rising: one that fits, and its lower neighbour that does not.
    """

    world_size: int | None
    tried: tuple[WorldSizeTrial, ...]


def smallest_world(
    spec: StepSpec,
    budget_bytes: int,
    *,
    micro_batch_size: int = 1,
    sharding: Sharding | None = None,
    largest: int = 1024,
) -> SmallestWorld:
    """Return the smallest number of ranks over which FSDP2 fits a step into `budget_bytes` on each.

    Candidates are 2, 4 and whole nodes of eight. What a rank holds is of the form `a + b / ranks`, allocation by
    allocation, where all dimensions divide evenly: traces at two neighbours give `a` and `b`, and so the candidate to
    try. It and its lower neighbour are then traced themselves, and others until the lower one is too small.

    Args:
        spec: the step; its world size is ignored.
        budget_bytes: what the allocator may take on each device.
        micro_batch_size: samples of each micro-batch of a rank.
        sharding: how it is sharded; None for the defaults.
        largest: the most ranks there may be.

    Raises:
        PlanError: the spec cannot be sharded, or `largest` is less than 2.
        CannotPlanError: the step cannot run without data.
    """
    candidates = candidate_sizes(largest)
    ready, _ = built(dataclasses.replace(spec, world_size=candidates[0]))  # once for all traces
    refuse_what_cannot_be_sharded(ready)
    traced: dict[int, ShardedTrace] = {}

    def trace(world_size: int) -> ShardedTrace:
        if world_size not in traced:
            of_size = dataclasses.replace(ready, world_size=world_size)
            traced[world_size] = trace_sharded(of_size, micro_batch_size, sharding)
        return traced[world_size]

    def fits(world_size: int) -> bool:
        return _tried(world_size, trace(world_size), budget_bytes).fits

    at = 0
    if len(candidates) > 1:
        # Traces near the answer extrapolate best: where dimensions do not divide evenly, padding differs by ranks.
        upper = max(1, _where_state_fits(candidates, ready, budget_bytes))
        pair = candidates[upper - 1 : upper + 1]
        traces = trace(pair[0]), trace(pair[1])
        guesses = (_tried(size, extrapolated(*traces, pair, size), budget_bytes) for size in candidates)
        at = next((position for position, guess in enumerate(guesses) if guess.fits), len(candidates) - 1)
    found = first_that_fits(candidates, at, fits)
    tried = tuple(_tried(size, traced[size], budget_bytes) for size in sorted(traced))
    return SmallestWorld(world_size=found, tried=tried)


def _where_state_fits(candidates: Sequence[int], spec: StepSpec, budget_bytes: int) -> int:
    """Return the first position at which weights, gradients and two averages of each, and nothing else, would fit."""
    weights = cast("nn.Module", spec.trained.model).parameters()
    # Weights, gradients, and Adam's two averages: a lower bound that needs no trace.
    num_bytes = 4 * sum(weight.numel() * weight.element_size() for weight in weights)
    return next((at for at, size in enumerate(candidates) if num_bytes <= size * budget_bytes), len(candidates) - 1)


def first_that_fits(candidates: Sequence[int], guess: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first candidate that fits, looked for up and down from a guessed position; None if none does.

    A larger one than one that fits is taken to fit too. `fits` is asked again about the same candidates.
    """
    at = min(guess, len(candidates) - 1)
    # The guess comes from an extrapolation, so it is walked to the border with real traces.
    while at < len(candidates) - 1 and not fits(candidates[at]):
        at += 1
    while at > 0 and fits(candidates[at]) and fits(candidates[at - 1]):
        at -= 1
    return candidates[at] if fits(candidates[at]) else None


def candidate_sizes(largest: int) -> list[int]:
    """Return the numbers of ranks that come into question, in order.

    Raises:
        PlanError: `largest` leaves none.
    """
    sizes = [size for size in (2, 4, *range(RANKS_PER_NODE, largest + 1, RANKS_PER_NODE)) if size <= largest]
    if not sizes:
        message = f"{largest=} ranks leave nothing to share: it must be at least 2."
        raise PlanError(message)
    return sizes


def extrapolated(
    trace_a: ShardedTrace, trace_b: ShardedTrace, world_sizes: Sequence[int], world_size: int
) -> ShardedTrace:
    """Return the trace over `world_size` ranks that follows from those over two other numbers of ranks.

    It is exact where the first dimension of every parameter divides by all three numbers; elsewhere padding is missing.

    Raises:
        PlanError: the two did not do the same.
    """
    size_a, size_b = world_sizes
    check_same_structure(trace_a.memory, size_a, trace_b.memory, size_b)

    def at(a: Allocation, b: Allocation) -> Allocation:
        # Two equations in a and b, solved for b; whole numbers as long as both traces shard evenly.
        shared = (a.num_bytes - b.num_bytes) * size_a * size_b // (size_b - size_a)  # b of a + b / ranks
        num_bytes = a.num_bytes - shared // size_a + ceil_div(shared, world_size)
        return dataclasses.replace(a, num_bytes=num_bytes)

    pairs = zip(trace_a.memory.allocations, trace_b.memory.allocations, strict=True)
    memory = dataclasses.replace(trace_a.memory, allocations=tuple(at(a, b) for a, b in pairs))
    return ShardedTrace(memory, trace_a.pools)


def _tried(world_size: int, trace: ShardedTrace, budget_bytes: int) -> WorldSizeTrial:
    sizes = [one.num_bytes for one in trace.memory.allocations]
    done = replay(trace.memory.events, sizes, limit_bytes=budget_bytes, pools=trace.pools)
    return WorldSizeTrial(
        world_size=world_size,
        peak_bytes=trace.memory.peak_bytes,
        reserved_bytes=done.peak_reserved_bytes,
        fits=done.fits,
    )


def zero1(trace: MemoryTrace, world_size: int) -> MemoryTrace:
    """Return the trace of a step in which the optimizer's state, and its update, are shared evenly among ranks.

    Weights and gradients stay whole on every rank. Each piece of the state, and of what an update takes for a while, is
    cut into `world_size` parts. `torch.distributed.optim.ZeroRedundancyOptimizer` deals whole parameters instead: its
    heaviest rank holds more by at most the state of one parameter, and an update that goes parameter by parameter
    (`foreach=False`) takes as much for a while as it does without. For an envelope, fit it to such traces.

    Args:
        trace: a step on one rank, with the optimizer's state there.
        world_size: number of ranks.

    Raises:
        PlanError: `world_size` is not a number of ranks.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section 5.1.
    """
    if world_size < 1:
        message = f"{world_size=} must be at least 1."
        raise PlanError(message)

    def share(one: Allocation) -> Allocation:
        is_shared = one.category == "optimizer" or (one.phase == "update" and one.category == "temporaries")
        return dataclasses.replace(one, num_bytes=ceil_div(one.num_bytes, world_size)) if is_shared else one

    return dataclasses.replace(trace, allocations=tuple(map(share, trace.allocations)))
