"""The report of a scaling measurement: table, verdict, tried changes, JSON and picture."""

import dataclasses
import json
from pathlib import Path

import pytest

from anybatch.diagnostics.figures import draw_scaling
from anybatch.diagnostics.scale import ScaleReport, TriedChange
from anybatch.diagnostics.scaling_evidence import causes_of, evidence_of
from anybatch.diagnostics.scaling_ranks import RunSettings
from tests.diagnostics.scaling.made_times import rank_times

SETTINGS = RunSettings(bucket_bytes=1000)


def made(num_cores: int = 8, **changed: float) -> ScaleReport:
    """Return the report of two ranks that differ from healthy ones."""
    evidence = evidence_of([rank_times(rank, **changed) for rank in range(2)])
    causes = causes_of(evidence, SETTINGS, num_cores)
    return ScaleReport(evidence={2: evidence}, causes=causes, settings=SETTINGS, num_cores=num_cores)


def test_a_healthy_run() -> None:
    """A healthy run has a table with both numbers of ranks, no bottleneck, and keeps its bucket size."""
    text = str(made())

    assert [line.split() for line in text.splitlines() if "whole step" in line] == [["whole", "step", "204.0", "114.0"]]
    assert "no bottleneck" in text
    assert "<- in use, recommended" in text


def test_a_bottleneck() -> None:
    """The first cause is the bottleneck, with its fix and the predicted step."""
    lines = str(made(waiting=0.15)).splitlines()

    named = next(number for number, line in enumerate(lines) if line.startswith("bottleneck: slow_loader, 57%"))
    assert "num_workers=2 instead of 0. Predicted: 114.0 ms per step, 57% less." in lines[named + 1]


@pytest.mark.parametrize(
    ("after", "verdict"),
    [(0.6, "confirmed."), (0.8, "partly confirmed."), (0.97, "not confirmed."), (1.1, "not confirmed.")],
)
def test_whether_the_gain_came(after: float, verdict: str) -> None:
    """A change is confirmed from 70% of the predicted gain on, and partly confirmed from 30% on."""
    assert str(TriedChange(cause="slow_loader", before=1.0, after=after, predicted=0.6, measured=1.0)).endswith(verdict)


def test_what_is_tried() -> None:
    """The first cause with a setting of the run is tried; without one, the report says that nothing was."""
    found = made(waiting=0.1)
    rank = dataclasses.replace(found.causes[0], code="straggler", settings=None)
    both = dataclasses.replace(found, causes=(rank, *found.causes), applies=True)
    assert both.to_try is found.causes[0]
    assert "tried" not in str(dataclasses.replace(both, applies=False))
    alone = dataclasses.replace(both, causes=(rank,))
    assert alone.to_try is None
    assert "tried: nothing," in str(alone)


def test_json_and_picture(tmp_path: Path) -> None:
    """The report can be written as JSON and drawn."""
    report = dataclasses.replace(
        made(waiting=0.1), tried=TriedChange(cause="slow_loader", before=1, after=0.5, predicted=0.5, measured=1)
    )
    read = json.loads(json.dumps(report.as_json()))

    assert read["causes"][0]["code"] == "slow_loader"
    assert read["evidence"]["2"]["parts"]["world_size"] == 2
    draw_scaling(report, tmp_path / "scale.svg")
    assert "exposed communication" in (tmp_path / "scale.svg").read_text()
