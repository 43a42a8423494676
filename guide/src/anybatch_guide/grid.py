"""Runs of the playground that are recorded, for a page without an engine: which, and in few bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.playground import PlaygroundSetting, run
from anybatch_guide.programs import as_command, as_python, templates
from anybatch_guide.setting import (
    LIMITS,
    MAX_BYTES,
    MAX_EFFECTIVE,
    MAX_SAMPLES,
    SAMPLE_BYTES,
    MistakeName,
    OptimizerName,
)

NUM_SURFACES = 5
BEGINNINGS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"steps": 40, "adamw": 0.003, "sgd": 0.1, "norm": "none", "classes": 10},
    "spirals": {"steps": 200, "adamw": 0.02, "sgd": 0.5, "norm": "none", "classes": 2},
    "shapes": {"steps": 40, "adamw": 0.003, "sgd": 0.1, "norm": "batch", "classes": 4},
    "text": {"steps": 30, "adamw": 0.01, "sgd": 0.5, "norm": "none", "classes": 256},
}
"""What a task begins with: steps, learning rate by optimizer, norm; and its number of classes."""
_MISTAKES = tuple(name for name in get_args(MistakeName) if name)


def setting_of(
    task: str,
    micro: int,
    accumulation: int,
    optimizer: OptimizerName = "adamw",
    **more: Any,  # noqa: ANN401 (values of any field)
) -> PlaygroundSetting:
    """Return a setting with a task's own beginnings."""
    own = BEGINNINGS[task]
    given = {"norm": own["norm"], "steps": own["steps"], "learning_rate": own[optimizer], **more}
    return PlaygroundSetting(
        task=task,  # type: ignore[arg-type]
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        optimizer=optimizer,
        **given,
    )


def opening() -> list[PlaygroundSetting]:
    """Return what the page holds from the start: digits, 16 x 4 = 64, as it should be and with each mistake."""
    return [setting_of("digits", 16, 4, mistake=mistake) for mistake in ("", *_MISTAKES)]


def digits() -> list[PlaygroundSetting]:
    """Return twelve cuts by two optimizers, and the mistakes at three of them."""
    found = [
        setting_of("digits", micro, accumulation, optimizer)
        for optimizer in get_args(OptimizerName)
        for micro in (1, 4, 16, 64)
        for accumulation in (1, 4, 16)
    ]
    found += [
        setting_of("digits", micro, 4, optimizer, mistake=mistake)
        for optimizer in get_args(OptimizerName)
        for micro in (4, 16, 64)
        for mistake in _MISTAKES
    ]
    # The runs of the opening are in a recording of their own.
    known = opening()
    return [setting for setting in found if setting not in known]


def spirals() -> list[PlaygroundSetting]:
    """Return three cuts of one batch, and two mistakes by each optimizer."""
    cuts = [setting_of("spirals", micro, 64 // micro) for micro in (4, 64)]
    return cuts + [
        setting_of("spirals", 16, 4, optimizer, mistake=mistake)
        for optimizer in get_args(OptimizerName)
        for mistake in ("", "no_division", "zero_each")
    ]


def shapes() -> list[PlaygroundSetting]:
    """Return three norms at three cuts of one batch."""
    return [
        setting_of("shapes", micro, 64 // micro, norm=norm)
        for norm in ("batch", "group", "none")
        for micro in (64, 16, 4)
    ]


def text() -> list[PlaygroundSetting]:
    """Return three cuts of one batch, and the mean of means at two of them."""
    found = [setting_of("text", micro, 64 // micro) for micro in (64, 16, 4)]
    return found + [setting_of("text", micro, 64 // micro, mistake="mean_of_means") for micro in (16, 4)]


def recorded(settings: Sequence[PlaygroundSetting], tell: Tell) -> list[dict[str, Any]]:
    """Run settings one after the other, and return each in few bytes: the setting, columns by step, memory."""
    found = []
    for done, setting in enumerate(settings):
        tell({"kind": "guide.progress", "done": done, "of": len(settings), "what": as_command(setting)})
        found.append(compact(setting, tell))
    return found


def compact(setting: PlaygroundSetting, tell: Tell) -> dict[str, Any]:
    """Run one setting; return its columns with as many digits as a curve can show, and the surfaces of spirals."""
    surfaces: list[Mapping[str, Any]] = []

    def take(line: Mapping[str, Any]) -> None:
        if line["kind"] == "guide.surface":
            surfaces.append({"step": line["step"], "values": line["values"]})
        tell(line)

    data = run(setting, take)
    every = max(1, len(surfaces) // NUM_SURFACES)
    return {
        "setting": asdict(setting),
        "status": data["status"],
        "losses": short(data["losses"], 5),
        "gradient_norms": short(data["gradient_norms"], 4),
        "learning_rates": short(data["learning_rates"], 4),
        "relative_differences": short(data["relative_differences"], 3),
        "peak": data["peak"],
        "samples_per_second": short([data["samples_per_second"]], 3)[0],
        "digest": data["digest"],
        "surfaces": surfaces[every - 1 :: every],
    }


def short(values: Sequence[float | None], digits: int) -> list[float | None]:
    """Return numbers with so many significant digits."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def run_opening(tell: Tell) -> Data:
    """Return the first runs, and all that the page needs to know about settings."""
    examples = [PlaygroundSetting(), setting_of("spirals", 4, 8, "sgd", mistake="clip_each", seed=7)]
    return {
        "runs": recorded(opening(), tell),
        "beginnings": BEGINNINGS,
        "limits": {name: list(limits) for name, limits in LIMITS.items()},
        "together": {"effective": MAX_EFFECTIVE, "samples": MAX_SAMPLES, "bytes": MAX_BYTES},
        "sample_bytes": SAMPLE_BYTES,
        "programs": templates(),
        "examples": [
            {"setting": asdict(one), "python": as_python(one), "command": as_command(one)} for one in examples
        ],
    }


def experiment_of(task: str, settings: Sequence[PlaygroundSetting], seconds: float, **more: Any) -> Experiment:  # noqa: ANN401 (further data)
    """Return the experiment that records these runs of a task."""

    def run_all(more: Mapping[str, Any], tell: Tell) -> Data:
        return {"runs": recorded(settings, tell), **more}

    return Experiment(
        name=f"playground_{task}",
        question=f"What do runs of the playground's task {task} do?",
        run=partial(run_all, more),
        seconds=seconds,
        runs_here=False,
        tolerance=1e-3,
        noisy=NOISY,
    )


NOISY = ("samples_per_second", "relative_differences", "digest", "surfaces")
"""Times, rounding, and what depends on every bit of it."""
