"""The gradient noise scale: estimated in a run, with a confidence interval, and exact, from per-sample gradients."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from anybatch.core.gradient_noise import GradientNoise, NoiseEstimate
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.study import BETAS, StudyRun, engine_of, new_model, steps_of, task_of
from anybatch_guide.tasks.task import LabelledSamples, cross_entropy

RUN = StudyRun(task="digits", optimizer="SGD", batch_size=64, learning_rate=0.08, epochs=8, betas=BETAS["SGD"])
MICRO_BATCH_SIZE, DECAY = 8, 0.9
POINT_EVERY, TRUTH_EVERY = 8, 24


def run(emit: Emit) -> Data:
    """Estimate the noise scale during a run, and compute it from single-sample gradients."""
    model, rows = new_model(RUN), task_of(RUN.task).rows
    during_run = list[dict[str, Any]]()
    noise = GradientNoise(every=1, decay=DECAY)
    with engine_of(RUN, model, noise=noise, micro_batch_size=MICRO_BATCH_SIZE) as engine:
        for number, batch in enumerate(steps_of(RUN), start=1):
            emit({"kind": "guide.progress", "done": number, "what": "steps of a run"})
            report = engine.step(batch)
            if number % POINT_EVERY == 0 and report.noise is not None:
                true = true_scale(model, rows) if number % TRUTH_EVERY == 0 else None
                during_run.append({"step": number, "loss": report.loss, **_numbers(report.noise), "true_scale": true})
    return {
        "batch_size": RUN.batch_size,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "along_a_run": during_run,
    }


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
