"""The gradient noise scale: estimated in a run, with a confidence interval, and exact, from per-sample gradients."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from anybatch.core.gradient_noise import GradientNoise, NoiseEstimate
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.study import BETAS, Batch, StudyRun, engine_of, new_model, steps_of, task_of
from anybatch_guide.tasks.task import LabelledSamples, cross_entropy

RUN = StudyRun(task="digits", optimizer="SGD", batch_size=64, learning_rate=0.08, epochs=8, betas=BETAS["SGD"])
MICRO_BATCH_SIZE, DECAY = 8, 0.9
POINT_EVERY, TRUTH_EVERY = 8, 24
FIXED_AT, FIXED_STEPS = 46, (10, 15, 20, 30, 45, 70, 100, 150, 230)
STUDY = "benchmarks/results/noise_against_brute_force_cpu_2026-11-24.md: three models, 1 and 2 ranks, 400 intervals"


def run(emit: Emit) -> Data:
    """Estimate the noise scale during a run and with fixed parameters, and compute it from single-sample gradients."""
    model, rows = new_model(RUN), task_of(RUN.task).rows
    during_run, fixed_model = list[dict[str, Any]](), nn.Module()
    noise = GradientNoise(every=1, decay=DECAY)
    with engine_of(RUN, model, noise=noise, micro_batch_size=MICRO_BATCH_SIZE) as engine:
        for number, batch in enumerate(steps_of(RUN), start=1):
            emit({"kind": "guide.progress", "done": number, "what": "steps of a run"})
            report = engine.step(batch)
            if number == FIXED_AT:
                fixed_model = copy.deepcopy(model)
            if number % POINT_EVERY == 0 and report.noise is not None:
                true = true_scale(model, rows) if number % TRUTH_EVERY == 0 else None
                during_run.append({"step": number, "loss": report.loss, **_numbers(report.noise), "true_scale": true})
    return {
        "batch_size": RUN.batch_size,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "decay": DECAY,
        "seed": RUN.seed,
        "along_a_run": during_run,
        "fixed_at_step": FIXED_AT,
        "with_fixed_parameters": [_numbers(estimate) | {"steps": steps} for steps, estimate in _measured(fixed_model)],
        "fixed_true_scale": true_scale(fixed_model, rows),
        "stands_for": STUDY,
    }


def _measured(model: nn.Module) -> Iterator[tuple[int, NoiseEstimate]]:
    """Yield the estimates after each number of steps in `FIXED_STEPS`, with fixed parameters."""
    # No decay, because parameters do not change. Draw with replacement, because an epoch's samples are dependent.
    fixed_run, rows = replace(RUN, learning_rate=0.0), task_of(RUN.task).rows
    generator = torch.Generator().manual_seed(RUN.seed)
    noise = GradientNoise(every=1, decay=1.0 - 1e-12)
    with engine_of(fixed_run, model, noise=noise, micro_batch_size=MICRO_BATCH_SIZE) as engine:
        for steps in range(1, FIXED_STEPS[-1] + 1):
            report = engine.step(draw(rows, RUN.batch_size, generator))
            if steps in FIXED_STEPS and report.noise is not None:
                yield steps, report.noise


def draw(rows: LabelledSamples, number: int, generator: torch.Generator) -> Batch:
    """Return samples drawn with replacement."""
    ids = torch.randint(0, len(rows), (number,), generator=generator)
    return {"inputs": rows.inputs[ids], "targets": rows.targets[ids]}


def true_scale(model: nn.Module, rows: LabelledSamples) -> float:
    """Return the noise scale of a data set from single-sample gradients: their variance / |mean gradient|^2."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def sample_loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, values, (image[None],))
        return cross_entropy(outputs, label[None])

    by_parameter = vmap(grad(sample_loss), (None, 0, 0))(parameters, rows.inputs, rows.targets)
    gradients = torch.cat([gradient.flatten(1) for gradient in by_parameter.values()], dim=1).double()
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum(1).mean() / mean.square().sum())


def _numbers(noise: NoiseEstimate) -> dict[str, Any]:
    """Return the noise scale and its interval; None for unknown values."""
    numbers = {"scale": noise.scale, "low": noise.interval[0], "high": noise.interval[1]}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


EXPERIMENT = Experiment(
    name="noise_scale",
    question="How noisy is the gradient during a run, and how accurate is the estimate?",
    run=run,
    seconds=5,
    tolerance=0.05,
)
