"""`anybatch scale RECIPE`: prints the report of a recipe, writes it as JSON and as a picture, and reads a log."""

import json
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.cli.small import SPEC


@pytest.mark.slow
@pytest.mark.ranks
def test_scale_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has one and two ranks, a bucket size is recommended, and both files are written."""
    picture, found = tmp_path / "scale.png", tmp_path / "scale.json"
    words = f"{SPEC} --micro-batch-size 2 --seconds 1 --bucket 1KiB --figure {picture} --json {found}"
    status = main(["scale", *words.split()])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "1 rank   2 ranks" in printed
    assert "exposed communication" in printed
    assert "bucket" in printed
    assert picture.exists()
    assert json.loads(found.read_text())["evidence"]["2"]["num_samples"] == 8


@pytest.mark.slow
def test_scale_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log of a finished run is read without measuring."""
    run = tmp_path / "run"
    assert main(["train", SPEC, "--micro-batch-size", "2", "--out", str(run)]) == Status.DONE
    capsys.readouterr()

    assert main(["scale", "--log", str(run / "events.jsonl")]) == Status.DONE
    printed = capsys.readouterr().out
    assert "20 steps, 1 rank, the logs of 1" in printed
    assert "whole step" in printed
    assert "bottleneck" in printed
