"""The report of a scaling measurement: table, verdict, JSON and picture."""

import json
from pathlib import Path

from anybatch.cli.command import plain
from anybatch.diagnostics.figures import draw_scaling
from anybatch.diagnostics.scale import ScaleReport
from anybatch.diagnostics.scaling_evidence import causes_of, evidence_of
from anybatch.diagnostics.scaling_ranks import RunSettings
from tests.diagnostics.scaling.made_times import rank_times

SETTINGS = RunSettings(bucket_bytes=1000)


def made(num_cores: int = 8, **changed: float) -> ScaleReport:
    """Return the report of two ranks that differ from healthy ones."""
    evidence = evidence_of([rank_times(rank, **changed) for rank in range(2)])
    causes = causes_of(evidence, SETTINGS, num_cores)
    return ScaleReport(measured=evidence, causes=causes, settings=SETTINGS, num_cores=num_cores)


def test_the_report(tmp_path: Path) -> None:
    """A healthy run keeps its bucket size; the first cause of another is the bottleneck, with its fix."""
    healthy, report = str(made()), made(waiting=0.15)
    (whole,) = [line.split() for line in healthy.splitlines() if "whole step" in line]
    assert whole == ["whole", "step", "204.0", "114.0"]
    assert "no bottleneck" in healthy
    assert "<- in use, recommended" in healthy

    lines = str(report).splitlines()
    named = next(number for number, line in enumerate(lines) if line.startswith("bottleneck: slow_loader, 57%"))
    assert "num_workers=2 instead of 0. Predicted: 114.0 ms per step, 57% less." in lines[named + 1]

    read = json.loads(json.dumps(plain(report)))
    assert read["causes"][0]["code"] == "slow_loader"
    assert read["evidence"]["2"]["parts"]["world_size"] == 2
    draw_scaling(report, tmp_path / "scale.svg")
    assert "exposed communication" in (tmp_path / "scale.svg").read_text()
