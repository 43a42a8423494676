"""The file of measured steps persists between processes, and damage to it never raises."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.cache.cache_file import MOST_BYTES, JsonLinesFile
from anybatch.planner.cache.measured_devices import KnownDevices, MeasuredStep, driver_version

STEP = MeasuredStep(
    device="cuda: NVIDIA H100 80GB HBM3",
    budget_bytes=80 * 2**30,
    subject="gpt2 in bf16",
    planned_bytes=1000,
    measured_bytes=1020,
    outside_bytes=400 * 2**20,
    versions={"torch": "2.13.0", "anybatch": "0.1.0", "driver": "570.1"},
    date="2030-12-31",
)


def known_devices(folder: Path) -> KnownDevices:
    """Return an empty store in a folder."""
    return KnownDevices(folder / "deep" / "devices.jsonl")


def test_found_again(tmp_path: Path) -> None:
    """A stored step is found by another process; the last one for the same subject and device replaces earlier ones."""
    assert known_devices(tmp_path).steps() == ((), "")
    assert known_devices(tmp_path).keep(STEP)
    other = dataclasses.replace(STEP, subject="digits in fp32")
    assert known_devices(tmp_path).keep(other)
    again = dataclasses.replace(STEP, measured_bytes=1100, date="2031-01-01")
    assert known_devices(tmp_path).keep(again)

    assert known_devices(tmp_path).steps() == ((other, again), "")
    assert again.excess == pytest.approx(0.1)


LINE = dataclasses.asdict(STEP)
HOSTILE: dict[str, Any] = {
    "a terminal's commands": {**LINE, "subject": "\x1b[2Jgpt2"},
    "a new line": {**LINE, "device": "a\nb"},
    "a long name": {**LINE, "device": "a" * 1000},
    "no date": {**LINE, "date": "yesterday"},
    "nothing planned": {**LINE, "planned_bytes": 0},
    "less than nothing": {**LINE, "measured_bytes": -1},
    "a truth": {**LINE, "measured_bytes": True},
    "a fraction": {**LINE, "measured_bytes": 1000.5},
    "not a number": {**LINE, "measured_bytes": float("nan")},
    "a very large number": {**LINE, "measured_bytes": 10**400},
    "a thousand times what was planned": {**LINE, "measured_bytes": 10**6},
    "a context of nothing": {**LINE, "outside_bytes": 0},
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
    assert "can be deleted" in refused
    assert refused.isprintable()


@pytest.mark.slow
@given(damage=st.one_of(st.binary(max_size=60), st.just(b"[" * 100_000), st.just(b"\xff\xfe")), cut=st.integers(0, 300))
def test_damage_is_passed_over(tmp_path_factory: pytest.TempPathFactory, damage: bytes, cut: int) -> None:
    """With any content in the file nothing raises, no wrong step is found, and a new step can be stored."""
    known = known_devices(tmp_path_factory.mktemp("known"))
    known.keep(STEP)
    whole = known.path.read_bytes()
    for content in (damage, whole[:cut], whole + damage, damage + b"\n" + whole):
        known.path.write_bytes(content)
        assert known.steps()[0] in ((), (STEP,))
        assert known.keep(STEP)
        assert known.steps() == ((STEP,), "")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """With a folder, a very large file or an unwritable path, reading finds nothing and storing returns False."""
    (tmp_path / "deep" / "devices.jsonl").mkdir(parents=True)
    assert "not a regular file" in known_devices(tmp_path).steps()[1]
    assert not known_devices(tmp_path).keep(STEP)

    large = KnownDevices(tmp_path / "large")
    large.path.write_bytes(b" " * (MOST_BYTES + 1))
    assert large.steps()[0] == ()
    assert "larger than" in large.steps()[1]

    below_a_file = KnownDevices(tmp_path / "large" / "devices.jsonl")
    assert not below_a_file.keep(STEP)
    assert "cannot be read" in below_a_file.steps()[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in its file system")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A named pipe instead of the file is rejected without blocking, even without a writer."""
    os.mkfifo(tmp_path / "pipe")

    lines = JsonLinesFile(tmp_path / "pipe")

    assert lines.read() == []
    assert lines.refused == "it is not a regular file"


def test_the_users_own_place() -> None:
    """The default path is in the user's cache folder, which tests redirect."""
    path = KnownDevices().path

    assert path.parent.name == "anybatch"
    if sys.platform == "linux":
        assert path.is_relative_to(os.environ["XDG_CACHE_HOME"])


def test_the_drivers_version() -> None:
    """The driver's version is printable text, or None without a driver."""
    found = driver_version()

    assert found is None or found.isprintable()
    assert found == driver_version()
