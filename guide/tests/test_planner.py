"""The planner of the page plans what `anybatch plan` plans: its numbers come back as they were, and its plans are ours.

That the page's own arithmetic finds the same thousand plans is tested where there is Node:
guide/web/tests/planner.test.ts.
"""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.planner.proposals import changes, ranking
from anybatch_guide.memory.exported import packed, unpacked
from anybatch_guide.memory.planning import (
    OFFERED,
    Traced,
    Variant,
    Wish,
    as_recorded,
    planned,
    read,
    trace,
    variants_of,
)
from guide.tests.planner_cases import GOLDEN, NUM_CASES, lines_of, recorded, row_of, wishes
from tests.faults import sees

GPT2 = Variant(
    model="gpt2", sequence_length=256, precision="bf16", optimizer="AdamW", checkpointing=False, several=False
)
EVERY = 40
"""Of the thousand plans, each so manieth is made anew here; all are in guide/web/tests/planner.test.ts."""


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Return a step that is traced now."""
    return trace(GPT2)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Return what is recorded."""
    return recorded()


def own(data: dict[str, Any]) -> Traced:
    """Return the step of these tests, as it is recorded."""
    return read(data, variants_of(data).index(GPT2))


@sees(
    "packed numbers are copied from one place too late",
    "guide/src/anybatch_guide/memory/exported.py",
    "out += [0, place - start, length]",
    "out += [0, place - start - 1, length]",
    also=["guide/tests/test_planner.py::test_a_recorded_step_holds_what_was_traced"],
)
@given(st.lists(st.integers(-3, 6).filter(bool)))
def test_what_is_packed_comes_back(numbers: list[int]) -> None:
    """Packing loses nothing, whatever repeats."""
    assert unpacked(packed(numbers)) == numbers


def test_a_recorded_step_holds_what_was_traced(traced: Traced) -> None:
    """Through JSON and back, a step has the same events, sizes and sums."""
    back = read(json.loads(json.dumps(as_recorded([traced]))), 0)
    assert back.variant == traced.variant
    assert back.num_parameters == traced.num_parameters
    for one, other in (
        (traced.envelopes.steady, back.envelopes.steady),
        (traced.envelopes.first, back.envelopes.first),
    ):
        assert dataclasses.replace(one.trace, marks=()) == other.trace
        assert torch.equal(one.held.constant, other.held.constant)
        assert torch.equal(one.held.slope, other.held.slope)


def test_the_recording_is_of_this_engine(traced: Traced, data: dict[str, Any]) -> None:
    """What is traced now takes the same pieces as what was recorded."""
    found = own(data)
    assert found.envelopes.steady.trace == dataclasses.replace(traced.envelopes.steady.trace, marks=())
    assert torch.equal(found.envelopes.steady.held.slope, traced.envelopes.steady.held.slope)
    assert torch.equal(found.envelopes.first.held.constant, traced.envelopes.first.held.constant)


def test_a_plan_from_a_recorded_step_is_that_of_the_library(data: dict[str, Any]) -> None:
    """`ab.plan` says the same, in the same words."""
    found = planned(own(data), Wish(device="RTX 4090", effective_batch_size=500))
    plan = ab.plan(
        "gpt2",
        device="RTX 4090",
        effective_batch_size=500,
        precision="bf16",
        sequence_length=256,
        proposals=False,
    )
    without_time = [line for line in lines_of(plan) if not line.startswith(("time", "      "))]
    assert lines_of(found) == without_time
    assert found.bytes_by_purpose() == plan.bytes_by_purpose()
    assert found.as_it_is.reserved_bytes == plan.as_it_is.reserved_bytes


@pytest.mark.parametrize(
    ("name", "change"),
    [("checkpointing", {"checkpointing": True}), ("fused optimizer", {"optimizer": "fused AdamW"})],
)
def test_a_variant_is_a_row_of_the_table_of_changes(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], name: str, change: dict[str, Any]
) -> None:
    """What the page plans with a change is what `anybatch plan` plans with it."""
    variant = dataclasses.replace(GPT2, **change)
    every = changes.possible_changes
    monkeypatch.setattr(ranking, "possible_changes", lambda task: [one for one in every(task) if one.name == name])
    (row,) = ab.plan("gpt2", device="12GiB", effective_batch_size=300, precision="bf16", sequence_length=256).changes
    found = planned(
        read(data, variants_of(data).index(variant)), Wish(device="12GiB", effective_batch_size=300)
    ).as_it_is
    assert (found.largest, found.micro_batch_size, found.accumulation_steps) == (
        row.largest,
        row.micro_batch_size,
        row.accumulation_steps,
    )
    assert (found.peak, found.reserved_bytes) == (
        dataclasses.replace(row.peak, mark=found.peak.mark),
        row.reserved_bytes,
    )


def test_every_combination_is_recorded(data: dict[str, Any]) -> None:
    """What the page lets one choose is there."""
    assert variants_of(data) == [variant for one in OFFERED for variant in one.variants()]


@sees(
    "the page's planner forgets what ranks need to speak to each other",
    "guide/src/anybatch_guide/memory/planning.py",
    "budget_of(wish.device, world_size=wish.world_size, headroom=named)",
    "budget_of(wish.device, headroom=named)",
)
def test_the_thousand_plans_are_ours(data: dict[str, Any]) -> None:
    """What the page's arithmetic is compared with is what Python plans: of every fortieth, all numbers and words."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(golden) == NUM_CASES
    for place, (number, wish) in enumerate(wishes(variants_of(data))):
        assert golden[place][:2] == [number, wish.device]
        if place % EVERY == 0:
            plan = planned(read(data, number), wish)
            assert golden[place] == row_of(number, wish, plan), str(plan)
