"""The recorded playground runs for a page without a server: their settings, and their compact form."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, get_args

from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import significant
from anybatch_guide.playground import PlaygroundSetting, run
from anybatch_guide.programs import as_command, as_python, templates
from anybatch_guide.setting import (
    GHOST_SAMPLES,
    LIMITS,
    MAX_BYTES,
    MAX_EFFECTIVE,
    MAX_SAMPLES,
    SAMPLE_BYTES,
    MistakeName,
    OptimizerName,
)

NUM_SURFACES = 5
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"steps": 40, "optimizer": "sgd", "adamw": 0.003, "sgd": 0.1, "norm": "none", "classes": 10},
    "spirals": {"steps": 200, "optimizer": "adamw", "adamw": 0.02, "sgd": 0.5, "norm": "none", "classes": 2},
    "shapes": {"steps": 40, "optimizer": "adamw", "adamw": 0.003, "sgd": 0.1, "norm": "batch", "classes": 4},
    "text": {"steps": 30, "optimizer": "adamw", "adamw": 0.01, "sgd": 0.5, "norm": "none", "classes": 256},
}
"""Defaults of each task (steps, optimizer, learning rate by optimizer, norm), and its number of classes."""
DIGITS_LIMITS_KIB = (4096, 2048, 512)
"""Memory limits for micro-batches of 64 digits: one that fits, one that needs smaller micro-batches, one too low."""
_MISTAKES = tuple(name for name in get_args(MistakeName) if name)


def task_setting(
    task: str,
    micro: int,
    accumulation: int,
    optimizer: OptimizerName | None = None,
    **extra: Any,  # noqa: ANN401 (values of any field)
) -> PlaygroundSetting:
    """Return a setting with a task's defaults."""
    defaults = TASK_DEFAULTS[task]
    optimizer = optimizer or defaults["optimizer"]
    fields = {"norm": defaults["norm"], "steps": defaults["steps"], "learning_rate": defaults[optimizer], **extra}
    return PlaygroundSetting(
        task=task,  # type: ignore[arg-type]
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        optimizer=optimizer,
        **fields,
    )


def opening_settings() -> list[PlaygroundSetting]:
    """Return the initial settings of the page: digits, 16 x 4 = 64, without and with each mistake."""
    return [task_setting("digits", 16, 4, mistake=mistake) for mistake in ("", *_MISTAKES)]


def digits_settings() -> list[PlaygroundSetting]:
    """Return twelve splits with two optimizers, each mistake at three of them, two ranks, and three memory limits."""
    settings = [
        task_setting("digits", micro, accumulation, optimizer)
        for optimizer in get_args(OptimizerName)
        for micro in (1, 4, 16, 64)
        for accumulation in (1, 4, 16)
    ]
    settings += [
        task_setting("digits", micro, 4, optimizer, mistake=mistake)
        for optimizer in get_args(OptimizerName)
        for micro in (4, 16, 64)
        for mistake in _MISTAKES
    ]
    settings += [task_setting("digits", micro, 4, "sgd", ranks=2) for micro in (4, 16, 64)]
    settings += [task_setting("digits", 64, 4, "sgd", memory_limit_kib=limit) for limit in DIGITS_LIMITS_KIB]
    # The initial runs are in a separate recording.
    opening = opening_settings()
    return [setting for setting in settings if setting not in opening]


def spirals_settings() -> list[PlaygroundSetting]:
    """Return three splits of one batch, and two mistakes with each optimizer."""
    cuts = [task_setting("spirals", micro, 64 // micro) for micro in (4, 64)]
    return cuts + [
        task_setting("spirals", 16, 4, optimizer, mistake=mistake)
        for optimizer in get_args(OptimizerName)
        for mistake in ("", "no_division", "zero_each")
    ]


def shapes_settings() -> list[PlaygroundSetting]:
    """Return three splits of one batch with each norm and BatchNorm policy, and three policies on two ranks."""
    settings = [
        task_setting("shapes", micro, 64 // micro, norm=norm)
        for norm in ("batch", "group", "none")
        for micro in (64, 16, 4)
    ]
    settings += [
        task_setting("shapes", micro, 64 // micro, norm_policy=policy)
        for policy in ("exact", "ghost", "freeze")
        for micro in (64, 16, 4)
    ]
    return settings + [
        task_setting("shapes", micro, 32 // micro, norm_policy=policy, ranks=2)
        for policy in ("keep", "sync", "exact")
        for micro in (32, 16, 4)
    ]


def text_settings() -> list[PlaygroundSetting]:
    """Return three splits of one batch, and the mean of means at two of them."""
    settings = [task_setting("text", micro, 64 // micro) for micro in (64, 16, 4)]
    return settings + [task_setting("text", micro, 64 // micro, mistake="mean_of_means") for micro in (16, 4)]


def record_runs(settings: Sequence[PlaygroundSetting], emit: Emit) -> list[dict[str, Any]]:
    """Run every setting, and return the runs in compact form: setting, metrics by step, memory."""
    runs = []
    for done, setting in enumerate(settings):
        emit_progress(emit, done, len(settings), as_command(setting))
        runs.append(record_run(setting, emit))
    return runs


def first_micro_batches(setting: PlaygroundSetting) -> list[dict[str, Any]]:
    """Return the details of each micro-batch of the first step, for stepping through it on the page."""
    lines: list[Mapping[str, Any]] = []
    run(replace(setting, steps=1), lines.append, is_stepped=lambda: True)
    head = ("version", "sequence", "time_seconds", "kind", "step")
    return [
        {name: value for name, value in line.items() if name not in head}
        for line in lines
        if line["kind"] == "guide.micro_batch"
    ]


def record_run(setting: PlaygroundSetting, emit: Emit) -> dict[str, Any]:
    """Run one setting; return its metrics by step, rounded for a chart, and the predicted surfaces of spirals."""
    surfaces: list[Mapping[str, Any]] = []

    def keep_surfaces(line: Mapping[str, Any]) -> None:
        if line["kind"] == "guide.surface":
            surfaces.append({"step": line["step"], "values": line["values"]})
        emit(line)

    data = run(setting, keep_surfaces)
    every = max(1, len(surfaces) // NUM_SURFACES)
    return {
        "setting": asdict(setting),
        "status": data["status"],
        **({"message": data["message"]} if data["message"] else {}),
        "losses": rounded(data["losses"], 5),
        "gradient_norms": rounded(data["gradient_norms"], 4),
        "learning_rates": rounded(data["learning_rates"], 4),
        "first_gradient_difference": rounded([data["first_gradient_difference"]], 3)[0],
        "relative_differences": rounded(data["relative_differences"], 3),
        "peak": data["peak"],
        "samples_per_second": rounded([data["samples_per_second"]], 3)[0],
        "smaller_sizes": data["smaller_sizes"],
        "reduced_bytes": data["reduced_bytes"],
        "digest": data["digest"],
        "surfaces": surfaces[every - 1 :: every],
    }


def rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    """Return numbers rounded to the given number of significant digits."""
    return [None if value is None else significant(value, digits) for value in values]


def run_opening(emit: Emit) -> Data:
    """Return the initial runs of the page, and the limits, defaults and program templates of settings."""
    examples = [
        PlaygroundSetting(),
        task_setting("spirals", 4, 8, "sgd", mistake="clip_each", seed=7),
        task_setting("shapes", 16, 2, norm_policy="ghost", ranks=2, memory_limit_kib=4096),
    ]
    return {
        "runs": record_runs(opening_settings(), emit),
        "beginnings": TASK_DEFAULTS,
        "limits": {name: list(limits) for name, limits in LIMITS.items()},
        "together": {"effective": MAX_EFFECTIVE, "samples": MAX_SAMPLES, "bytes": MAX_BYTES},
        "sample_bytes": SAMPLE_BYTES,
        "ghost_samples": GHOST_SAMPLES,
        "first_micro_batches": first_micro_batches(PlaygroundSetting()),
        "programs": templates(),
        "examples": [
            {"setting": asdict(setting), "python": as_python(setting), "command": as_command(setting)}
            for setting in examples
        ],
    }


def experiment_of(task: str, settings: Sequence[PlaygroundSetting], seconds: float, **extra: Any) -> Experiment:  # noqa: ANN401 (further data)
    """Return the experiment that records the runs of a task."""

    def run_all(extra: Mapping[str, Any], emit: Emit) -> Data:
        return {"runs": record_runs(settings, emit), **extra}

    return Experiment(
        name=f"playground_{task}",
        question=f"What do runs of the playground's task {task} do?",
        run=partial(run_all, extra),
        seconds=seconds,
        runs_here=False,
        tolerance=1e-3,
        noisy=NOISY,
    )


NOISY = ("samples_per_second", "first_gradient_difference", "relative_differences", "digest", "surfaces")
"""Fields that depend on the machine: times, rounding errors, and values that rounding changes."""
