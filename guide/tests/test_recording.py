"""Recordings: complete, with provenance, reproducible, and validated when read."""

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anybatch.errors import UserError
from anybatch_guide.catalogue import experiments, names
from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.experiment import Experiment, made_here
from anybatch_guide.recording import (
    Recording,
    as_recording,
    commit_here,
    differences,
    read_recording,
    record,
    write_recording,
)
from guide.tests.recorded_again import RECORDINGS

pytestmark = pytest.mark.slow

SHORT_SECONDS = 5.0
TESTED_ELSEWHERE = ("claims_", "playground_", "walk_")
"""Name prefixes of experiments that other tests record again."""
SHORT = [
    name
    for name, experiment in experiments().items()
    if experiment.seconds <= SHORT_SECONDS and not name.startswith(TESTED_ELSEWHERE)
]


def small(data: dict[str, Any]) -> Recording:
    """Return a recording with some data."""
    experiment = Experiment(name="small", question="Why?", run=lambda _tell: data, seconds=0.0)
    return as_recording(experiment, data, made_here("small", commit="abc", today=dt.date(2030, 1, 31)))


def test_catalogue_is_complete() -> None:
    """Each recording has its experiment, under its name, and each claim."""
    assert set(names()) == {path.stem for path in RECORDINGS.glob("*.json")}
    assert {f"claims_{name}" for name in CLAIMS} <= set(names())
    assert all("?" in experiment.question for experiment in experiments().values())


def test_file_is_one_line(tmp_path: Path) -> None:
    """A recording is one line of compact JSON with ordered keys and exact floats, and survives a round trip."""
    recording = small({"b": 0.1 + 0.2, "a": [1, None, True, "ü"]})
    file = write_recording(recording, tmp_path)
    text = file.read_text(encoding="utf-8")

    assert (file.name, text.count("\n"), text[-1]) == ("small.json", 1, "\n")
    assert list(json.loads(text)) == ["name", "question", "made", "data"]
    assert list(json.loads(text)["made"]) == ["date", "device", "versions", "commit", "command"]
    assert '"data":{"b":0.30000000000000004,"a":[1,null,true,"ü"]}}' in text
    assert read_recording(file) == recording


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("small.json", "{"),
        ("small.json", "[]"),
        ("small.json", "[" * 100_000),
        ("small.json", '{"name": "small"}'),
        ("small.json", '{"name": "other", "question": "", "made": {MADE}, "data": {}}'),
        ("small.json", '{"name": "small", "question": "", "made": {MADE}, "data": {"loss": NaN}}'),
        ("small.json", '{"name": "small", "question": "", "made": {"shell": "rm"}, "data": {}}'),
        ("Small.json", '{"name": "Small", "question": "", "made": {MADE}, "data": {}}'),
        ("<img src=x>.json", "{}"),
        ("small.py", "{}"),
    ],
)
def test_foreign_files(tmp_path: Path, name: str, text: str) -> None:
    """Invalid recordings, and wrong file names, are refused with a message."""
    made = '{"date": "", "device": "", "versions": {}, "commit": null, "command": ""}'
    file = tmp_path / name
    file.write_text(text.replace("{MADE}", made))

    with pytest.raises(UserError):
        read_recording(file)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1.0}, {"a": 1.0}, 0),
        ({"a": 1.0}, {"a": 1.001}, 1),
        ({"a": [1, {"b": "x"}]}, {"a": [1, {"b": "y"}]}, 1),
        ({"a": [1, 2]}, {"a": [1]}, 1),
        ({"a": 1}, {"b": 1}, 2),
        ({"a": 1}, {"a": "1"}, 1),
        ({"seconds": 1.0}, {"seconds": 2.0}, 0),
        ({"seconds": 1.0}, {}, 1),
    ],
)
def test_differences(one: dict[str, Any], other: dict[str, Any], found: int) -> None:
    """Recordings differ in numbers, texts or names; noisy values only have to exist."""
    assert len(differences(one, other, tolerance=1e-6, noisy=("seconds",))) == found


def test_record(tmp_path: Path) -> None:
    """`record` writes the result of the experiment, with its command; an unknown name is refused."""
    recording = read_recording(record("mathematics", tmp_path))

    assert recording.made.command == "anybatch guide record mathematics"
    assert recording.made.device.endswith("1 threads)")
    assert recording.made.commit == commit_here()
    with pytest.raises(UserError):
        record("nothing", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mathematics.json"]


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with recordings of the short experiments, made by the command in a new process."""
    folder = tmp_path_factory.mktemp("again")
    command = [sys.executable, "-m", "anybatch", "guide", "record", *SHORT, "--to", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)  # noqa: S603 (a fixed program)
    return folder


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.published
def test_recording_is_made_again(name: str, again: Path) -> None:
    """The command in a recording reproduces its numbers, with the same software."""
    made = read_recording(again / f"{name}.json")
    committed = read_recording(RECORDINGS / f"{name}.json")

    assert made.made.command == committed.made.command
    if made.made.versions == committed.made.versions:
        experiment = experiments()[name]
        found = differences(committed.data, made.data, tolerance=experiment.tolerance, noisy=experiment.noisy)
        assert found == [], f"record it again: {committed.made.command}"
