"""A small batch, an accumulated large one, and an unsplit large one: gradient variance, memory and time."""

import copy
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.testing import relative_error
from anybatch_guide.claims.measuring import BatchCut, step_memory, step_seconds
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.study import BETAS, Batch, StudyRun, task_of, trained

SMALL, STEPS, DRAWS, ROUNDS = 16, 8, 60, 15
LARGE = SMALL * STEPS
RUN = StudyRun(task="digits", optimizer="SGD", batch_size=64, learning_rate=0.08, epochs=2, betas=BETAS["SGD"])
Gradients = dict[str, Tensor]


def run(emit: Emit) -> Data:
    """Compare the three kinds of batches, with the parameters after a short run."""
    task = task_of(RUN.task)
    layers, errors = variances(DRAWS, emit)
    cuts = {"small": BatchCut(SMALL, 1), "accumulated": BatchCut(SMALL, STEPS), "native": BatchCut(LARGE, 1)}
    times = step_seconds(task, tuple(cuts.values()), emit, rounds=ROUNDS)
    rows = []
    for name, cut in cuts.items():
        samples = cut.size * cut.number
        memory = step_memory(task, micro_batch_size=cut.size, effective_batch_size=samples)
        seconds = [duration / samples for duration in times[cut]]
        rows.append(
            {
                "name": name,
                "samples_per_step": samples,
                "micro_batch_size": cut.size,
                "accumulation_steps": cut.number,
                "peak_bytes": sum(memory["peak"].values()),
                "peak": dict(memory["peak"]),
                "variance": layers[name]["all parameters"],
                "variance_by_layer": layers[name],
                "seconds_per_sample": statistics.median(seconds),
            }
        )
    return {"ways": rows, "worst_gradient_error": max(errors)}


def variances(draws: int, emit: Emit) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return the gradient variance of each kind of batch by layer, and the relative errors of accumulated gradients.

    The variance is the mean squared distance to the gradient of all samples, in float64. Samples are drawn with
    replacement; all kinds use the same samples, because each small batch is a part of a large batch.
    """
    rows, model = task_of(RUN.task).rows, copy.deepcopy(trained(RUN)[0]).double()
    all_samples = _in_float64({"inputs": rows.inputs, "targets": rows.targets})
    (expected,) = _gradients(model, [all_samples], len(rows))
    generator = torch.Generator().manual_seed(RUN.seed)
    sums = {name: dict[str, float]() for name in ("small", "accumulated", "native")}
    errors = []
    for done in range(draws):
        emit_progress(emit, done, draws, "gradients of batches")
        ids = torch.randint(0, len(rows), (LARGE,), generator=generator)
        large = _in_float64({"inputs": rows.inputs[ids], "targets": rows.targets[ids]})
        parts = [
            {name: value[start : start + SMALL] for name, value in large.items()} for start in range(0, LARGE, SMALL)
        ]
        (accumulated,), (native,) = _gradients(model, [large], SMALL), _gradients(model, [large], LARGE)
        errors.append(relative_error(accumulated, native))
        for name, gradients in (
            ("small", _gradients(model, parts, SMALL)),
            ("accumulated", [accumulated]),
            ("native", [native]),
        ):
            for gradient in gradients:
                for layer, square in _by_layer({key: gradient[key] - expected[key] for key in expected}).items():
                    sums[name][layer] = sums[name].get(layer, 0.0) + square / len(gradients) / draws
    return sums, errors


def _gradients(model: nn.Module, batches: list[Batch], micro_batch_size: int) -> list[Gradients]:
    """Return the engine's gradient of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = task_of(RUN.task).loss
    with ab.Engine(model, optimizer, loss, micro_batch_size=micro_batch_size, check_loss=False) as engine:
        gradients: list[Any] = [engine.gradients(batch) for batch in batches]
    return [{name: value.clone() for name, value in gradient.items() if value is not None} for gradient in gradients]


def _in_float64(batch: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _by_layer(difference: Gradients) -> dict[str, float]:
    """Return the squared norm over all parameters, and over each layer."""
    squares = {"all parameters": 0.0}
    for name, value in difference.items():
        square = float(value.square().sum())
        for row in ("all parameters", name.rpartition(".")[0]):
            squares[row] = squares.get(row, 0.0) + square
    return squares


EXPERIMENT = Experiment(
    name="batch_strategies",
    question="How do a small batch, an accumulated large one and an unsplit large one differ?",
    run=run,
    seconds=5,
    # The model is trained in float32, and float32 rounding differs between processors.
    tolerance=1e-2,
    noisy=("seconds_per_sample", "worst_gradient_error"),
)
