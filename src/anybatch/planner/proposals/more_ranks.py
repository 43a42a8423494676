"""How many ranks it takes: FSDP2 over ever more of them until a step fits."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.core.geometry import ceil_div
from anybatch.errors import PlanError
from anybatch.memory.trace import Allocation, MemoryTrace, check_same_structure
from anybatch.planner.cost.caching_allocator import replay
from anybatch.planner.trace.checkpointing import as_module
from anybatch.planner.trace.step_spec import StepSpec, built
from anybatch.planner.trace.step_trace import trace_step

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
    largest: int = 1024,
) -> SmallestWorld:
    """Return the smallest number of ranks over which FSDP2 fits a step into `budget_bytes` on each.

    Candidates are 2, 4 and whole nodes of eight. What a rank holds is of the form `a + b / ranks`, allocation by
    allocation, where all dimensions divide evenly: traces at two neighbours give `a` and `b`, and so the candidate to
    try. It and its lower neighbour are then traced themselves, and others until the lower one is too small.

    Args:
        spec: the step, under a strategy that shards weights; its world size is ignored.
        budget_bytes: what the allocator may take on each device.
        micro_batch_size: samples of each micro-batch of a rank.
        largest: the most ranks there may be.

    Raises:
        PlanError: `largest` is less than 2.
        CannotPlanError: the step cannot run without data.
        UserError: the engine refuses it.
    """
    candidates = candidate_sizes(largest)
    ready, _ = built(dataclasses.replace(spec, world_size=candidates[0]))  # once for all traces
    traced: dict[int, MemoryTrace] = {}

    def trace(world_size: int) -> MemoryTrace:
        if world_size not in traced:
            of_size = dataclasses.replace(ready, world_size=world_size)
            traced[world_size] = trace_step(of_size, micro_batch_size).steady
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
    weights = as_module(spec.trained.model).parameters()
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
    trace_a: MemoryTrace, trace_b: MemoryTrace, world_sizes: Sequence[int], world_size: int
) -> MemoryTrace:
    """Return the trace over `world_size` ranks that follows from those over two other numbers of ranks.

    It is exact where the first dimension of every parameter divides by all three numbers; elsewhere padding is missing.

    Raises:
        PlanError: the two did not do the same.
    """
    size_a, size_b = world_sizes
    check_same_structure(trace_a, size_a, trace_b, size_b)

    def at(a: Allocation, b: Allocation) -> Allocation:
        # Two equations in a and b, solved for b; whole numbers as long as both traces shard evenly.
        shared = (a.num_bytes - b.num_bytes) * size_a * size_b // (size_b - size_a)  # b of a + b / ranks
        num_bytes = a.num_bytes - shared // size_a + ceil_div(shared, world_size)
        return dataclasses.replace(a, num_bytes=num_bytes)

    pairs = zip(trace_a.allocations, trace_b.allocations, strict=True)
    return dataclasses.replace(trace_a, allocations=tuple(at(a, b) for a, b in pairs))


def _tried(world_size: int, trace: MemoryTrace, budget_bytes: int) -> WorldSizeTrial:
    sizes = [one.num_bytes for one in trace.allocations]
    done = replay(trace.events, sizes, limit_bytes=budget_bytes, pools=trace.pools)
    return WorldSizeTrial(
        world_size=world_size,
        peak_bytes=trace.peak_bytes,
        reserved_bytes=done.peak_reserved_bytes,
        fits=done.fits,
    )
