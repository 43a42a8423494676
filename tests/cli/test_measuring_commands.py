"""`anybatch check`, `tune` and `scale`: exact recipes, tables, pictures, logs and forecasts."""

import json
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.cli.small import SPEC
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")

WRONG = """
import torch
import anybatch as ab


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch), 2 * batch, reduction="sum")


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""


@pytest.mark.slow
def test_recipes_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in recipe is exact in every cut, and the exit status is 0."""
    status = main(["check", "digits", "--samples", "5", "--micro-batch-size", "2"])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "2 x 2 + 1" in printed
    assert "verdict: exact" in printed


@pytest.mark.slow
def test_wrong_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sum declared as a mean is reported with a separate exit status, the reason and a picture."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG, encoding="utf-8")
    picture = tmp_path / "errors.svg"

    status = main(["check", str(file), "--samples", "6", "--figure", str(picture)])

    printed = capsys.readouterr().out
    assert status == Status.NOT_EXACT
    assert "adds up over samples and does not average" in printed
    assert "verdict: not equal" in printed
    assert picture.exists()


@pytest.mark.slow
def test_tune_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The requested sizes are in the table, one is recommended, loading is judged, and the picture is written."""
    picture = tmp_path / "curves.png"
    words = (
        f"{SPEC} --effective-batch-size 20 --micro-batch-size 5 --micro-batch-size 20 --workers 0 --figure {picture}"
    )
    status = main(["tune", *words.split()])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "20 samples per step" in printed
    rows = [line.split()[:2] for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert ["5", "4"] in rows
    assert ["20", "1"] in rows
    assert "recommended: micro_batch_size=" in printed
    assert "loading" in printed.splitlines()[-2]
    assert picture.exists()


GIVEN = "--micro-batch-seconds 0.15 --micro-batch-size 32 --gradient-bytes 102MB"


def scale(words: str) -> int:
    """Run `anybatch scale` and return its exit status."""
    return main(["scale", *words.split()])


@pytest.mark.slow
@pytest.mark.ranks
def test_scale_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has one and two ranks, a bucket size is recommended, and both files are written."""
    picture, found = tmp_path / "scale.png", tmp_path / "scale.json"
    words = f"{SPEC} --micro-batch-size 2 --seconds 1 --bucket 1KiB --figure {picture} --json {found}"
    status = scale(words)

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


def test_from_given_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table goes up to the requested ranks, JSON has the same rows, and weak scaling lets the batch grow."""
    out = tmp_path / "forecast.json"
    words = f"--forecast 1024 --link 400Gbit,5us --inner-link 150GB/s,2us --devices-per-host 8 {GIVEN} --json {out}"
    assert scale(f"{words} --effective-batch-size 8192") == Status.DONE
    printed = capsys.readouterr().out
    strong = json.loads(out.read_text())

    assert "effective batch of 8,192 samples (strong scaling)" in printed
    assert "largest useful world" in printed
    assert printed.splitlines()[-1] == f"wrote {out}"
    assert [row["world_size"] for row in strong["rows"]] == [2**power for power in range(11)]
    assert {row["num_samples"] for row in strong["rows"]} == {8192}
    assert strong["workload"]["gradient_bytes"] == 102_000_000

    assert scale(f"{words} --effective-batch-size 8192 --weak-scaling --accumulation-steps 4") == Status.DONE
    weak = json.loads(out.read_text())
    assert weak["rows"][-1]["num_samples"] == 1024 * 4 * 32
    assert "weak scaling" in capsys.readouterr().out


@pytest.mark.slow
def test_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe is timed on this machine, its gradients are counted, and the picture is written."""
    picture = tmp_path / "forecast.png"
    words = f"{SPEC} --forecast 8 --link 1Gbit,1ms --micro-batch-size 4 --effective-batch-size 16 --figure {picture}"
    assert scale(words) == Status.DONE

    printed = capsys.readouterr().out
    assert printed.startswith(f"{SPEC}: forecast from times of one rank")
    assert "328 bytes of gradients" in printed  # (3 x 8 + 8 + 8 + 1) float64
    assert "4 x 4" in printed
    assert picture.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"--forecast 8 {GIVEN}", "--link 400Gbit,5us"),
        ("--forecast 8 --link 1Gbit,1ms --micro-batch-seconds 0.1", "--gradient-bytes"),
        (f"--forecast 8 --link 1Gbit,1ms {GIVEN} --fixed-seconds 0.2", "--fixed-seconds 0.2"),
        (f"--forecast 8 --link 1Gbit,1ms {GIVEN} --devices-per-host 8", "--inner-link"),
        (f"--forecast 1 --link 1Gbit,1ms {GIVEN}", "world_size=1"),
        ("--forecast 8 --link 10", "'10' is not a link"),
    ],
)
def test_what_is_missing(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names each missing or wrong option of a forecast, with an example."""
    assert scale(words) == Status.USAGE
    assert said in capsys.readouterr().err
