"""The first screen: one batch of 64 digits, cut into ever smaller micro-batches, and the same without the division."""

from collections.abc import Mapping
from typing import Any

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.grid import rounded, task_setting
from anybatch_guide.playground import run as play

EFFECTIVE = 64
SIZES = (64, 32, 16, 8, 4, 2, 1)


def run(emit: Emit) -> Data:
    """Return losses and peak memory of the training for each cut, and the losses where nothing is divided.

    Plain SGD, since its step is as long as the gradient: Adam divides by the gradient's usual size, which hides a
    factor that is forgotten.
    """
    found = [way(size, emit, done=done) for done, size in enumerate(SIZES)]
    whole = found[0]["losses"]
    return {
        "effective": EFFECTIVE,
        "ways": [
            {**one, "losses": rounded(one["losses"], 5), "largest_gap": gap(one["losses"], whole)} for one in found
        ],
    }


def way(size: int, emit: Emit, *, done: int) -> dict[str, Any]:
    """Return what the training of one cut came to, as it should be and not divided."""
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
    """Return how far the parameters are from the native batch's, relatively, after the last step that has one."""
    return next((one for one in reversed(data["relative_differences"]) if one is not None), None)


def gap(losses: list[float], whole: list[float]) -> float:
    """Return the largest difference of two courses of a loss."""
    return float(f"{max(abs(a - b) for a, b in zip(losses, whole, strict=True)):.2g}")


EXPERIMENT = Experiment(
    name="first_screen",
    question="What changes when a batch of 64 goes through in smaller and smaller parts?",
    run=run,
    seconds=15,
    tolerance=1e-3,
    noisy=("largest_gap", "difference", "wrong_difference", "wrong_losses"),
)
