"""The planner of the page plans what `anybatch plan` plans: its numbers come back as they were, and its plans are ours.

That the page's own arithmetic finds the same thousand plans is tested where there is Node: web/tests/planner.test.ts.
"""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.diagnostics.plan.words import words_of
from anybatch.guide.memory.exported import packed, unpacked
from anybatch.guide.memory.planning import OFFERED, Traced, Variant, Wish, as_recorded, planned, read, trace
from tests.guide.planner_cases import GOLDEN, NUM_CASES, lines_of, row_of, steps, wishes

GPT2 = Variant(
    model="gpt2", sequence_length=256, precision="bf16", optimizer="AdamW", checkpointing=False, several=False
)
EVERY = 40
"""Of the thousand plans, each so manieth is made anew here; all are in web/tests/planner.test.ts."""


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Return a step that is traced now."""
    return trace(GPT2)


@pytest.fixture(scope="module")
def recorded() -> list[Traced]:
    """Return the steps that are recorded."""
    return steps()


@given(st.lists(st.integers(-3, 6).filter(bool)))
def test_what_is_packed_comes_back(numbers: list[int]) -> None:
    """Packing loses nothing, whatever repeats."""
    assert unpacked(packed(numbers)) == numbers


def test_a_recorded_step_holds_what_was_traced(traced: Traced) -> None:
    """Through JSON and back, a step has the same events, sizes and sums."""
    (back,) = read(json.loads(json.dumps(as_recorded([traced]))))
    assert back.variant == traced.variant
    assert back.num_parameters == traced.num_parameters
    for one, other in (
        (traced.envelopes.steady, back.envelopes.steady),
        (traced.envelopes.first, back.envelopes.first),
    ):
        assert dataclasses.replace(one.trace, marks=()) == other.trace
        assert torch.equal(one.held.constant, other.held.constant)
        assert torch.equal(one.held.slope, other.held.slope)


def test_the_recording_is_of_this_engine(traced: Traced, recorded: list[Traced]) -> None:
    """What is traced now takes the same pieces as what was recorded."""
    (own,) = (one for one in recorded if one.variant == GPT2)
    assert own.envelopes.steady.trace == dataclasses.replace(traced.envelopes.steady.trace, marks=())
    assert torch.equal(own.envelopes.steady.held.slope, traced.envelopes.steady.held.slope)
    assert torch.equal(own.envelopes.first.held.constant, traced.envelopes.first.held.constant)


def test_a_plan_from_a_recorded_step_is_that_of_the_library(recorded: list[Traced]) -> None:
    """`ab.plan` says the same, in the same words."""
    (own,) = (one for one in recorded if one.variant == GPT2)
    found = planned(own, Wish(device="RTX 4090", effective_batch_size=500))
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


def test_every_combination_is_recorded(recorded: list[Traced]) -> None:
    """What the page lets one choose is there."""
    assert [one.variant for one in recorded] == [variant for one in OFFERED for variant in one.variants()]


def test_the_thousand_plans_are_ours(recorded: list[Traced]) -> None:
    """What the page's arithmetic is compared with is what Python plans: of every fortieth, all numbers and words."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(golden) == NUM_CASES
    for place, (number, wish) in enumerate(wishes(recorded)):
        assert golden[place][:2] == [number, wish.device]
        if place % EVERY == 0:
            plan = planned(recorded[number], wish)
            assert golden[place] == row_of(number, wish, plan), words_of(plan)
