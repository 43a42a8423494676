"""The largest eigenvalue of the Hessian, and held-out accuracy, after runs with several batch sizes and rates."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.experiments.rates_by_batch import library_rule
from anybatch_guide.sharpness import measure_sharpness
from anybatch_guide.study import BETAS, StudyRun, evaluate_held_out, sharpness_inputs, trained

SEEDS = (0, 1)
SIZES = (64, 256)
BASE = StudyRun(task="digits", optimizer="SGD", batch_size=16, learning_rate=0.02, epochs=8, betas=BETAS["SGD"])


def ways(sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[str, StudyRun]]:
    """Yield each run with the name of its rate rule; the seed is set later."""
    yield "base", BASE
    for size in sizes:
        yield "same rate", replace(BASE, batch_size=size)
    for size in sizes:
        yield "scaled rate", library_rule("linear")(BASE, size)
    for size in sizes:
        yield "scaled rate, same steps", replace(library_rule("linear")(BASE, size), epochs=BASE.epochs * size // 16)


def run(emit: Emit) -> Data:
    """Train every run with every seed, and measure the sharpness of its minimum."""
    runs = []
    for way, study_run in ways():
        emit({"kind": "guide.progress", "what": f"{way}, batch {study_run.batch_size}"})
        runs.append(
            {
                "way": way,
                "batch_size": study_run.batch_size,
                "learning_rate": study_run.learning_rate,
                "epochs": study_run.epochs,
                "seeds": [measure_minimum(replace(study_run, seed=seed)) for seed in SEEDS],
            }
        )
    return {"runs": runs}


def measure_minimum(study_run: StudyRun) -> dict[str, Any]:
    """Train, and return the final sharpness, training loss, and held-out loss and accuracy."""
    model, losses = trained(study_run)
    if not math.isfinite(losses[-1]):
        return dict.fromkeys(("eigenvalue", "train_loss", "held_out", "accuracy"), math.nan)
    spec, batch, hardware = sharpness_inputs(study_run, model)
    sharpness = measure_sharpness(spec, batch, hardware, tolerance=1e-2)
    held_out, accuracy = evaluate_held_out(model, study_run)
    with torch.no_grad():
        outputs = model(batch["inputs"])
    return {
        "eigenvalue": sharpness.eigenvalue,
        "train_loss": float(torch.nn.functional.cross_entropy(outputs, batch["targets"])),
        "held_out": held_out,
        "accuracy": accuracy,
    }


EXPERIMENT = Experiment(
    name="sharp_minima",
    question="Do larger batches end in sharper minima?",
    run=run,
    seconds=60,
    runs_here=False,
    tolerance=0.1,
)
