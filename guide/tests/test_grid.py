"""The recorded grid for pages without an engine: small and reproducible."""

from typing import Any

import pytest

from anybatch_guide import grid
from anybatch_guide.exercises.exercise import EXERCISES, described
from anybatch_guide.playground import as_command, as_python, parse_setting
from anybatch_guide.programs import templates
from anybatch_guide.recording import plain
from guide.tests.recorded_again import differences, recording
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

TASKS = ("opening", "digits", "spirals", "shapes", "text")


def runs(name: str) -> list[dict[str, Any]]:
    """Return the recorded runs of a task."""
    found: list[dict[str, Any]] = recording(f"playground_{name}")["data"]["runs"]
    return found


@pytest.mark.parametrize("name", TASKS)
def test_the_grid_matches_the_code(name: str) -> None:
    """Recorded settings equal the settings in the code, each once, and all are valid."""
    settings = [parse_setting(run["setting"]) for run in runs(name)]

    assert settings == getattr(grid, f"{name}_settings")()
    assert len(set(settings)) == len(settings)
    for run, setting in zip(runs(name), settings, strict=True):
        assert len(run["losses"]) == setting.steps or run["status"] == "failed"


def test_gradients_fill_up_in_the_first_steps() -> None:
    """The first steps have a sum over ranks after each micro-batch, later steps the last one, all to one scale."""
    sums = {0: [[1.0, 0.0], [2.0, -4.0]], 1: [[1.0, 0.0], [0.0, 2.0], [0.0, 2.0]]}
    lines: list[dict[str, Any]] = []
    for step in range(grid.NUM_FILLED_STEPS + 1):
        lines += [{"kind": "guide.native", "step": step, "gradient": [2.0, -2.0]}]
        lines += [
            {"kind": "guide.micro_batch", "step": step, "rank": rank, "position": position, "sum": numbers}
            for rank, of_rank in sums.items()
            for position, numbers in enumerate(of_rank)
        ]
    filled = [grid.levels(numbers, 2.0) for numbers in ([2.0, 0.0], [2.0, -2.0], [2.0, -2.0])]
    native = grid.levels([2.0, -2.0], 2.0)
    expected = [(step, filled, native) for step in range(grid.NUM_FILLED_STEPS)]

    assert grid.gradients(lines) == [*expected, (grid.NUM_FILLED_STEPS, filled[-1:], native)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), [("spirals", 1), ("shapes", 4)])
def test_a_run_is_reproduced(name: str, at: int) -> None:
    """A new run of a recorded setting has the recorded numbers."""
    recorded = runs(name)[at]
    setting = parse_setting(recorded["setting"])
    found = plain(grid.record_run(setting, lambda _: None))

    assert differences(recorded, found, tolerance=1e-3, noisy=grid.NOISY) == []


@pytest.mark.parametrize("name", TASKS)
def test_recordings_have_no_speeds(name: str) -> None:
    """Runs were not interleaved, so their speeds cannot be compared; losses of the native batch and accuracies can."""
    for run in runs(name):
        assert "samples_per_second" not in run
        assert len(run["native_losses"]) >= len(run["losses"])
        assert run["evaluated"][0] == 0
        assert len(run["accuracies"]) == len(run["answers"]) == len(run["evaluated"])


def test_programs_of_the_page_match_the_code() -> None:
    """The templates and examples of the page equal the output of the code."""
    data = recording("playground_opening")["data"]
    examples = [(parse_setting(one["setting"]), one["python"], one["command"]) for one in data["examples"]]

    assert data["programs"] == templates()
    assert all((as_python(setting), as_command(setting)) == (python, command) for setting, python, command in examples)


@pytest.mark.slow
@pytest.mark.published
def test_bugs_match_the_answers() -> None:
    """The checker finds the expected bug in each of the six loops, and the wrong lines exist."""
    recorded = recording("exercises_loops")["data"]["loops"]
    found = [plain(described(exercise)) for exercise in EXERCISES]

    assert found == recorded
    for exercise, one in zip(EXERCISES, found, strict=True):
        assert exercise.finding in {finding["code"] for finding in one["findings"]}
        assert one["wrong"]
        assert set(one["wrong"]) <= set(range(1, len(one["lines"]) + 1))
