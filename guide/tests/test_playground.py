"""A playground run equals a run of the library: the same losses, emitted as log lines."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import anybatch.events
from anybatch_guide.held_out import shown_samples
from anybatch_guide.play import main
from anybatch_guide.playground import PlaygroundSetting, as_python, run
from anybatch_guide.programs import templates
from anybatch_guide.setting import MistakeName
from anybatch_guide.tasks.digits import network
from anybatch_guide.tasks.task import load
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

SCHEMA = json.loads((Path(anybatch.events.__file__).parent / "schema.json").read_text())
SHORT: dict[str, Any] = {"micro_batch_size": 4, "accumulation_steps": 4, "steps": 6}
Line = Mapping[str, Any]


def played(**changes: Any) -> tuple[Mapping[str, Any], list[Line]]:
    """Return the result of a short run, and its lines."""
    lines: list[Line] = []
    return run(PlaygroundSetting(**{**SHORT, **changes}), lines.append), lines


def of_kind(lines: list[Line], kind: str) -> list[Line]:
    """Return the lines of a kind."""
    return [line for line in lines if line["kind"] == kind]


SETTINGS = (
    PlaygroundSetting(**SHORT),
    PlaygroundSetting(**SHORT, task="shapes", norm="batch", optimizer="sgd", learning_rate=0.1, seed=7),
    PlaygroundSetting(**SHORT, task="spirals", precision="bf16"),
    PlaygroundSetting(**SHORT, task="text", mistake="mean_of_means"),
    PlaygroundSetting(**SHORT, task="shapes", norm="batch", norm_policy="ghost", memory_limit_kib=1024),
    PlaygroundSetting(**SHORT, task="shapes", norm="batch", norm_policy="exact"),
    PlaygroundSetting(
        **{**SHORT, "steps": 33}, task="spirals", mistake="drop_tail", optimizer="sgd", learning_rate=0.5
    ),
)
RUN_ALL = """
import json, sys
for text in json.load(sys.stdin):
    print("program")
    try:
        exec(text, {"__name__": "__main__"})
    except SystemExit:
        pass
"""


@pytest.mark.slow
@pytest.mark.published
def test_programs_print_the_same_losses() -> None:
    """The programs of the page print the losses of the runs in another process, bitwise equal."""
    texts = json.dumps([as_python(setting) for setting in SETTINGS])
    done = subprocess.run(  # noqa: S603 (our own programs)
        [sys.executable, "-c", RUN_ALL], input=texts, capture_output=True, text=True, check=False
    )
    printed = [list(map(float, part.split())) for part in done.stdout.split("program\n")[1:]]

    assert done.returncode == 0, done.stderr
    assert printed == [run(setting, lambda _: None)["losses"] for setting in SETTINGS]
    assert list(map(len, printed)) == [setting.steps for setting in SETTINGS]


@pytest.mark.parametrize("mistake", MistakeName.__args__)  # type: ignore[attr-defined]
def test_every_program_is_python(mistake: MistakeName) -> None:
    """Each filled template compiles and has no placeholder left."""
    text = as_python(PlaygroundSetting(mistake=mistake))

    compile(text, "program", "exec")
    assert "$" not in text
    assert set(templates()) == {*MistakeName.__args__, "limit", "ghost", "ghost limit"}  # type: ignore[attr-defined]


def test_a_command_writes_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line prints the losses of the run; an unknown argument exits with status 2."""
    words = ["task=spirals", "steps=3"]
    written: list[str] = []
    status = main(words, written.append)

    assert status == 0
    assert list(map(float, written)) == run(PlaygroundSetting(task="spirals", steps=3), lambda _: None)["losses"]
    assert main(["steps=0"], written.append) == 2
    assert "must be from 1 to 2,000" in capsys.readouterr().err


@pytest.mark.parametrize("mistake", ["", "zero_each"])
def test_lines_follow_the_schema_of_the_log(mistake: MistakeName) -> None:
    """Each line follows the log's schema, for engine and loop, numbered without gaps."""
    data, lines = played(mistake=mistake, task="spirals")
    records = [line for line in lines if not line["kind"].startswith("guide.")]
    validator = jsonschema.Draft202012Validator(SCHEMA)

    assert [line["sequence"] for line in lines] == list(range(len(lines)))
    assert [error.message for line in records for error in validator.iter_errors(line)] == []
    assert [line["kind"] for line in records][:2] == ["start", "micro_batch"]
    assert [line["loss"] for line in of_kind(lines, "step")] == data["losses"]
    assert len(of_kind(lines, "micro_batch")) == 2 * 4 * 6
    assert records[-1]["status"] == "completed"
    assert records[-1]["digest"] == data["digest"]


@pytest.mark.slow
def test_the_engine_matches_the_native_batch() -> None:
    """After each step, the parameters equal the unsplit batch, up to rounding."""
    data, lines = played(task="spirals")
    emitted = [line["relative_difference"] for line in of_kind(lines, "guide.match")]

    assert emitted == data["relative_differences"]
    assert 0 < max(emitted) < 1e-5
    assert played(task="spirals", accumulation_steps=1)[0]["relative_differences"] == [0.0] * 6


@pytest.mark.slow
def test_memory_is_reported_by_category() -> None:
    """A step holds all categories; its peak is the maximum over its phases."""
    data, lines = played()
    parts = of_kind(lines, "guide.memory")
    highest = max(parts, key=lambda line: sum(line["category_bytes"].values()))
    weights = sum(parameter.nbytes for parameter in network().parameters())

    assert highest["category_bytes"] == data["peak"]
    assert data["peak_bytes"] == sum(data["peak"].values())
    assert (data["peak"]["weights"], data["peak"]["gradients"]) == (weights, weights)
    assert {line["position"] for line in parts} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize("mistake", ["", "no_division"])
@pytest.mark.slow
def test_a_diverged_run_is_a_result(mistake: MistakeName) -> None:
    """A loss that is not finite ends the run as failed, with its value, without an exception, and as valid JSON."""
    data, lines = played(task="shapes", norm="none", optimizer="sgd", learning_rate=10.0, steps=60, mistake=mistake)
    end = lines[-1]

    assert (end["kind"], end["status"]) == ("end", "failed")
    assert "not" in end["message"] or "nan" in end["message"] or "inf" in end["message"]
    assert data["num_steps"] < 60
    assert json.loads(json.dumps([data, lines], allow_nan=False))


class Stopped(BaseException):
    """An exception that ends a run from outside."""


def stop_after_twenty() -> Callable[[Line], None]:
    """Return an `emit` that ends a run in the middle of a step."""
    lines: list[Line] = []

    def emit(line: Line) -> None:
        lines.append(line)
        if len(lines) == 20:
            raise Stopped

    return emit


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({}, 0.0, 1e-5),
        ({"mistake": "no_division"}, 2.999, 3.001),
        ({"mistake": "zero_each"}, 0.1, 1.0),
        ({"task": "shapes", "norm": "batch"}, 0.02, 1.0),
        ({"task": "shapes", "norm": "batch", "norm_policy": "exact"}, 0.0, 1e-5),
        ({"task": "shapes", "norm": "batch", "norm_policy": "freeze"}, 0.02, 2.0),
        ({"task": "shapes", "norm": "group"}, 0.0, 1e-5),
    ],
)
def test_a_run_compares_its_first_update(changes: Mapping[str, Any], least: float, most: float) -> None:
    """A correct split makes the native batch's first update; four undivided parts make four times that update."""
    data, lines = played(**changes, steps=1)
    (told,) = of_kind(lines, "guide.first_update")

    assert least <= data["first_update_difference"] <= most
    assert told["relative_difference"] == data["first_update_difference"]


def test_a_long_run_shows_every_second_gradient_and_the_last() -> None:
    """Of 102 steps, every second one and the last one have the gradient of their micro-batches."""
    _, lines = played(task="spirals", micro_batch_size=1, accumulation_steps=1, steps=102)

    shown = {line["step"] for line in of_kind(lines, "guide.micro_batch")}
    assert shown == {*range(0, 102, 2), 101}


@pytest.mark.slow
def test_the_native_batch_is_shown_before_each_step() -> None:
    """The native losses are equal to an unsplit run, and its gradient is the sum of the micro-batches' gradients."""
    data, lines = played(steps=3)
    natives = of_kind(lines, "guide.native")
    sums = {
        line["step"]: line["sum"]
        for line in of_kind(lines, "guide.micro_batch")
        if line["position"] == 3  # the last
    }
    kinds = [line["kind"] for line in lines if line["kind"] in ("guide.native", "step")]

    assert kinds == ["guide.native", "step"] * 3
    assert data["native_losses"] == played(micro_batch_size=16, accumulation_steps=1, steps=3)[0]["losses"]
    assert [line["loss"] for line in natives] == data["native_losses"]
    for line in natives:
        assert sums[line["step"]] == pytest.approx(line["gradient"], rel=2e-3, abs=1e-5)


def test_undivided_gradients_exceed_the_native_one() -> None:
    """Without division, the sum of four micro-batches is four times the native gradient in the first step."""
    _, lines = played(steps=1, mistake="no_division")
    (native,) = of_kind(lines, "guide.native")
    total = of_kind(lines, "guide.micro_batch")[-1]["sum"]

    assert total == pytest.approx([4 * number for number in native["gradient"]], rel=2e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "least"), [("digits", 0.6), ("spirals", 0.5), ("text", 0.1)])
def test_accuracy_is_that_of_the_network(task: Any, least: float) -> None:
    """Evaluations start before the first update, end at the accuracy of the native batch, and rise."""
    setting = PlaygroundSetting(task=task, steps=30)
    data = run(setting, lambda _: None)
    evaluations = data["evaluations"]

    assert [evaluation["updates"] for evaluation in evaluations] == list(range(31))
    assert evaluations[-1]["accuracy"] == evaluations[-1]["native_accuracy"] > least
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]


def test_answers_match_the_shown_samples() -> None:
    """Images have a character each; sentences have a line each, as long as the sentence without its end."""
    digits, text = (shown_samples(load(name)) for name in ("digits", "text"))
    answered = played(steps=1)[0]["evaluations"][0]["answers"]

    assert digits["answers"] == "".join(str(label) for label in load("digits").held_out.targets[:32].tolist())
    assert len(answered) == 32
    assert text["answers"].split("\n") == text["samples"]["values"]


@pytest.mark.parametrize("policy", ["keep", "exact", "ghost", "freeze"])
def test_every_norm_policy_is_evaluated(policy: Any) -> None:
    """The engine changes BatchNorm, and the accuracy is still computed."""
    data, _ = played(task="shapes", norm="batch", norm_policy=policy, steps=2)

    assert all(0 <= evaluation["accuracy"] <= 1 for evaluation in data["evaluations"])
    assert len(data["evaluations"]) == 3
