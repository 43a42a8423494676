"""A measured step improves later plans for the same device and versions."""

import dataclasses
from pathlib import Path

import pytest
import torch

from anybatch.core.headroom import HEADROOM, MEASURED_HEADROOM, measured_headroom
from anybatch.planner import measured
from anybatch.planner.budget import CONTEXT_BYTES, DeviceMeasurements, budget_of
from anybatch.planner.cache.measured_devices import KnownDevices, MeasuredStep
from anybatch.planner.measured import keep, measured_of, subject
from anybatch.planner.plan import make_plan
from anybatch.planner.report import Plan
from anybatch.planner.verification import Verification, verify
from tests.planner.test_verification import SPEC

MIB = 2**20
VERSIONS = {"torch": "2.13.0", "anybatch": "0.1.0", "driver": "570.1"}
STEP = MeasuredStep(
    device="cuda: NVIDIA H100 80GB HBM3",
    budget_bytes=24 * 2**30,
    subject=subject("gpt2", "bf16"),
    planned_bytes=1000,
    measured_bytes=1000,
    outside_bytes=400 * MIB,
    versions=VERSIONS,
    date="2030-12-31",
)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownDevices:
    """Return an empty store of measured devices, with a fixed date and fixed versions."""
    monkeypatch.setattr(measured, "_versions", lambda *, on_cpu: {**VERSIONS, "driver": None} if on_cpu else VERSIONS)
    return KnownDevices(tmp_path / "devices.jsonl", today=lambda: "2030-12-31")


def on_this_cpu(known: KnownDevices) -> tuple[Plan, Verification]:
    """Return a plan for this CPU, and the verification of its step."""
    del known
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 4096, name="net", proposals=False)
    return plan, verify(SPEC, plan.baseline, "cpu")


def test_ten_percent_of_what_is_taken_stays_free() -> None:
    """The headroom after a plan that was too low leaves 10% of the real memory free; after an exact plan, 10%."""
    assert measured_headroom(0.0) == pytest.approx(MEASURED_HEADROOM)
    for excess in (0.01, 0.05, 0.5):
        planned = 1.0 - measured_headroom(excess)
        assert planned * (1.0 + excess) == pytest.approx(1.0 - MEASURED_HEADROOM)


@pytest.mark.slow
def test_the_next_plan_uses_it(known: KnownDevices) -> None:
    """After a step was measured on this CPU, the next plan keeps 10% free, allows a larger size, and says why."""
    plan, found = on_this_cpu(known)
    before = measured_of("cpu:1MiB", "net", "fp32", known)
    assert before == DeviceMeasurements()

    assert str(known.path) in keep(found, plan, known)
    after = measured_of("cpu:1MiB", "net", "fp32", known)
    again = make_plan(SPEC, budget_of("cpu:1MiB", measured=after), 4096, name="net", proposals=False)

    assert after.headroom == pytest.approx(MEASURED_HEADROOM, abs=0.01)
    assert again.baseline.largest > plan.baseline.largest
    assert "note: measured on 2030-12-31 with torch 2.13.0: headroom 10%" in str(again)
    assert "10% is kept free (as measured on 2030-12-31 with torch 2.13.0)" in str(again)
    assert "15% is kept free (nothing has been measured on it yet)" in str(plan)


def test_a_headroom_that_is_named_is_taken(known: KnownDevices) -> None:
    """An explicit headroom overrides measurements and is reported as requested."""
    known.keep(STEP)
    budget = budget_of("H100", headroom=0.3, measured=measured_of("H100", "gpt2", "bf16", known))

    assert (budget.headroom, budget.why, budget.outside_bytes) == (0.3, "as asked", CONTEXT_BYTES)


@pytest.mark.parametrize(
    ("device", "counts"),
    [("H100", True), ("NVIDIA H100 80GB HBM3", True), ("24GiB", True), ("H200", False), ("80GiB", False)],
)
def test_on_which_device(known: KnownDevices, device: str, counts: bool) -> None:
    """A step counts for its own device, and for a budget of the same size."""
    known.keep(STEP)

    assert (measured_of(device, "gpt2", "bf16", known) != DeviceMeasurements()) is counts


def test_a_cpu_is_not_a_card(known: KnownDevices) -> None:
    """Measurements under a CPU budget do not count for a GPU of that size, nor the other way round."""
    plan, found = on_this_cpu(known)
    keep(found, plan, known)
    assert measured_of("1MiB", "net", "fp32", known) == DeviceMeasurements()

    known.keep(STEP)
    assert measured_of("cpu:24GiB", "net", "fp32", known).outside_bytes is None


@pytest.mark.parametrize("name", ["torch", "anybatch", "driver"])
def test_another_version_does_not_count(known: KnownDevices, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements with another version of torch, anybatch or the driver are ignored, with a note."""
    known.keep(STEP)
    monkeypatch.setattr(measured, "_versions", lambda *, on_cpu: {**VERSIONS, name: "9.9"})  # noqa: ARG005 (as called)

    found = measured_of("H100", "gpt2", "bf16", known)

    assert (found.headroom, found.outside_bytes) == (HEADROOM, None)
    assert f"{name} {VERSIONS[name]} (now 9.9)" in found.notes[0]


def test_what_transfers(known: KnownDevices) -> None:
    """The context size applies to any step; a plan's error applies fully to its model, and up to 15% to others."""
    known.keep(dataclasses.replace(STEP, measured_bytes=1200))
    same, other = measured_of("H100", "gpt2", "bf16", known), measured_of("H100", "llama", "bf16", known)
    assert same.outside_bytes == other.outside_bytes == 400 * MIB
    assert same.headroom == pytest.approx(1.0 - 0.9 / 1.2)
    assert other.headroom == HEADROOM

    known.keep(dataclasses.replace(STEP, subject=subject("digits", "fp32"), measured_bytes=900))
    assert measured_of("H100", "digits", "fp32", known).headroom == pytest.approx(MEASURED_HEADROOM)
    assert measured_of("H100", "llama", "bf16", known).headroom == HEADROOM

    budget = budget_of("H100", world_size=2, measured=same)
    assert budget.outside_bytes - budget_of("H100", world_size=2).outside_bytes == 400 * MIB - CONTEXT_BYTES


def test_the_larger_gap_is_kept(known: KnownDevices) -> None:
    """The larger of the tensor and allocator errors is stored; planned workspaces are added to both."""
    plan, found = on_this_cpu(known)
    plan = dataclasses.replace(
        plan,
        target=dataclasses.replace(
            plan.target, budget=dataclasses.replace(plan.budget, workspace_bytes=100, device=None)
        ),
    )
    found = dataclasses.replace(
        found,
        name="cuda: Something",
        planned_bytes=1000,
        measured_bytes=1100,
        planned_reserved_bytes=2000,
        measured_reserved_bytes=2400,
        outside_bytes=300 * MIB,
    )
    keep(found, plan, known)
    step = known.steps()[0][0]
    assert (step.planned_bytes, step.measured_bytes, step.outside_bytes) == (2100, 2400, 300 * MIB)

    keep(dataclasses.replace(found, outside_bytes=9000 * MIB), plan, known)
    assert known.steps()[0][0].outside_bytes is None, "another program's"


def test_what_is_not_kept(known: KnownDevices) -> None:
    """A step that ran out of memory, ran on another device than planned, or is far off the plan is not stored."""
    plan, found = on_this_cpu(known)
    h100 = dataclasses.replace(plan.target, budget=budget_of("H100"))

    assert "ran out of memory" in keep(dataclasses.replace(found, too_large=(64,)), plan, known)
    words = keep(dataclasses.replace(found, name="cuda: Tesla T4"), dataclasses.replace(plan, target=h100), known)
    assert words == "not kept: this device is a Tesla T4, and the plan is for H100"
    assert "more than twice" in keep(dataclasses.replace(found, planned_bytes=1000), plan, known)
    assert known.steps() == ((), "")


def test_a_damaged_file_is_said_in_the_plan(known: KnownDevices) -> None:
    """An unreadable file is ignored, with a note in the plan that names it."""
    known.path.write_text("{")
    found = measured_of("cpu:1MiB", "net", "fp32", known)
    plan = make_plan(SPEC, budget_of("cpu:1MiB", measured=found), 512, proposals=False)

    assert found.headroom == HEADROOM
    assert f"note: {known.path} was ignored" in str(plan)


def test_versions_are_those_of_the_programs() -> None:
    """The versions of a CPU measurement include no driver."""
    found = measured._versions(on_cpu=True)  # noqa: SLF001 (the function that tests replace)

    assert found["torch"] == torch.__version__
    assert found["driver"] is None
