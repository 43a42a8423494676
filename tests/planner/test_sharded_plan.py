"""A sharded step that is planned without ranks takes what real ranks take."""

import itertools
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.blocks import repeated_blocks
from anybatch.engine.spec import TrainSpec
from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import Category, MemoryTrace
from anybatch.planner.cost.caching_allocator import replay
from anybatch.planner.proposals.more_ranks import candidate_sizes, extrapolated, first_that_fits, smallest_world, zero1
from anybatch.planner.trace.fsdp_trace import ShardedTrace, Sharding, trace_sharded
from anybatch.planner.trace.step_spec import StepSpec
from anybatch.planner.trace.step_trace import StepTracer
from tests.planner.sharded_model import NUM_BLOCKS, Block, Held, Network, adamw, hold_for_real, sharded_spec
from tests.planner.step_specs import changed, step_spec
from tests.ranks_fixture import Ranks

GLOO_COPY = "aten.split.Tensor"
"""gloo reduces a copy of what it is given."""

NUM_GROUPS = NUM_BLOCKS + 1


def for_real(micro_batch_size: int, keep: bool, defer: bool) -> Held:
    """Run on every rank."""
    return hold_for_real(micro_batch_size, keep=keep, defer=defer)


@pytest.mark.parametrize(
    ("keep", "defer"), [(False, False), (True, False), (False, True)], ids=["gather again", "keep", "defer"]
)
def test_every_allocation_is_that_of_real_ranks(keep: bool, defer: bool, two_ranks: Ranks) -> None:
    """Rank 0 of two real ones takes the planned pieces, in this order; gloo's copies are all that comes on top.

    The most that tensors hold at once differs by at most 1%: gloo's thread lets go a moment later.
    """
    planned = trace_sharded(sharded_spec(2), 64, Sharding(reshard_after_forward=not keep, defer=defer)).memory
    real = two_ranks.run(for_real, 64, keep, defer)[0]
    taken = [(one.operation, one.num_bytes) for one in planned.allocations if one.phase != "setup"]
    assert [one for one in real.taken if one[0] != GLOO_COPY] == taken
    num_reductions = NUM_GROUPS * (1 if defer else 2)
    assert sum(operation == GLOO_COPY for operation, _ in real.taken) == num_reductions
    assert abs(planned.peak_bytes / real.peak_bytes - 1) <= 0.01


def rows(parameter: torch.Tensor, world_size: int) -> int:
    """Return how many rows the first rank has, by counting."""
    return len(range(0, parameter.shape[0], world_size))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_and_update_are_shared(world_size: int) -> None:
    """Rank 0 holds its rows of weights and of both of AdamW's averages, and its update takes as many for a while.

    Weights and gradients are padded where rows do not divide among three ranks.
    """
    trace = trace_sharded(sharded_spec(world_size), 4).memory
    parameters = list(Network().parameters())
    own = sum(4 * rows(one, world_size) * one[0].numel() for one in parameters)
    steps = 4 * len(parameters)
    held: Counter[Category] = Counter()
    for one in trace.allocations:
        if one.phase == "setup":
            held[one.category] += one.num_bytes
    assert held["weights"] == own
    assert held["optimizer"] == 2 * own + steps
    in_update = sum(one.num_bytes for one in trace.allocations if one.operation == "aten._foreach_sqrt.default")
    assert in_update == own
    assert largest_held(trace, "gradients", "micro-batch 0 ends") == own


def held_at(trace: MemoryTrace, position: int) -> Counter[Category]:
    """Return what is held after so many events."""
    held: Counter[Category] = Counter()
    for event in trace.events[:position]:
        one = trace.allocations[abs(event) - 1]
        held[one.category] += one.num_bytes if event > 0 else -one.num_bytes
    return held


def largest_held(trace: MemoryTrace, category: Category, mark: str) -> int:
    """Return what a category holds at a mark."""
    return held_at(trace, next(position for position, name in trace.marks if name == mark))[category]


@pytest.mark.slow
def test_deferred_gradients_are_whole() -> None:
    """Between micro-batches a rank holds its share of the gradients if they are reduced, all of them if not."""
    whole = sum(4 * one.numel() for one in Network().parameters())
    for defer, expected in ((False, whole // 2), (True, whole)):
        trace = trace_sharded(sharded_spec(2), 4, Sharding(defer=defer)).memory
        assert largest_held(trace, "gradients", "micro-batch 0 ends") == expected


@pytest.mark.slow
def test_gathered_weights_are_kept_or_let_go() -> None:
    """Blocks that keep their gathered weights hold all of them in bfloat16 at the end of the forward, beside shards.

    Otherwise it is the root and one block at a time, also where the last block is kept.
    """
    model = Network()
    block = 2 * sum(one.numel() for one in model.blocks[0].parameters())
    root = 2 * sum(one.numel() for one in (model.embedding.weight, model.head.weight))
    shards = sum(4 * one.numel() for one in model.parameters()) // 2
    for sharding, num_gathered in (
        (Sharding(reshard_after_forward=False), NUM_BLOCKS),
        (Sharding(), 1),
        (Sharding(reshard_last_block=False), 1),
    ):
        trace = trace_sharded(sharded_spec(2), 4, sharding).memory
        largest = max(held_at(trace, position)["weights"] for position in range(len(trace.events)))
        assert largest == shards + root + num_gathered * block


@pytest.mark.slow
def test_buffers_for_sending_come_from_pools_of_their_own() -> None:
    """What is gathered comes from one pool, what is reduced from another; the allocator needs no less with them."""
    trace = trace_sharded(sharded_spec(2), 4)
    model = Network()
    groups: list[list[torch.Tensor]] = [list(block.parameters()) for block in model.blocks.children()]
    groups.append([model.embedding.weight, model.head.weight])
    whole = {2 * sum(one.numel() for one in group) for group in groups}
    sizes: dict[int, set[int]] = {}
    for one, pool in zip(trace.memory.allocations, trace.pools, strict=True):
        sizes.setdefault(pool, set()).add(one.num_bytes)
    assert set(sizes) == {0, 1, 2}
    assert sizes[1] == whole | {size // 2 for size in whole}  # bfloat16: all of a group, and what one rank puts in
    assert sizes[2] == whole  # float32: one rank's half
    num_bytes = [one.num_bytes for one in trace.memory.allocations]
    with_pools = replay(trace.memory.events, num_bytes, pools=trace.pools).peak_reserved_bytes
    assert with_pools > replay(trace.memory.events, num_bytes).peak_reserved_bytes


@pytest.mark.slow
def test_traces_do_not_depend_on_those_before() -> None:
    """The same trace comes out again after another number of ranks; no process group is left, and no hook of it."""
    hook = sys.excepthook
    first = trace_sharded(sharded_spec(2), 3)
    assert trace_sharded(sharded_spec(4), 3) != first
    assert trace_sharded(sharded_spec(2), 3) == first
    assert not torch.distributed.is_initialized()
    assert sys.excepthook is hook


class Mixture(nn.Module):
    """A block with blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, row by row."""
    return [block for row in repeated_blocks(model) for block in row.modules]


def test_blocks_are_found() -> None:
    """Composite modules of a class that repeats in a list are blocks, wherever it is; parts of blocks are none."""
    network = Network()
    assert blocks_of(network) == list(network.blocks)
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))) == []
    first, second, third, fourth = (Block() for _ in range(4))
    stages = nn.Sequential(nn.Linear(2, 2), nn.Sequential(first, second), nn.ModuleDict({"a": third, "b": fourth}))
    assert blocks_of(stages) == [first, second, third, fourth]
    nested = nn.ModuleList(nn.TransformerEncoderLayer(4, 1) for _ in range(2))
    nested.append(nn.Sequential(Block(), nn.GELU()))
    assert blocks_of(nested) == list(nested[:2])
    mixtures = nn.ModuleList(Mixture() for _ in range(2))
    assert blocks_of(mixtures) == list(mixtures)


def test_blocks_of_a_library_are_found() -> None:
    """The layers of a Llama of transformers are its blocks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=50
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert blocks_of(model) == list(model.model.layers)


def made(spec: StepSpec) -> StepSpec:
    """Return the spec with its optimizer made already."""
    model = Network()
    return changed(spec, model=lambda: model, optimizer=torch.optim.AdamW(model.parameters()))


def encode(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return nothing in particular."""
    raise NotImplementedError


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (sharded_spec(1), "world_size=1"),
        (changed(sharded_spec(2), model=lambda: {"network": Network()}), "one module"),
        (made(sharded_spec(2)), "function named_parameters"),
        (changed(sharded_spec(2), loss=ab.joint(encode, encode)), "per micro-batch"),
    ],
    ids=["one rank", "two modules", "made optimizer", "joint loss"],
)
def test_what_cannot_be_sharded_is_refused(spec: StepSpec, words: str) -> None:
    """Whatever has no sharded form is refused, with what to give instead."""
    with pytest.raises(PlanError, match=words):
        trace_sharded(spec, 2)


def refusal() -> str:
    """Run on every rank: return what is said where a process group is there."""
    with pytest.raises(CannotPlanError) as caught:
        trace_sharded(sharded_spec(2), 2)
    return str(caught.value)


def test_a_real_rank_does_not_imagine_others(two_ranks: Ranks) -> None:
    """A process that is one of real ranks refuses, and its group is as before."""
    for rank, said in enumerate(two_ranks.run(refusal)):
        assert f"rank {rank} of 2 real ones" in said


def needed(trace: ShardedTrace) -> int:
    """Return what the allocator takes if it has all it wants."""
    sizes = [one.num_bytes for one in trace.memory.allocations]
    return replay(trace.memory.events, sizes, pools=trace.pools).peak_reserved_bytes


def fits(trace: ShardedTrace, budget_bytes: int) -> bool:
    """Return whether a budget is enough."""
    sizes = [one.num_bytes for one in trace.memory.allocations]
    return replay(trace.memory.events, sizes, limit_bytes=budget_bytes, pools=trace.pools).fits


@pytest.fixture(scope="module")
def wide() -> StepSpec:
    """A spec whose memory is its state, in pieces that are large to the allocator."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(batch).square().mean()
        return value

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))

    return step_spec(model, optimizer=adamw, loss=ab.mean_over_samples(loss), sample=torch.zeros(1, 1024))


@pytest.mark.slow
def test_smallest_world_is_the_first_that_fits(wide: StepSpec) -> None:
    """Of all candidates in order, the first that fits is found, for every budget; where none does, that is said."""
    candidates = [2, 4, 8, 16, 24, 32]
    assert candidate_sizes(32) == candidates
    traces = {size: trace_sharded(replace(wide, world_size=size), 1) for size in candidates}
    for budget in sorted({needed(trace) for trace in traces.values()} | {1 << 20}):
        expected = next((size for size in candidates if fits(traces[size], budget)), None)
        found = smallest_world(wide, budget, largest=32)
        assert found.world_size == expected
        tried = {one.world_size: one.fits for one in found.tried}
        assert all(one == fits(traces[size], budget) for size, one in tried.items())
        if expected is not None:
            assert tried[expected]
            assert expected == 2 or not tried[candidates[candidates.index(expected) - 1]]


def test_a_wrong_guess_is_put_right() -> None:
    """Whatever the guess, the first candidate that fits is found; it and its lower neighbour have been asked about."""
    candidates = [2, 4, 8, 16]
    for first, guess in itertools.product((2, 4, 8, 16, 17), range(6)):
        asked: set[int] = set()

        def fits(size: int, first: int = first, asked: set[int] = asked) -> bool:
            asked.add(size)
            return size >= first

        expected = next((size for size in candidates if size >= first), None)
        assert first_that_fits(candidates, guess, fits) == expected
        last = len(candidates) if expected is None else candidates.index(expected) + 1
        assert asked >= set(candidates[max(last - 2, 0) if expected else last - 1 : last])


@pytest.mark.slow
def test_two_numbers_of_ranks_tell_of_all() -> None:
    """Where rows divide evenly, what eight ranks hold follows from two and four, to the byte."""
    traces = [trace_sharded(sharded_spec(size), 2) for size in (2, 4)]
    even = extrapolated(traces[0], traces[1], (2, 4), 20)
    assert even == trace_sharded(sharded_spec(20), 2)


def test_no_number_of_ranks_is_refused() -> None:
    """A search among no candidates says so."""
    with pytest.raises(PlanError, match="largest=1"):
        candidate_sizes(1)
    with pytest.raises(PlanError, match="world_size=0"):
        zero1(MemoryTrace((), ()), 0)


def pairs() -> nn.Module:
    """Return a model whose parameters come in pairs, so that two ranks share them evenly."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, updates: torch.optim.Optimizer) -> MemoryTrace:
    """Return what the second step of a plain loop takes and lets go; `updates` is what keeps the state."""
    step(model, optimizer)
    ledger = MemoryLedger()
    ledger.hold("weights", model.parameters())
    ledger.hold("optimizer", [value for values in updates.state.values() for value in values.values()])
    with ledger:
        step(model, optimizer, ledger)
    trace = ledger.trace()
    ledger.forget()
    return trace


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ledger: MemoryLedger | None = None) -> None:
    """Run a plain step, and book it."""
    model(torch.zeros(5, 64)).sum().backward()
    if ledger is not None:
        ledger.hold("gradients", (one.grad for one in model.parameters() if one.grad is not None))
        ledger.phase = "update"
    optimizer.step()
    optimizer.zero_grad()


def zero_by_torch() -> MemoryTrace:
    """Run on every rank: return what torch's ZeRO-1 takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about what it does when this is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415
    model = pairs()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, foreach=True)
    return updated(model, optimizer, optimizer.optim)


def test_zero1_is_that_of_torch(two_ranks: Ranks) -> None:
    """Dividing state and update of an unsharded step by two gives what two ranks of torch's ZeRO-1 hold.

    All but AdamW's own count of steps, four bytes for each parameter.
    """
    model = pairs()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    planned = zero1(updated(model, optimizer, optimizer), 2)
    for real in two_ranks.run(zero_by_torch):
        for category in ("weights", "optimizer", "gradients"):
            assert total(planned, category) == pytest.approx(total(real, category), abs=4 * 8)
        assert planned.peak_bytes == pytest.approx(real.peak_bytes, abs=2 * 4 * 8)


def total(trace: MemoryTrace, category: Category) -> int:
    """Return all that was ever taken for a category."""
    return sum(one.num_bytes for one in trace.allocations if one.category == category)


def test_a_step_under_fsdp_is_not_planned() -> None:
    """The trace of one rank's engine is refused for strategies that shard, with what to do instead."""
    model = nn.Linear(3, 3)
    spec = StepSpec(
        train=TrainSpec(model=model, optimizer=torch.optim.SGD, loss=ab.mean_over_samples(lambda m, x: m(x).mean())),
        sample=torch.zeros(1, 3),
        strategy="fsdp",
        world_size=2,
    )
    with pytest.raises(CannotPlanError, match="over how many ranks FSDP fits"):
        StepTracer(spec)
