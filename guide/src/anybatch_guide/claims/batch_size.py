"""Measurements of claims about batch size: the effect of a larger batch, by samples and by steps."""

import math
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from anybatch_guide.claims.claim import Numbers
from anybatch_guide.claims.measuring import emit_progress
from anybatch_guide.claims.rules import RULES
from anybatch_guide.experiment import Emit
from anybatch_guide.experiments import sharp_minima
from anybatch_guide.experiments.batch_strategies import STEPS, variances
from anybatch_guide.experiments.rates_by_batch import GRIDS, RateStudy, rules_of
from anybatch_guide.study import (
    BETAS,
    MICRO_BATCH_SIZE,
    StudyRun,
    engine_of,
    held_out_loss,
    judged,
    new_model,
    noise_scale_of,
    steps_of,
)

SEEDS = (0, 1)
BASE = StudyRun(task="digits", optimizer="SGD", batch_size=16, learning_rate=0.02, epochs=8, betas=BETAS["SGD"])
TARGET = 0.3
"""The target of the held-out loss."""
LOOK_EVERY = 128
"""Samples between evaluations of the held-out loss, at least one step."""
RATES = {16: (0.02, 0.04, 0.08), 64: (0.08, 0.16, 0.32), 256: (0.16, 0.32, 0.64)}
"""Candidates for the best rate at each size."""


def larger_batch(emit: Emit) -> Numbers:
    """Train with three batch sizes, each at its best rate, until the held-out loss reaches a target."""
    best: dict[int, ToTarget] = {}
    for done, (size, rates) in enumerate(RATES.items()):
        emit_progress(emit, done, len(RATES) + 1, f"batches of {size}")
        best[size] = min(to_target(replace(BASE, batch_size=size, learning_rate=rate)) for rate in rates)
    smallest, *larger = RATES
    emit_progress(emit, len(RATES), len(RATES) + 1, f"batches of {larger[-1]}, accumulated")
    again = replace(BASE, batch_size=larger[-1], learning_rate=best[larger[-1]].rate)
    accumulated = to_target(again, micro_batch_size=smallest)
    return {
        **{f"steps_{size}": cost.steps for size, cost in best.items()},
        **{f"samples_{size}": cost.samples for size, cost in best.items()},
        **{f"time_{size}": best[size].seconds / best[smallest].seconds for size in larger},
        "time_accumulated": accumulated.seconds / best[smallest].seconds,
    }


class ToTarget(NamedTuple):
    """The mean cost of reaching the target over seeds, ordered by steps."""

    steps: float
    samples: float
    seconds: float
    rate: float


def to_target(made: StudyRun, micro_batch_size: int = MICRO_BATCH_SIZE) -> ToTarget:
    """Return the cost of reaching the target; infinite if a seed never does. Seconds are CPU time."""
    ends = [_to_target(replace(made, seed=seed), micro_batch_size) for seed in SEEDS]
    steps, samples, seconds = (statistics.fmean(values) for values in zip(*ends, strict=True))
    return ToTarget(steps, samples, seconds, made.learning_rate)


def _to_target(made: StudyRun, micro_batch_size: int) -> tuple[float, float, float]:
    model, samples, seconds = new_model(made), 0, 0.0
    every = max(1, LOOK_EVERY // made.batch_size)
    with engine_of(made, model, micro_batch_size=micro_batch_size) as engine:
        for number, batch in enumerate(steps_of(made), start=1):
            begun = time.process_time()
            engine.step(batch)
            seconds += time.process_time() - begun
            samples += len(batch["targets"])
            if number % every == 0 and judged(model, made)[0] <= TARGET:
                return number, samples, seconds
    return math.inf, math.inf, math.inf


def one_rule(emit: Emit) -> Numbers:
    """Scale the best rate of the smallest batch by each rule, and compare with the best rate of larger batches."""
    worst_ratios = {}
    for name, grid in GRIDS.items():
        study = RateStudy(grid, emit)
        rules = rules_of(noise_scale_of(study.best(grid.sizes[0])))
        for rule in RULES:
            worst = max(study.against_tuned(rules[rule], size) for size in grid.sizes[1:])
            worst_ratios[f"{rule}_{name.replace(', ', '_').lower()}"] = worst
    return worst_ratios


def less_noise(emit: Emit) -> Numbers:
    """Compare the gradient variance for 16 and 128 samples, and the final losses."""
    layers, _ = variances(30, emit)
    small = replace(BASE, epochs=4)
    rates = {"small": (0.02, 0.04, 0.08), "large": (0.08, 0.16, 0.32)}
    ways = {
        "loss_small": (small, rates["small"]),
        "loss_same_samples": (replace(small, batch_size=128), rates["large"]),
        "loss_same_steps": (replace(small, batch_size=128, epochs=4 * 8), rates["large"]),
    }
    numbers = {"noise_ratio": layers["native"]["all parameters"] / layers["small"]["all parameters"] * STEPS}
    for done, (name, (made, candidates)) in enumerate(ways.items()):
        emit_progress(emit, done, len(ways), name)
        numbers[name] = min(
            statistics.fmean(held_out_loss(replace(made, learning_rate=rate, seed=seed)) for seed in SEEDS)
            for rate in candidates
        )
    return numbers


def sharp(emit: Emit) -> Numbers:
    """Measure the largest eigenvalue and the accuracy after training with batches of 16 and 256."""
    numbers: dict[str, float] = {}
    ways = list(sharp_minima.ways((256,)))
    for done, (way, made) in enumerate(ways):
        emit_progress(emit, done, len(ways), way)
        ends = [sharp_minima.measured(replace(made, seed=seed)) for seed in sharp_minima.SEEDS]
        name = way.replace(",", "").replace(" ", "_")
        numbers[f"eigenvalue_{name}"] = statistics.fmean(end["eigenvalue"] for end in ends)
        numbers[f"accuracy_{name}"] = 100 * statistics.fmean(end["accuracy"] for end in ends)
    return numbers
