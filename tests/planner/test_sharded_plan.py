"""Sharded steps planned in one process match the memory of real ranks."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.errors import CannotPlanError, CompositionError
from anybatch.memory.trace import Category, MemoryTrace
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.strategy import Strategy
from anybatch.planner.caching_allocator import AllocatorReplay, replay
from anybatch.planner.envelopes import find_envelopes
from anybatch.planner.fit import smallest_world
from anybatch.planner.step_spec import StepSpec
from anybatch.planner.step_trace import trace_step
from tests.planner.sharded_model import (
    STRATEGIES,
    Held,
    Network,
    adamw,
    hold_for_real,
    sharded_spec,
)
from tests.planner.step_specs import step_spec
from tests.ranks_fixture import Ranks

GLOO_COPY = "aten.split.Tensor"
"""gloo reduces a copy of its input."""
SMALL = 64
"""Bytes of messages between ranks and of norms, whose operations differ in a plan."""
MICRO_BATCH_SIZE = 64


def traced(world_size: int, strategy: str | Callable[[], Strategy] = "fsdp", size: int = 4) -> MemoryTrace:
    """Return rank 0's planned step."""
    return trace_step(replace(sharded_spec(world_size), strategy=strategy), size).steady


def for_real(names: list[str]) -> list[Held]:
    """Run on every rank."""
    return [hold_for_real(MICRO_BATCH_SIZE, name) for name in names]


def large(taken: list[tuple[str, int]]) -> Counter[tuple[str, int]]:
    """Return the allocations without gloo's copies, messages between ranks, and inputs."""
    return Counter(
        (operation, num_bytes)
        for operation, num_bytes in taken
        if num_bytes > SMALL and operation not in {GLOO_COPY, "aten.empty.memory_format"}
    )


@pytest.mark.slow
def test_allocations_match_real_ranks(two_ranks: Ranks) -> None:
    """For each reduction and sharding, rank 0's allocations match the plan, and no rank's peak is higher.

    To the byte, except small messages between ranks. Accelerators also copy first gradients, which plans leave out.
    """
    names = [name for name in STRATEGIES if name != "each time, bf16"]
    ranks = two_ranks.run(for_real, names)
    for number, name in enumerate(names):
        planned = traced(2, STRATEGIES[name], MICRO_BATCH_SIZE)
        taken = [(one.operation, one.num_bytes) for one in planned.allocations if one.phase != "setup"]
        assert large(taken) == large(ranks[0][number].taken), name
        assert abs(planned.peak_bytes - max(rank[number].peak_bytes for rank in ranks)) <= 512, name


def rows(parameter: torch.Tensor, world_size: int) -> int:
    """Return the number of rows of the first rank, by counting."""
    return len(range(0, parameter.shape[0], world_size))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_and_update_are_shared(world_size: int) -> None:
    """Rank 0 holds its rows of weights and of AdamW's two averages, and its update needs the same again.

    Weights and gradients are padded if rows do not divide evenly among three ranks.
    """
    trace = traced(world_size, lambda: FSDP(reduction="every_micro_batch"))
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
    """Return the memory held after the first `position` events."""
    held: Counter[Category] = Counter()
    for event in trace.events[:position]:
        one = trace.allocations[abs(event) - 1]
        held[one.category] += one.num_bytes if event > 0 else -one.num_bytes
    return held


def largest_held(trace: MemoryTrace, category: Category, mark: str) -> int:
    """Return the bytes of a category at a mark."""
    return held_at(trace, next(position for position, name in trace.marks if name == mark))[category]


@pytest.mark.slow
def test_gradients_are_whole_or_shards() -> None:
    """Between micro-batches a rank holds its shard of the gradients if they are reduced, and all of them if not.

    "auto" decides by the memory of the planned device.
    """
    whole = sum(4 * one.numel() for one in Network().parameters())
    for strategy, device_bytes, expected in (
        (STRATEGIES["each time"], None, whole // 2),
        (STRATEGIES["once"], None, whole),
        ("fsdp", None, whole),
        ("fsdp", 10 * whole, whole),
        ("fsdp", 9 * whole, whole // 2),
    ):
        spec = replace(sharded_spec(2), strategy=strategy, device_bytes=device_bytes)
        assert largest_held(trace_step(spec, 4).steady, "gradients", "micro-batch 0 ends") == expected


@pytest.mark.slow
def test_send_buffers_have_separate_pools() -> None:
    """Gathered blocks and reduced gradients come from separate pools, which makes the allocator reserve more.

    Parameters outside of blocks are gathered before the loss, in the pool of the computation.
    """
    trace = traced(2, STRATEGIES["each time, bf16"])
    model = Network()
    groups: list[list[torch.Tensor]] = [list(block.parameters()) for block in model.blocks.children()]
    groups.append([model.embedding.weight, model.head.weight])
    whole = {2 * sum(one.numel() for one in group) for group in groups}
    sizes: dict[int, set[int]] = {}
    for one in trace.allocations:
        sizes.setdefault(one.pool, set()).add(one.num_bytes)
    assert set(sizes) == {0, 1, 2}
    block = 2 * sum(one.numel() for one in groups[0])
    assert sizes[1] == {block, block // 2}  # bfloat16: a group's gathered weights, and one rank's part of them
    assert sizes[2] == whole  # float32: one rank's half
    num_bytes = [one.num_bytes for one in trace.allocations]
    assert replayed(trace).peak_reserved_bytes > replay(trace.events, num_bytes).peak_reserved_bytes


@pytest.mark.slow
def test_traces_do_not_depend_on_earlier_ones() -> None:
    """A trace does not depend on earlier ones, and leaves no process group and no hook."""
    hook = sys.excepthook
    first = traced(2, size=3)
    assert traced(4, size=3) != first
    assert traced(2, size=3) == first
    assert not torch.distributed.is_initialized()
    assert sys.excepthook is hook


@pytest.mark.slow
def test_the_first_plan_of_a_model_is_like_the_next() -> None:
    """The tensors that torch creates to derive how operations are sharded are not counted as memory.

    The plan for an accelerator does not start with the unsharded model either.
    """
    # A width that no other test uses, since torch caches how operations are sharded.
    spec = step_spec(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(46, 46), nn.GELU()) for _ in range(2))),
        optimizer=adamw,
        loss=ab.mean_over_samples(lambda model, batch: model(batch).square().mean()),
        sample=torch.zeros(1, 46),
        strategy="fsdp",
        world_size=2,
    )
    found, again = find_envelopes(spec, 2**30), find_envelopes(spec, 2**30)
    assert found.peak_bytes(7) == again.peak_bytes(7)
    assert found.first.trace == again.first.trace
    whole = 4 * 2 * (46 * 46 + 46)
    held = sum(one.num_bytes for one in found.first.trace.allocations if (one.phase, one.category) == SETUP_WEIGHTS)
    assert held == whole // 2


SETUP_WEIGHTS = ("setup", "weights")


def test_unsupported_shardings_are_refused() -> None:
    """Planning raises the same errors as the engine, with their fixes."""
    model = Network()
    spec = replace(sharded_spec(2), strategy="fsdp")
    assert callable(spec.train)
    train = dataclasses.replace(spec.train(), model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(CompositionError, match="Pass a function instead"):
        trace_step(replace(spec, train=train), 2)
    with pytest.raises(CompositionError):
        trace_step(replace(spec, world_size=1), 2)


def refusal() -> str:
    """Run on every rank: return the error of planning inside a process group."""
    with pytest.raises(CannotPlanError) as caught:
        traced(2)
    return str(caught.value)


def test_planning_on_a_real_rank_is_refused(two_ranks: Ranks) -> None:
    """Planning for several ranks inside a real process group raises."""
    for rank, said in enumerate(two_ranks.run(refusal)):
        assert f"rank {rank} of a real one with 2 ranks" in said


def replayed(trace: MemoryTrace, limit_bytes: int | None = None) -> AllocatorReplay:
    """Return the outcome of a trace in the allocator."""
    sizes = [one.num_bytes for one in trace.allocations]
    return replay(trace.events, sizes, limit_bytes=limit_bytes, pools=trace.pools)


@pytest.fixture(scope="module")
def wide() -> StepSpec:
    """A spec whose memory is mostly state, in large allocations."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(batch).square().mean()
        return value

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))

    return step_spec(
        model, optimizer=adamw, loss=ab.mean_over_samples(loss), sample=torch.zeros(1, 1024), strategy="fsdp"
    )


@pytest.mark.slow
def test_smallest_world_is_the_first_that_fits(wide: StepSpec) -> None:
    """For every budget, the search finds the first of all candidate world sizes that fits, or None."""
    candidates = [2, 4, 8, 16]
    traces = {size: trace_step(replace(wide, world_size=size), 1).steady for size in candidates}
    for budget in sorted({replayed(trace).peak_reserved_bytes for trace in traces.values()} | {1 << 20}):
        expected = next((size for size in candidates if replayed(traces[size], budget).fits), None)
        assert smallest_world(wide, budget, max_ranks=16) == expected


def wide_layers() -> nn.Module:
    """Return blocks with 67 million parameters in total."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "device", "strategy_said", "reduction_said"),
    [
        ("fsdp", "24GiB", "", "last_micro_batch, once per step: whole gradients take"),
        ("auto", "24GiB", "all_reduce, because there are 2 ranks, and a replica's 1.25 GiB", ""),
        ("auto", "2GiB", "all_reduce", ""),
        ("auto", "1GiB", "fsdp, because a replica's 1.25 GiB", "every_micro_batch: whole gradients take"),
    ],
)
def test_a_plan_prints_how_devices_are_used(
    strategy: str, device: str, strategy_said: str, reduction_said: str
) -> None:
    """A plan uses the memory of the planned device to choose strategy and reduction, and prints why."""
    plan = ab.plan(
        wide_layers,
        adamw,
        ab.mean_over_samples(lambda model, batch: model(batch).square().mean()),
        torch.zeros(1, 4096),
        device=device,
        effective_batch_size=8,
        world_size=2,
        strategy=strategy,
        proposals=False,
    )
    said = dict(note.split(": ", 1) for note in plan.notes if ": " in note)
    assert said.get("strategy", "").startswith(strategy_said)
    assert said.get("reduction", "").startswith(reduction_said)
