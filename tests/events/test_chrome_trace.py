"""`anybatch trace` writes the spans of a log as Chrome trace events for Perfetto."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.records import PhaseRecord, ReductionRecord
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs, write_chrome_trace
from anybatch.events.jsonl import JsonlLog
from tests.events.recorded_run import end, start, step
from tests.raising import raises


def log(path: Path, rank: int, *, zero: float = 100.0, steps: int = 3) -> None:
    """Write the log of a rank with one step a second, whose phase and reduction overlap."""
    times = iter(
        [zero]
        + [zero + number + part for number in range(steps) for part in (0.1, 0.2, 0.5, 0.6, 0.9)]
        + [zero + steps]
    )
    with JsonlLog(path, clock=lambda: next(times)) as observer:
        observer.observe(start(rank=rank))
        for number in range(steps):
            phase = PhaseRecord(rank=rank, event="begin", step=number, name="reduce", position=None)
            reduction = ReductionRecord(
                rank=rank,
                event="begin",
                step=number,
                bucket=0,
                collective="all_reduce",
                payload="gradients",
                num_bytes=4,
                dtype="float32",
            )
            for record in (phase, reduction, replace(phase, event="end"), replace(reduction, event="end")):
                observer.observe(record)
            observer.observe(step(number, float("nan"), rank=rank))
        observer.observe(end(steps, rank=rank))


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, parsed as strict JSON."""

    def refuse(word: str) -> float:
        raise AssertionError(word)

    return list(json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)["traceEvents"])


def test_spans_match_the_log(tmp_path: Path) -> None:
    """Each phase is a slice and each reduction an asynchronous pair, in microseconds from the start of the log."""
    log(tmp_path / "events.jsonl", 0)
    log(tmp_path / "events-rank-1.jsonl", 1)
    report = write_chrome_trace(rank_logs(tmp_path), tmp_path / "trace.json")
    found = events(tmp_path / "trace.json")

    assert (report.num_ranks, report.num_steps, report.num_events, report.shifted) == (2, 3, len(found), ())
    for rank in (0, 1):
        own = [one for one in found if one["pid"] == rank]
        slices = [(one["name"], one["args"]["step"], one["ts"], one["dur"]) for one in own if one["ph"] == "X"]
        assert slices == [("reduce", step, pytest.approx(step * 1e6 + 1e5), 4e5) for step in range(3)]
        sums = [(one["ph"], one["ts"]) for one in own if one["ph"] in "be"]
        assert sums == [pair for step in range(3) for pair in (("b", step * 1e6 + 2e5), ("e", step * 1e6 + 6e5))]
        assert {one["id"] for one in own if one["ph"] == "b"} == {one["id"] for one in own if one["ph"] == "e"}
        assert {one["args"]["name"] for one in own if one["ph"] == "M" and one["name"] == "process_name"} == {
            f"rank {rank}"
        }
        assert [one["name"] for one in own if one["ph"] == "i"] == ["start", "end"]
    assert min(one["ts"] for one in found if "ts" in one) == 0


def test_ranks_of_other_machines_are_aligned(tmp_path: Path) -> None:
    """A rank with another clock origin is shifted so that its steps align with rank 0's, and reported."""
    log(tmp_path / "events.jsonl", 0)
    log(tmp_path / "events-rank-1.jsonl", 1, zero=77_000.0)
    report = write_chrome_trace(rank_logs(tmp_path), tmp_path / "trace.json")
    starts = {
        rank: [one["ts"] for one in events(tmp_path / "trace.json") if one["pid"] == rank and one["ph"] == "X"]
        for rank in (0, 1)
    }

    assert report.shifted == (1,)
    assert starts[1] == pytest.approx(starts[0])


def test_a_run_resumed_after_a_reboot(tmp_path: Path) -> None:
    """If a resumed run's clock restarts lower, its time continues from the last event."""
    for zero in (5_000.0, 10.0):
        log(tmp_path / "events.jsonl", 0, zero=zero)
    write_chrome_trace(rank_logs(tmp_path), tmp_path / "trace.json")
    times = [one["ts"] for one in events(tmp_path / "trace.json") if one["ph"] == "X"]

    assert times == sorted(times)
    assert times[3] == pytest.approx(3e6 + 1e5)


def test_hostile_lines_are_skipped(tmp_path: Path) -> None:
    """Invalid lines and lines without a finite time are counted and skipped; the trace is valid JSON."""
    path = tmp_path / "events.jsonl"
    log(path, 0)
    with path.open("ab") as file:
        file.write(b'nothing\n{"version":1,"kind":"step","step":1}\n{"version":1,"time_seconds":1e999,"kind":"end"}\n')
        file.write(b'{"version":1,"time_seconds":104,"kind":"diagnosis","step":1,"message":NaN}\n')
        file.write(b'{"version":1,"time_seconds":104,"kind":"phase","event":"end","step":1,"name":[1],"position":{}}\n')
        file.write(b'{"version":1,"time_seconds":104,"kind":[1],"step":1}\n')
    report = write_chrome_trace(rank_logs(path), tmp_path / "trace.json")

    assert report.num_skipped == 3
    assert len(events(tmp_path / "trace.json")) == report.num_events


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch trace RUN` writes the requested steps, from time 0 on, next to the log; without any it raises."""
    log(tmp_path / "events.jsonl", 0, steps=9)
    assert main(["trace", str(tmp_path), "--first-step", "3", "--last-step", "4"]) == Status.DONE
    found = events(tmp_path / "trace.json")
    said = f"wrote {tmp_path / 'trace.json'}: 2 steps, 1 rank, {len(found)} events\n"
    assert capsys.readouterr().out == said
    slices = [(one["args"]["step"], one["ts"]) for one in found if one["ph"] == "X"]
    assert slices == [(3, 0.0), (4, pytest.approx(1e6))]
    with raises(UserError, "no_steps"):
        write_chrome_trace(rank_logs(tmp_path), tmp_path / "other.json", first_step=17)
    assert not (tmp_path / "other.json").exists()
    assert main(["trace", str(tmp_path / "none")]) == Status.USAGE
