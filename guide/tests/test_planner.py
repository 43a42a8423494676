"""The planner of the page matches `anybatch plan`: its tables and reference plans come from this engine.

guide/web/tests/planner.test.ts tests that the page finds the same thousand plans, where Node is installed.
"""

import dataclasses
import json
from typing import Any

import pytest

import anybatch as ab
from anybatch.planner.plan import Plan
from anybatch_guide.experiments.memory_planner import properties_of
from anybatch_guide.memory.planning import PlanRequest, Variant, planned
from anybatch_guide.memory.tables import DEVICE_NAMES, micro_batch_size, rank_shares, tables
from guide.tests.planner_cases import GOLDEN, NUM_CASES, VARIANTS, lines_of, recorded, requests, row_of, traced

GPT2 = Variant(
    model="gpt2", sequence_length=256, precision="bf16", optimizer="AdamW", checkpointing=False, multi_rank=False
)
ON_RANKS = dataclasses.replace(GPT2, optimizer="fused AdamW", checkpointing=True, multi_rank=True)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Return the recorded data."""
    return recorded()


def row(data: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the recorded tables of a variant."""
    return dict(data["variants"][VARIANTS.index(variant)])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [GPT2, ON_RANKS], ids=["one rank", "several ranks"])
@pytest.mark.published
def test_the_recording_matches_this_engine(data: dict[str, Any], variant: Variant) -> None:
    """New tables equal the recorded ones."""
    made = tables(traced(variant).envelopes, multi_rank=variant.multi_rank)
    assert {name: row(data, variant)[name] for name in made} == json.loads(json.dumps(made))


def test_every_choice_is_recorded(data: dict[str, Any]) -> None:
    """The tables cover every choice on the page: every variant and device, and every possible size."""
    expected = [properties_of(variant) for variant in VARIANTS]
    assert [{name: one[name] for name in expected[0]} for one in data["variants"]] == expected
    assert tuple(one["name"] for one in data["devices"]) == DEVICE_NAMES
    for one in data["variants"]:
        shares = rank_shares(multi_rank=one["several"])
        sizes = {size for size, _ in one["reserved_mebibytes"]}
        assert {micro_batch_size(share, found) for share in shares for found in one["largest"]} <= sizes


@pytest.mark.slow
def test_a_plan_of_the_guide_equals_the_librarys() -> None:
    """`ab.plan` prints the same plan as the guide."""
    found = planned(traced(GPT2), PlanRequest(device="RTX 4090", effective_batch_size=500))
    plan = ab.plan(
        "gpt2",
        device="RTX 4090",
        effective_batch_size=500,
        precision="bf16",
        sequence_length=256,
        proposals=False,
    )
    assert [without_time(one) for one in (found, plan)] == [without_time(plan)] * 2
    assert found.bytes_by_purpose() == plan.bytes_by_purpose()
    assert found.baseline.reserved_bytes == plan.baseline.reserved_bytes


def without_time(plan: Plan) -> list[str]:
    """Return the lines of a plan without times, which the page does not show."""
    return [line for line in lines_of(plan) if not line.startswith(("time", "      "))]


@pytest.mark.slow
@pytest.mark.published
def test_the_reference_plans_match_this_engine() -> None:
    """The reference plans of the page equal Python's plans: all numbers and lines, for two of the steps."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(golden) == NUM_CASES
    made = 0
    for place, (number, request) in enumerate(requests(VARIANTS)):
        assert golden[place][:2] == [number, request.device]
        if VARIANTS[number] in (GPT2, ON_RANKS):
            plan = planned(traced(VARIANTS[number]), request)
            assert golden[place] == row_of(number, request, plan), str(plan)
            made += 1
    assert made > NUM_CASES // len(VARIANTS)
