"""The page's planner is `anybatch plan`: its tables are of this engine, and the plans it is compared with are ours.

That what the page looks up are the same thousand plans is tested where there is Node: guide/web/tests/planner.test.ts.
"""

import dataclasses
import json
from typing import Any

import pytest

import anybatch as ab
from anybatch.memory.trace import MemoryEnvelope
from anybatch.planner.proposals import changes, fit
from anybatch.planner.report import Plan
from anybatch_guide.experiments.memory_planner import properties_of
from anybatch_guide.memory.planning import PlanRequest, Variant, planned
from anybatch_guide.memory.tables import DEVICE_NAMES, micro_batch_size, peak_pieces, rank_shares, tables
from guide.tests.planner_cases import GOLDEN, NUM_CASES, VARIANTS, lines_of, recorded, requests, row_of, traced
from tests.faults import sees

GPT2 = Variant(
    model="gpt2", sequence_length=256, precision="bf16", optimizer="AdamW", checkpointing=False, multi_rank=False
)
ON_RANKS = dataclasses.replace(GPT2, optimizer="fused AdamW", checkpointing=True, multi_rank=True)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """Return what is recorded."""
    return recorded()


def row(data: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the tables of a variant, as they are recorded."""
    return dict(data["variants"][VARIANTS.index(variant)])


@sees(
    "a piece of the page's peak begins one size too late",
    "guide/src/anybatch_guide/memory/tables.py",
    "return size + 1 if is_tie and steeper[2] > line[2] else size",
    "return size + 1",
    also=["guide/tests/test_planner.py::test_the_recording_is_of_this_engine"],
)
@pytest.mark.slow
@pytest.mark.parametrize("variant", [GPT2, ON_RANKS], ids=["one rank", "several ranks"])
@pytest.mark.parametrize("which", ["steady", "first"])
@pytest.mark.published
def test_pieces_are_the_peak_at_every_size(data: dict[str, Any], variant: Variant, which: str) -> None:
    """At each size the piece that holds there has the bytes by category, the phase and the operation of the peak."""
    envelope: MemoryEnvelope = getattr(traced(variant).envelopes, which)
    pieces = list(peak_pieces(envelope))
    corners = [size for piece in pieces for size in (piece[0] - 1, piece[0], piece[0] + 1) if size > 0]
    for size in sorted({*range(1, 130), 1000, 4097, *corners}):
        _, phase, operation, constants, slopes = [piece for piece in pieces if piece[0] <= size][-1]
        peak = envelope.at_peak(size)
        held = [constant + slope * size for constant, slope in zip(constants, slopes, strict=True)]
        assert dict(zip(data["categories"], held, strict=True)) == peak.by_category
        assert sum(held) == envelope.peak_bytes(size)
        assert (data["phases"][phase], operation) == (peak.phase, peak.operation)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [GPT2, ON_RANKS], ids=["one rank", "several ranks"])
@pytest.mark.published
def test_the_recording_is_of_this_engine(data: dict[str, Any], variant: Variant) -> None:
    """Tables that are made now are those that were recorded."""
    made = tables(traced(variant).envelopes, multi_rank=variant.multi_rank)
    assert {name: row(data, variant)[name] for name in made} == json.loads(json.dumps(made))


def test_every_choice_is_recorded(data: dict[str, Any]) -> None:
    """What the page lets one choose is there: every variant and device, and every size that a plan comes to."""
    expected = [properties_of(variant) for variant in VARIANTS]
    assert [{name: one[name] for name in expected[0]} for one in data["variants"]] == expected
    assert tuple(one["name"] for one in data["devices"]) == DEVICE_NAMES
    for one in data["variants"]:
        shares = rank_shares(multi_rank=one["several"])
        sizes = {size for size, _ in one["reserved_mebibytes"]}
        assert {micro_batch_size(share, found) for share in shares for found in one["largest"]} <= sizes


@pytest.mark.slow
def test_a_plan_of_the_guide_is_that_of_the_library() -> None:
    """`ab.plan` says the same, in the same words."""
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
    """Return the words of a plan without those on how long a step takes, of which the page says nothing."""
    return [line for line in lines_of(plan) if not line.startswith(("time", "      "))]


@pytest.mark.published
@pytest.mark.parametrize(
    ("name", "change"),
    [("checkpointing", {"checkpointing": True}), ("fused optimizer", {"optimizer": "fused AdamW"})],
)
def test_a_variant_is_a_row_of_the_table_of_changes(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, Any]
) -> None:
    """What the page plans with a change is what `anybatch plan` plans with it."""
    variant = dataclasses.replace(GPT2, **change)
    every = changes.possible_changes
    monkeypatch.setattr(fit, "possible_changes", lambda *task: [one for one in every(*task) if one.name == name])
    (change_row,) = ab.plan(
        "gpt2", device="12GiB", effective_batch_size=300, precision="bf16", sequence_length=256
    ).changes
    found = planned(traced(variant), PlanRequest(device="12GiB", effective_batch_size=300)).baseline
    assert (found.largest, found.micro_batch_size, found.accumulation_steps) == (
        change_row.largest,
        change_row.micro_batch_size,
        change_row.accumulation_steps,
    )
    assert (found.peak, found.reserved_bytes) == (
        dataclasses.replace(change_row.peak, mark=found.peak.mark),
        change_row.reserved_bytes,
    )


@sees(
    "the page's planner forgets what ranks need to speak to each other",
    "guide/src/anybatch_guide/memory/planning.py",
    "budget_of(request.device, world_size=request.world_size)",
    "budget_of(request.device)",
)
@pytest.mark.slow
@pytest.mark.published
def test_the_thousand_plans_are_ours() -> None:
    """What the page is compared with is what Python plans: of two of the steps, all numbers and words of every plan."""
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
