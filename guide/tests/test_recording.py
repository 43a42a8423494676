"""Recordings: complete, with provenance, and reproducible."""

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anybatch_guide.catalogue import experiments
from anybatch_guide.claims.catalogue import CLAIMS
from anybatch_guide.experiment import Experiment, provenance_here
from anybatch_guide.recording import as_recording, write_recording
from guide.tests.recorded_again import RECORDINGS, differences, recording

pytestmark = pytest.mark.slow

SHORT_SECONDS = 5.0
TESTED_ELSEWHERE = ("playground_", "walk_")
"""Name prefixes of experiments that other tests record again."""
SHORT = [
    name
    for name, experiment in experiments().items()
    if experiment.seconds <= SHORT_SECONDS and not name.startswith(TESTED_ELSEWHERE)
]


def small(data: dict[str, Any]) -> dict[str, Any]:
    """Return a recording with the given data."""
    experiment = Experiment(name="small", question="Why?", run=lambda _tell: data, seconds=0.0)
    return as_recording(experiment, data, provenance_here("small", commit="abc", today=dt.date(2030, 1, 31)))


def test_catalogue_is_complete() -> None:
    """Each recording has its experiment, under its name, and each claim."""
    assert set(experiments()) == {path.stem for path in RECORDINGS.glob("*.json")}
    assert {f"claims_{name}" for name in CLAIMS} <= set(experiments())
    assert all("?" in experiment.question for experiment in experiments().values())


def test_file_is_one_line(tmp_path: Path) -> None:
    """A recording is one line of compact JSON with ordered keys and exact floats, and survives a round trip."""
    made = small({"b": 0.1 + 0.2, "a": [1, None, True, "ü"]})
    file = write_recording(made, tmp_path)
    text = file.read_text(encoding="utf-8")

    assert (file.name, text.count("\n"), text[-1]) == ("small.json", 1, "\n")
    assert list(json.loads(text)) == ["name", "question", "made", "data"]
    assert list(json.loads(text)["made"]) == ["date", "device", "versions", "commit", "command"]
    assert '"data":{"b":0.30000000000000004,"a":[1,null,true,"ü"]}}' in text
    assert recording("small", tmp_path) == made


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


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with recordings of the short experiments, made by the command in a new process."""
    folder = tmp_path_factory.mktemp("again")
    command = [sys.executable, "-m", "anybatch", "guide", "record", *SHORT, "--to", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)  # noqa: S603 (a fixed program)
    return folder


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.published
def test_recording_is_reproduced(name: str, again: Path) -> None:
    """The command in a recording reproduces its numbers, with the same software."""
    made, committed = recording(name, again), recording(name)

    assert made["made"]["command"] == committed["made"]["command"]
    if made["made"]["versions"] == committed["made"]["versions"]:
        experiment = experiments()[name]
        found = differences(committed["data"], made["data"], tolerance=experiment.tolerance, noisy=experiment.noisy)
        assert found == [], f"record it again: {committed['made']['command']}"
