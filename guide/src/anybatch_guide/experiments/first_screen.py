"""The first screen: one batch of 64 digits in smaller and smaller micro-batches, with and without division."""

from collections.abc import Mapping
from typing import Any

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.grid import rounded, task_setting
from anybatch_guide.playground import run as play

EFFECTIVE = 64
SIZES = (64, 32, 16, 8, 4, 2, 1)


def run(emit: Emit) -> Data:
    """Return losses and peak memory of training for each split, and the losses without division.

    Plain SGD, because its step is proportional to the gradient: Adam divides by the size of the gradient, which
    hides a missing factor.
    """
    results = [way(size, emit, done=done) for done, size in enumerate(SIZES)]
    unsplit_losses = results[0]["losses"]
    return {
        "effective": EFFECTIVE,
        "ways": [
            {**result, "losses": rounded(result["losses"], 5), "largest_gap": gap(result["losses"], unsplit_losses)}
            for result in results
        ],
    }


def way(size: int, emit: Emit, *, done: int) -> dict[str, Any]:
    """Return the results of training with one split, with and without division."""
    emit({"kind": "guide.progress", "done": done, "of": len(SIZES), "what": f"{size} x {EFFECTIVE // size}"})
    right, wrong = (
        play(task_setting("digits", size, EFFECTIVE // size, "sgd", mistake=mistake), lambda _: None)
        for mistake in ("", "no_division")
    )
    return {
        "micro": size,
        "steps": EFFECTIVE // size,
        "losses": right["losses"],
        "wrong_losses": rounded(wrong["losses"], 5),
        "peak": right["peak"],
        "difference": rounded([last(right)], 2)[0],
        "wrong_difference": rounded([last(wrong)], 3)[0],
    }


def last(data: Mapping[str, Any]) -> float | None:
    """Return the relative difference of the parameters to the native batch, after the last step that has one."""
    return next((value for value in reversed(data["relative_differences"]) if value is not None), None)


def gap(losses: list[float], unsplit: list[float]) -> float:
    """Return the largest difference of two loss curves."""
    return float(f"{max(abs(a - b) for a, b in zip(losses, unsplit, strict=True)):.2g}")


EXPERIMENT = Experiment(
    name="first_screen",
    question="What changes if a batch of 64 is split into smaller and smaller micro-batches?",
    run=run,
    seconds=15,
    tolerance=1e-3,
    noisy=("largest_gap", "difference", "wrong_difference", "wrong_losses"),
)
