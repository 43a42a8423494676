"""Measurements persist between processes, improve later plans for the same device and versions, and never raise."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import KnownSize
from anybatch.core.units import HEADROOM, MEASURED_HEADROOM, measured_headroom
from anybatch.planner import budget, verification
from anybatch.planner.budget import CONTEXT_BYTES, DeviceMeasurements, budget_of, measured_of
from anybatch.planner.measurements import (
    MOST_BYTES,
    MOST_LINES,
    KnownDevices,
    KnownSizes,
    MeasuredStep,
    driver_version,
    subject,
    versions_here,
)
from anybatch.planner.plan import Plan, make_plan
from anybatch.planner.verification import Verification, keep, verify
from tests.planner.test_verification import SPEC

MIB = 2**20
HERE = {"model": "a", "samples": [("torch.float32", 3, 8)], "share": 64, "device": "cpu", "torch": "2.13"}
FOUND = KnownSize(16, 1.0, "2030-12-31")
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


def known_sizes(folder: Path) -> KnownSizes:
    """Return the store of sizes in a folder, with a fixed date."""
    return KnownSizes(folder / "deep" / "sizes.jsonl", today=lambda: "2030-12-31")


def known_devices(folder: Path) -> KnownDevices:
    """Return the store of measured steps in a folder, with a fixed date."""
    return KnownDevices(folder / "deep" / "devices.jsonl", today=lambda: "2030-12-31")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownDevices:
    """Return an empty store of measured steps, with fixed versions."""
    for module in (budget, verification):
        monkeypatch.setattr(
            module, "versions_here", lambda *, on_cpu: {**VERSIONS, "driver": None} if on_cpu else VERSIONS
        )
    return known_devices(tmp_path)


def on_this_cpu() -> tuple[Plan, Verification]:
    """Return a plan for this CPU, and the verification of its step."""
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 4096, name="net", proposals=False)
    return plan, verify(SPEC, plan.baseline, "cpu")


def test_sizes_are_found_again(tmp_path: Path) -> None:
    """Another process finds a stored size under exactly the same circumstances; the last one counts."""
    assert known_sizes(tmp_path).find(HERE) is None
    assert known_sizes(tmp_path).keep(HERE, 8, 2000.0)
    assert known_sizes(tmp_path).keep(HERE, 16, 1.0)
    assert known_sizes(tmp_path).find(HERE) == FOUND
    for name in HERE:
        assert known_sizes(tmp_path).find({**HERE, name: "other"}) is None
        assert known_sizes(tmp_path).find({key: value for key, value in HERE.items() if key != name}) is None
    assert known_sizes(tmp_path).find({**HERE, "more": 1}) is None
    assert len(known_sizes(tmp_path).path.read_text().splitlines()) == 1
    assert [one.name for one in known_sizes(tmp_path).path.parent.iterdir()] == ["sizes.jsonl"]


def test_steps_are_found_again(tmp_path: Path) -> None:
    """Another process finds a stored step; the last one for the same subject and device replaces earlier ones."""
    assert known_devices(tmp_path).steps() == ((), "")
    other = dataclasses.replace(STEP, subject="digits in fp32")
    again = dataclasses.replace(STEP, measured_bytes=1100, date="2031-01-01")
    for step in (STEP, other, again):
        assert known_devices(tmp_path).keep(step)

    assert known_devices(tmp_path).steps() == ((other, again), "")
    assert again.excess == pytest.approx(0.1)


LINE = dataclasses.asdict(STEP)
HOSTILE: dict[str, Any] = {
    "a terminal's commands": {**LINE, "subject": "\x1b[2Jgpt2"},
    "a long name": {**LINE, "device": "a" * 1000},
    "nothing planned": {**LINE, "planned_bytes": 0},
    "a truth": {**LINE, "measured_bytes": True},
    "a fraction": {**LINE, "measured_bytes": 1000.5},
    "not a number": {**LINE, "measured_bytes": float("nan")},
    "a very large number": {**LINE, "measured_bytes": 10**400},
    "a thousand times what was planned": {**LINE, "measured_bytes": 10**6},
    "a context of everything": {**LINE, "outside_bytes": 79 * 2**30},
    "versions of another kind": {**LINE, "versions": ["2.13.0"]},
    "a version that is no text": {**LINE, "versions": {"torch": 2}},
    "one field less": {name: value for name, value in LINE.items() if name != "date"},
    "one field more": {**LINE, "command": "rm"},
    "no record": [1, 2],
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_makes_no_sense_is_refused(tmp_path: Path, line: object) -> None:
    """An implausible line is ignored, with a message; the next line still counts."""
    known = known_devices(tmp_path)
    known.keep(STEP)
    known.path.write_text(f"{json.dumps(line)}\n{known.path.read_text()}")

    found, refused = known.steps()

    assert found == (STEP,)
    assert str(known.path) in refused
    assert refused.isprintable()


DAMAGE = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"null", b"[]", b"{}", b'{"size": 1}', b'{"circumstances": {}}', b"[" * 100_000, b"\xff\xfe"]),
    st.builds(
        lambda size: json.dumps({"circumstances": HERE, "size": size, "samples_per_second": 1, "date": "x"}).encode(),
        st.sampled_from([0, -3, None, "16", 1.5, True, [16]]),
    ),
)


@pytest.mark.slow
@given(damage=DAMAGE, cut=st.integers(0, 300))
def test_damage_is_passed_over(tmp_path_factory: pytest.TempPathFactory, damage: bytes, cut: int) -> None:
    """With any content in the files nothing raises, nothing wrong is found, and new measurements can be stored."""
    folder = tmp_path_factory.mktemp("known")
    sizes, devices = known_sizes(folder), known_devices(folder)
    sizes.keep(HERE, 16, 1.0)
    devices.keep(STEP)
    for path in (sizes.path, devices.path):
        whole = path.read_bytes()
        for content in (damage, whole[:cut], whole + damage, damage + b"\n" + whole):
            path.write_bytes(content)
            assert sizes.find(HERE) in (None, FOUND)
            assert devices.steps()[0] in ((), (STEP,))
            assert sizes.keep(HERE, 16, 1.0)
            assert devices.keep(STEP)
            assert (sizes.find(HERE), devices.steps()) == (FOUND, ((STEP,), ""))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """With a folder, a pipe, a very large file or an unwritable path, nothing is found and storing returns False."""
    (tmp_path / "deep" / "devices.jsonl").mkdir(parents=True)
    assert "not a file" in known_devices(tmp_path).steps()[1]
    assert not known_devices(tmp_path).keep(STEP)
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["devices.jsonl"]

    large = KnownDevices(tmp_path / "large")
    large.path.write_bytes(b" " * (MOST_BYTES + 1))
    assert large.steps()[0] == ()
    assert "of at most" in large.steps()[1]
    assert not KnownSizes(tmp_path / "large" / "sizes.jsonl").keep(HERE, 16, 1.0)
    assert KnownSizes(tmp_path / "large" / "sizes.jsonl").find(HERE) is None
    if hasattr(os, "mkfifo"):  # a pipe is not waited for, although it has no writer
        os.mkfifo(tmp_path / "pipe")
        assert "not a file" in KnownDevices(tmp_path / "pipe").steps()[1]


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The oldest lines are dropped."""
    known = known_sizes(tmp_path)
    known.keep(HERE, 16, 1.0)
    line = {"size": 1, "samples_per_second": 1, "date": "x"}
    lines = [json.dumps({"circumstances": {"share": n}, **line}) for n in range(MOST_LINES + 5)]
    known.path.write_text(known.path.read_text() + "\n".join(lines) + "\n")
    known.keep({**HERE, "share": 1}, 4, 1.0)

    assert len(known.path.read_text().splitlines()) == MOST_LINES
    assert known.find(HERE) is None
    assert known.find({"share": MOST_LINES}) is not None


def test_the_users_own_place() -> None:
    """The default paths are in the user's cache folder, which tests redirect."""
    paths = [KnownDevices().path, KnownSizes().path]

    assert [path.parent.name for path in paths] == ["anybatch"] * 2
    assert paths[0] != paths[1]
    if sys.platform == "linux":
        assert all(path.is_relative_to(os.environ["XDG_CACHE_HOME"]) for path in paths)


def test_ten_percent_of_what_is_taken_stays_free() -> None:
    """The headroom after a plan that was too low leaves 10% of the real memory free; after an exact plan, 10%."""
    assert measured_headroom(0.0) == pytest.approx(MEASURED_HEADROOM)
    for excess in (0.01, 0.05, 0.5):
        planned = 1.0 - measured_headroom(excess)
        assert planned * (1.0 + excess) == pytest.approx(1.0 - MEASURED_HEADROOM)


@pytest.mark.slow
def test_the_next_plan_uses_it(known: KnownDevices) -> None:
    """After a step was measured on this CPU, the next plan keeps 10% free, allows a larger size, and says why."""
    plan, found = on_this_cpu()
    assert measured_of("cpu:1MiB", "net", "fp32", known) == DeviceMeasurements()

    assert str(known.path) in keep(found, plan, known)
    after = measured_of("cpu:1MiB", "net", "fp32", known)
    again = make_plan(SPEC, budget_of("cpu:1MiB", measured=after), 4096, name="net", proposals=False)

    assert after == measured_of(torch.device("cpu"), "net", "fp32", known)
    assert after.headroom == pytest.approx(MEASURED_HEADROOM, abs=0.01)
    assert again.baseline.largest > plan.baseline.largest
    assert "note: measured on 2030-12-31 with torch 2.13.0: headroom 10%" in str(again)
    assert "10% is kept free (as measured on 2030-12-31 with torch 2.13.0)" in str(again)
    assert "15% is kept free (nothing has been measured on it yet)" in str(plan)
    assert measured_of("1MiB", "net", "fp32", known) == DeviceMeasurements(), "a CPU is no card"


def test_a_headroom_that_is_named_is_taken(known: KnownDevices) -> None:
    """An explicit headroom overrides measurements and is reported as requested."""
    known.keep(STEP)
    found = budget_of("H100", headroom=0.3, measured=measured_of("H100", "gpt2", "bf16", known))

    assert (found.headroom, found.why, found.outside_bytes) == (0.3, "as asked", CONTEXT_BYTES)


@pytest.mark.parametrize(
    ("device", "counts"),
    [("H100", True), ("NVIDIA H100 80GB HBM3", True), ("24GiB", True), (24 * 2**30, True), ("H200", False)],
)
def test_on_which_device(known: KnownDevices, device: str | int, counts: bool) -> None:
    """A step counts for its own device, and for a budget of the same size, except a CPU's."""
    known.keep(STEP)

    assert (measured_of(device, "gpt2", "bf16", known) != DeviceMeasurements()) is counts
    assert measured_of("cpu:24GiB", "net", "fp32", known).outside_bytes is None


@pytest.mark.parametrize("name", ["torch", "anybatch", "driver"])
def test_another_version_does_not_count(known: KnownDevices, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements with another version of torch, anybatch or the driver are ignored, with a note."""
    known.keep(STEP)
    monkeypatch.setattr(budget, "versions_here", lambda *, on_cpu: {**VERSIONS, name: "9.9"})  # noqa: ARG005

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

    two = budget_of("H100", world_size=2, measured=same)
    assert two.outside_bytes - budget_of("H100", world_size=2).outside_bytes == 400 * MIB - CONTEXT_BYTES


def test_the_larger_gap_is_kept(known: KnownDevices) -> None:
    """The larger of the tensor and allocator errors is stored; planned workspaces are added to both."""
    plan, found = on_this_cpu()
    other = dataclasses.replace(plan.budget, workspace_bytes=100, device=None)
    plan = dataclasses.replace(plan, target=dataclasses.replace(plan.target, budget=other))
    sizes: dict[str, Any] = {"planned_bytes": 1000, "measured_bytes": 1100, "outside_bytes": 300 * MIB}
    reserved: dict[str, Any] = {"planned_reserved_bytes": 2000, "measured_reserved_bytes": 2400}
    found = dataclasses.replace(found, name="cuda: Something", **sizes, **reserved)
    keep(found, plan, known)
    step = known.steps()[0][0]
    assert (step.planned_bytes, step.measured_bytes, step.outside_bytes) == (2100, 2400, 300 * MIB)

    keep(dataclasses.replace(found, outside_bytes=9000 * MIB), plan, known)
    assert known.steps()[0][0].outside_bytes is None, "another program's"


def test_what_is_not_kept(known: KnownDevices) -> None:
    """A step that ran out of memory, ran on another device than planned, or is far off the plan is not stored."""
    plan, found = on_this_cpu()
    h100 = dataclasses.replace(plan.target, budget=budget_of("H100"))

    assert "ran out of memory" in keep(dataclasses.replace(found, too_large=(64,)), plan, known)
    words = keep(dataclasses.replace(found, name="cuda: Tesla T4"), dataclasses.replace(plan, target=h100), known)
    assert words == "not kept: this device is a Tesla T4, and the plan is for H100"
    assert "more than twice" in keep(dataclasses.replace(found, planned_bytes=1000), plan, known)
    assert known.steps() == ((), "")


def test_a_damaged_file_is_said_in_the_plan(known: KnownDevices) -> None:
    """An unreadable file is ignored, with a note in the plan that names it."""
    known.path.parent.mkdir()
    known.path.write_text("{")
    found = measured_of("cpu:1MiB", "net", "fp32", known)
    plan = make_plan(SPEC, budget_of("cpu:1MiB", measured=found), 512, proposals=False)

    assert found.headroom == HEADROOM
    assert f"note: {known.path} was ignored" in str(plan)


def test_versions_are_those_of_the_programs() -> None:
    """The versions of a CPU measurement include no driver, whose version is printable text."""
    found = versions_here(on_cpu=True)

    assert (found["torch"], found["driver"]) == (torch.__version__, None)
    assert (driver_version() or "none").isprintable()
