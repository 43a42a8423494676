"""The recorded playground runs for a page without a server: their settings, and their compact form."""

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.held_out import shown_samples
from anybatch_guide.lines import significant
from anybatch_guide.playground import PlaygroundSetting, run
from anybatch_guide.programs import as_command, as_python, templates
from anybatch_guide.run_metrics import surface_of
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
from anybatch_guide.tasks.spirals import EXTENT
from anybatch_guide.tasks.task import load
from anybatch_guide.training import isolated, make

NUM_SURFACES = 5
NUM_FILLED_STEPS = 3
"""First steps of a recorded run whose gradient is recorded after each micro-batch; the page replays them slowly."""
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"steps": 40, "optimizer": "sgd", "adamw": 0.003, "sgd": 0.1, "norm": "none", "classes": 10},
    "spirals": {"steps": 200, "optimizer": "adamw", "adamw": 0.02, "sgd": 0.5, "norm": "none", "classes": 2},
    "shapes": {"steps": 40, "optimizer": "adamw", "adamw": 0.003, "sgd": 0.1, "norm": "batch", "classes": 4},
    "text": {"steps": 30, "optimizer": "adamw", "adamw": 0.01, "sgd": 0.5, "norm": "none", "classes": 256},
}
"""Defaults of each task (steps, optimizer, learning rate by optimizer, norm), and its number of classes."""
DIGITS_LIMITS_KIB = (4096, 3072, 2048, 1280, 1024, 768, 512)
"""Memory limits: 64 digits fit in one micro-batch, fit in smaller micro-batches (five limits), or do not fit at all."""
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
    """Return twelve splits with two optimizers, each mistake at three of them, two ranks, and seven memory limits."""
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
    """Return three splits of one batch, and runs with two mistakes, each with both optimizers."""
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
    """Return three splits of one batch, a smaller unsplit batch, and the mistake "mean of means" with two splits."""
    settings = [task_setting("text", micro, 64 // micro) for micro in (64, 16, 4)]
    settings.append(task_setting("text", 16, 1))  # for the predicted memory of a step without accumulation
    return settings + [task_setting("text", micro, 64 // micro, mistake="mean_of_means") for micro in (16, 4)]


def preset_settings() -> list[PlaygroundSetting]:
    """Return the settings of the page's presets, which start with one click."""
    return [
        task_setting("digits", 16, 4, mistake="no_division"),
        task_setting("shapes", 4, 16),
        task_setting("shapes", 4, 16, norm_policy="exact"),
        task_setting("digits", 64, 4, memory_limit_kib=2048),
        task_setting("digits", 16, 4, ranks=2),
        task_setting("spirals", 16, 4),
    ]


def record_runs(settings: Sequence[PlaygroundSetting], emit: Emit) -> list[dict[str, Any]]:
    """Run every setting, and return the runs in compact form: setting, metrics by step, memory."""
    runs = []
    for done, setting in enumerate(settings):
        emit_progress(emit, done, len(settings), as_command(setting))
        runs.append(record_run(setting, emit))
    return runs


def first_step(setting: PlaygroundSetting) -> dict[str, Any]:
    """Return the details of each micro-batch of the first step, and the native gradient, for stepping on the page."""
    lines: list[Mapping[str, Any]] = []
    run(replace(setting, steps=1), lines.append, is_stepped=lambda: True)
    head = ("version", "sequence", "time_seconds", "kind")
    micro_batches = [
        {name: value for name, value in line.items() if name not in head}
        for line in lines
        if line["kind"] == "guide.micro_batch"
    ]
    (native,) = (line["gradient"] for line in lines if line["kind"] == "guide.native")
    return {"first_micro_batches": micro_batches, "first_native_gradient": native}


def record_run(setting: PlaygroundSetting, emit: Emit) -> dict[str, Any]:
    """Run one setting; return its metrics by step, rounded for a chart, and its surfaces and gradients if shown."""
    lines: list[Mapping[str, Any]] = []

    def keep(line: Mapping[str, Any]) -> None:
        if line["kind"] in ("guide.surface", "guide.native", "guide.micro_batch"):
            lines.append(line)
        emit(line)

    data = run(setting, keep)
    surfaces = [{"updates": line["updates"], "values": line["values"]} for line in lines if "updates" in line]
    every = max(1, len(surfaces) // NUM_SURFACES)
    evaluations = data["evaluations"]
    return {
        "setting": asdict(setting),
        "status": data["status"],
        **({"message": data["message"]} if data["message"] else {}),
        "losses": rounded(data["losses"], 5),
        "gradient_norms": rounded(data["gradient_norms"], 4),
        "learning_rates": rounded(data["learning_rates"], 4),
        "native_losses": rounded(data["native_losses"], 5),
        "first_update_difference": rounded([data["first_update_difference"]], 3)[0],
        "relative_differences": rounded(data["relative_differences"], 3),
        "evaluated": [evaluation["updates"] for evaluation in evaluations],
        "accuracies": rounded([evaluation["accuracy"] for evaluation in evaluations], 3),
        "native_accuracies": rounded([evaluation["native_accuracy"] for evaluation in evaluations], 3),
        "answers": [evaluation["answers"] for evaluation in evaluations],
        "peak": data["peak"],
        "smaller_sizes": data["smaller_sizes"],
        "reduced_bytes": data["reduced_bytes"],
        "digest": data["digest"],
        "surfaces": surfaces[every::every],
        **({"gradients": gradients(lines)} if setting in [*opening_settings()[:1], *preset_settings()] else {}),
    }


def gradients(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[str], str]]:
    """Return (step, sums over ranks after each micro-batch, native gradient), as levels for a strip of -127 to 127.

    Steps after the first `NUM_FILLED_STEPS` have only the sum after the last micro-batch.
    """
    natives = {line["step"]: line["gradient"] for line in lines if line["kind"] == "guide.native"}
    sums: dict[int, dict[int, dict[int, Sequence[float]]]] = {}
    for line in lines:
        if line["kind"] == "guide.micro_batch":
            sums.setdefault(line["step"], {}).setdefault(line["position"], {})[line["rank"]] = line["sum"]
    found = []
    for step, by_position in sums.items():
        latest: dict[int, Sequence[float]] = {}
        totals = []
        for _, by_rank in sorted(by_position.items()):
            latest |= by_rank
            totals.append([sum(numbers) for numbers in zip(*latest.values(), strict=True)])
        shown, native = totals[0 if step < NUM_FILLED_STEPS else -1 :], natives[step] or []
        limit = max(map(abs, [*itertools.chain(*shown), *native])) or 1.0
        found.append((step, [levels(total, limit) for total in shown], levels(native, limit)))
    return found


def levels(values: Sequence[float], limit: float) -> str:
    """Return numbers as signed bytes in base64; 127 is the limit."""
    return base64.b64encode(bytes(round(127 * value / limit) & 255 for value in values)).decode("ascii")


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
        **first_step(PlaygroundSetting()),
        **page_data("digits"),
        "programs": templates(),
        "examples": [
            {"setting": asdict(setting), "python": as_python(setting), "command": as_command(setting)}
            for setting in examples
        ],
    }


def page_data(task: str) -> dict[str, Any]:
    """Return the samples that the page shows: held-out samples with their answers, or the points of spirals."""
    loaded = load(task)
    if task != "spirals":
        return {"shown": shown_samples(loaded)}
    points = zip(loaded.rows.inputs.tolist(), loaded.rows.targets.tolist(), strict=True)
    with isolated():
        untrained = make(spirals_settings()[0], loaded)[0]
    return {
        "points": [[round(x, 3), round(y, 3), arm] for (x, y), arm in points],
        "extent": EXTENT,
        "untrained": surface_of(untrained),
    }


def experiment_of(task: str, settings: Sequence[PlaygroundSetting], seconds: float) -> Experiment:
    """Return the experiment that records the runs of a task."""

    def run_all(emit: Emit) -> Data:
        return {"runs": record_runs(settings, emit), **(page_data(task) if task != "digits" else {})}

    return Experiment(
        name=f"playground_{task}",
        question=f"What do runs of the playground's task {task} do?",
        run=run_all,
        seconds=seconds,
        runs_here=False,
        tolerance=1e-3,
        noisy=NOISY,
    )


NOISY = (
    *("first_update_difference", "relative_differences", "digest", "surfaces"),
    *("accuracies", "native_accuracies", "answers", "gradients"),
)
"""Fields that depend on the machine: rounding errors, and values that rounding changes."""
