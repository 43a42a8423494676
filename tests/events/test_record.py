"""`ab.record` logs any training loop, so that `anybatch watch` shows it like a run of the engine."""

from pathlib import Path

import pytest
import torch

import anybatch as ab
from anybatch.errors import UserError
from anybatch.events.jsonl import read_jsonl


def test_a_loop_is_logged(tmp_path: Path) -> None:
    """The log has the settings, each step with its loss and metrics, and the end."""
    with ab.record(tmp_path / "mine", learning_rate=0.1, model="linear") as run:
        run.step(torch.tensor(2.0), num_samples=8, learning_rate=0.1, accuracy=0.5)
        run.step(float("nan"), num_samples=4, gradient_norm=3.0)
    start, *steps, end = read_jsonl(tmp_path / "mine" / "events.jsonl")

    assert (start["kind"], start["first_step"]) == ("start", 0)
    assert start["decisions"] == {"learning_rate": "0.1", "model": "linear"}
    assert [line["kind"] for line in steps] == ["step", "evaluate", "step"]
    assert [(line["step"], line["num_samples"]) for line in steps] == [(0, 8), (1, 8), (1, 4)]
    assert (steps[0]["loss"], steps[0]["learning_rates"], steps[1]["metrics"]) == (2.0, [0.1], {"accuracy": 0.5})
    assert (steps[2]["loss"], steps[2]["gradient_norm"]) == ("NaN", 3.0)
    assert (end["kind"], end["status"], end["num_steps"]) == ("end", "completed", 2)


def test_sizes_are_those_of_the_engine(tmp_path: Path) -> None:
    """A loop that gives its sizes has a geometry, as a run of the engine; without them it has none."""
    for name, sizes in (("sizes", {"effective_batch_size": 64, "micro_batch_size": 8, "ranks": 2}), ("none", {})):
        with ab.record(tmp_path / name, **sizes) as run:
            run.step(1.0)
    first, other = (next(iter(read_jsonl(tmp_path / name / "events.jsonl"))) for name in ("sizes", "none"))

    assert first["geometry"] == "64 samples = 2 ranks x 4 micro-batches x 8"
    assert (first["effective_batch_size"], first["micro_batch_size"], first["world_size"]) == (64, 8, 2)
    assert (other["geometry"], other["effective_batch_size"]) == ("not recorded", None)
    with (
        pytest.raises(UserError, match="effective_batch_size='64'"),
        ab.record(tmp_path, effective_batch_size="64"),
    ):
        pass


@pytest.mark.parametrize(("error", "status"), [(ValueError("bad"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_an_exception_ends_the_log(tmp_path: Path, error: BaseException, status: str) -> None:
    """An exception is logged as the end of the run, and raised again; a resumed run continues the log."""
    log = tmp_path / "mine.jsonl"

    def train(first_step: int) -> None:
        with ab.record(log, first_step=first_step) as run:
            run.step(1.0)
            raise error

    for first_step in (0, 1):
        with pytest.raises(type(error)):
            train(first_step)
    lines = list(read_jsonl(log))

    assert [line["kind"] for line in lines] == ["start", "step", "end"] * 2
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 1]
    assert (lines[-1]["status"], lines[-1]["num_steps"]) == (status, 2)
    assert [line["sequence"] for line in lines] == list(range(6))
