"""A measured step counts in the next plan: on that device, under those versions, as far as it says something."""

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
    """Return a memory of its own, on a day of 2030, where versions are known."""
    monkeypatch.setattr(measured, "_versions", lambda *, on_cpu: {**VERSIONS, "driver": None} if on_cpu else VERSIONS)
    return KnownDevices(tmp_path / "devices.jsonl", today=lambda: "2030-12-31")


def on_this_cpu(known: KnownDevices) -> tuple[Plan, Verification]:
    """Return a plan for this CPU, and what its step took."""
    del known
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 4096, name="net", proposals=False)
    return plan, verify(SPEC, plan.baseline, "cpu")


def test_ten_percent_of_what_is_taken_stays_free() -> None:
    """The headroom of a plan that was too low by x leaves 10% free of what is taken; one that was right leaves 10%."""
    assert measured_headroom(0.0) == pytest.approx(MEASURED_HEADROOM)
    for excess in (0.01, 0.05, 0.5):
        planned = 1.0 - measured_headroom(excess)
        assert planned * (1.0 + excess) == pytest.approx(1.0 - MEASURED_HEADROOM)


@pytest.mark.slow
def test_the_next_plan_uses_it(known: KnownDevices) -> None:
    """A step that was run on this CPU makes the next plan for it leave 10% free, at a larger size, and say why."""
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
    """Named, it passes over what was measured, and is said to be as asked."""
    known.keep(STEP)
    budget = budget_of("H100", headroom=0.3, measured=measured_of("H100", "gpt2", "bf16", known))

    assert (budget.headroom, budget.why, budget.outside_bytes) == (0.3, "as asked", CONTEXT_BYTES)


@pytest.mark.parametrize(
    ("device", "counts"),
    [("H100", True), ("NVIDIA H100 80GB HBM3", True), ("24GiB", True), ("H200", False), ("80GiB", False)],
)
def test_on_which_device(known: KnownDevices, device: str, counts: bool) -> None:
    """A step counts for the device that its driver named, and for a budget of as many bytes."""
    known.keep(STEP)

    assert (measured_of(device, "gpt2", "bf16", known) != DeviceMeasurements()) is counts


def test_a_cpu_is_not_a_card(known: KnownDevices) -> None:
    """What was measured under a CPU's budget does not count for a device of that size, nor the other way round."""
    plan, found = on_this_cpu(known)
    keep(found, plan, known)
    assert measured_of("1MiB", "net", "fp32", known) == DeviceMeasurements()

    known.keep(STEP)
    assert measured_of("cpu:24GiB", "net", "fp32", known).outside_bytes is None


@pytest.mark.parametrize("name", ["torch", "anybatch", "driver"])
def test_another_version_does_not_count(known: KnownDevices, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured with another version of torch, of us or of the driver is not used, and that is said."""
    known.keep(STEP)
    monkeypatch.setattr(measured, "_versions", lambda *, on_cpu: {**VERSIONS, name: "9.9"})  # noqa: ARG005 (as it is)

    found = measured_of("H100", "gpt2", "bf16", known)

    assert (found.headroom, found.outside_bytes) == (HEADROOM, None)
    assert f"{name} {VERSIONS[name]} (now 9.9)" in found.notes[0]


def test_what_transfers(known: KnownDevices) -> None:
    """The context is that of any step; how wrong a plan was counts in full for its model, and up to 15% for others."""
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
    """Of tensors and allocator that one is kept which was further from its plan; workspaces are planned beside both."""
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
    """A step that ran out of memory, one on another device than was planned for, and one that is far off."""
    plan, found = on_this_cpu(known)
    h100 = dataclasses.replace(plan.target, budget=budget_of("H100"))

    assert "ran out of memory" in keep(dataclasses.replace(found, too_large=(64,)), plan, known)
    words = keep(dataclasses.replace(found, name="cuda: Tesla T4"), dataclasses.replace(plan, target=h100), known)
    assert words == "not kept: this device is a Tesla T4, and the plan is for H100"
    assert "more than twice" in keep(dataclasses.replace(found, planned_bytes=1000), plan, known)
    assert known.steps() == ((), "")


def test_a_damaged_file_is_said_in_the_plan(known: KnownDevices) -> None:
    """Planning goes on as if nothing had been measured, with a note that names the file."""
    known.path.write_text("{")
    found = measured_of("cpu:1MiB", "net", "fp32", known)
    plan = make_plan(SPEC, budget_of("cpu:1MiB", measured=found), 512, proposals=False)

    assert found.headroom == HEADROOM
    assert f"note: {known.path} was passed over" in str(plan)


def test_versions_are_those_of_the_programs() -> None:
    """A CPU has no driver that counts."""
    found = measured._versions(on_cpu=True)  # noqa: SLF001 (what others replace)

    assert found["torch"] == torch.__version__
    assert found["driver"] is None
