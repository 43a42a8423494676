"""Forecasts from the command line: from given numbers, or from a recipe timed on this machine."""

import argparse
import json
from pathlib import Path

import pytest

from anybatch.cli.forecast_options import add_forecast_options, run_forecast
from anybatch.cli.parser import Parser, add_recipe
from anybatch.cli.status import Status
from anybatch.errors import UserError
from tests.cli.small import SPEC

GIVEN = "--micro-batch-seconds 0.15 --micro-batch-size 32 --gradient-bytes 102MB"


def parsed(words: str) -> argparse.Namespace:
    """Return the options of a verb that has a recipe and these."""
    parser = Parser("scale", "Scale.")
    add_recipe(parser, None, "none")
    add_forecast_options(parser)
    return parser.parse(words.split())


def test_from_given_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table goes up to the requested ranks, JSON has the same rows, and weak scaling lets the batch grow."""
    out = tmp_path / "forecast.json"
    words = f"--forecast 1024 --link 400Gbit,5us --inner-link 150GB/s,2us --devices-per-host 8 {GIVEN} --json {out}"
    assert run_forecast(parsed(f"{words} --effective-batch-size 8192")) == Status.DONE
    printed = capsys.readouterr().out
    strong = json.loads(out.read_text())

    assert "effective batch of 8,192 samples (strong scaling)" in printed
    assert "largest useful world" in printed
    assert printed.splitlines()[-1] == f"wrote {out}"
    assert [row["world_size"] for row in strong["rows"]] == [2**power for power in range(11)]
    assert {row["num_samples"] for row in strong["rows"]} == {8192}
    assert strong["workload"]["gradient_bytes"] == 102_000_000

    assert (
        run_forecast(parsed(f"{words} --effective-batch-size 8192 --weak-scaling --accumulation-steps 4"))
        == Status.DONE
    )
    weak = json.loads(out.read_text())
    assert weak["rows"][-1]["num_samples"] == 1024 * 4 * 32
    assert "weak scaling" in capsys.readouterr().out


@pytest.mark.slow
def test_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe is timed on this machine, its gradients are counted, and the picture is written."""
    picture = tmp_path / "forecast.png"
    words = f"{SPEC} --forecast 8 --link 1Gbit,1ms --micro-batch-size 4 --effective-batch-size 16 --figure {picture}"
    assert run_forecast(parsed(words)) == Status.DONE

    printed = capsys.readouterr().out
    assert printed.startswith(f"{SPEC}: forecast from times of one rank")
    assert "328 bytes of gradients" in printed  # (3 x 8 + 8 + 8 + 1) float64
    assert "4 x 4" in printed
    assert picture.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"--forecast 8 {GIVEN}", "--link 400Gbit,5us"),
        ("--forecast 8 --link 1Gbit,1ms", "pass a recipe"),
        ("--forecast 8 --link 1Gbit,1ms --micro-batch-seconds 0.1", "--gradient-bytes"),
        (f"--forecast 8 --link 1Gbit,1ms {GIVEN} --fixed-seconds 0.2", "--fixed-seconds 0.2"),
        (f"--forecast 8 --link 1Gbit,1ms {GIVEN} --devices-per-host 8", "--inner-link"),
        (f"--forecast 1 --link 1Gbit,1ms {GIVEN}", "world_size=1"),
    ],
)
def test_what_is_missing(words: str, said: str) -> None:
    """The error names each missing option of a forecast, with an example."""
    with pytest.raises(UserError, match=said):
        run_forecast(parsed(words))


def test_a_wrong_link(capsys: pytest.CaptureFixture[str]) -> None:
    """An unreadable link is reported with the right notation."""
    with pytest.raises(SystemExit):
        parsed("--forecast 8 --link 10")
    assert "'10' is not a link" in capsys.readouterr().err


def test_options_that_a_verb_has_already() -> None:
    """Forecast options that a command already has can be left out."""
    parser = Parser("scale", "Scale.")
    parser.add_argument("--figure", type=Path)
    add_forecast_options(parser, without=["--figure"])
    assert parser.parse(["--figure", "a.png"]).figure == Path("a.png")
