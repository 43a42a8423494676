"""Held-out loss by batch size and learning rate, and the rates of each scaling rule."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from anybatch.core.learning_rate import Memory, noise_gain, scale_rate
from anybatch.core.run_config import ScalingRule
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.study import BETAS, StudyRun, held_out_loss, noise_scale_of

SEEDS = (0, 1)
MAX_LOSS_RATIO = 1.25
"""A rule counts as well tuned if its loss is at most this multiple of the best loss in the grid."""
DIVERGED_LOSS = 100.0
"""A run with a larger held-out loss counts as diverged."""
Rule = Callable[[StudyRun, int], StudyRun]


@dataclass(frozen=True, slots=True)
class RateGrid:
    """The settings of a run at the smallest batch size, and the batch sizes and learning rates of the grid."""

    smallest: StudyRun
    sizes: tuple[int, ...]
    rates: tuple[float, ...]


GRIDS = {
    "digits, SGD": RateGrid(
        StudyRun(task="digits", optimizer="SGD", batch_size=16, learning_rate=0.01, epochs=4, betas=BETAS["SGD"]),
        (16, 64, 256, 1024),
        tuple(0.01 * 2.0**k for k in range(7)),
    ),
    "digits, AdamW": RateGrid(
        StudyRun(task="digits", optimizer="AdamW", batch_size=16, learning_rate=0.002, epochs=4, betas=BETAS["AdamW"]),
        (16, 64, 256, 1024),
        tuple(0.002 * 2.0**k for k in range(7)),
    ),
    "text, SGD": RateGrid(
        StudyRun(task="text", optimizer="SGD", batch_size=8, learning_rate=0.025, epochs=1, betas=BETAS["SGD"]),
        (8, 32, 128),
        tuple(0.025 * 2.0**k for k in range(5)),
    ),
}


class RateStudy:
    """The runs of one grid; results are cached."""

    def __init__(self, grid: RateGrid, emit: Emit) -> None:
        self.grid = grid
        self._emit = emit
        self._losses: dict[StudyRun, list[float]] = {}

    def losses(self, run: StudyRun) -> list[float]:
        """Return the held-out loss of each seed; infinite if the run diverged."""
        if run not in self._losses:
            self._emit({"kind": "guide.progress", "what": f"batch {run.batch_size}, rate {run.learning_rate:g}"})
            losses = [held_out_loss(replace(run, seed=seed)) for seed in SEEDS]
            self._losses[run] = [loss if loss < DIVERGED_LOSS else math.inf for loss in losses]
        return self._losses[run]

    def mean(self, run: StudyRun) -> float:
        """Return the mean held-out loss over seeds."""
        return statistics.fmean(self.losses(run))

    def at(self, size: int, rate: float) -> StudyRun:
        """Return the run with a batch size and a learning rate."""
        return replace(self.grid.smallest, batch_size=size, learning_rate=rate)

    def best(self, size: int) -> StudyRun:
        """Return the run with the lowest mean loss at a batch size."""
        return min((self.at(size, rate) for rate in self.grid.rates), key=self.mean)

    def loss_ratio(self, rule: Rule, size: int) -> float:
        """Return the mean loss at the rule's learning rate, as a multiple of the best loss at that size."""
        return self.mean(rule(self.best(self.grid.sizes[0]), size)) / self.mean(self.best(size))

    def largest_tuned_size(self, rule: Rule) -> int:
        """Return the largest batch size up to which the rule counts as well tuned at every size."""
        reached = self.grid.sizes[0]
        for size in self.grid.sizes[1:]:
            if self.loss_ratio(rule, size) > MAX_LOSS_RATIO:
                break
            reached = size
        return reached


def library_rule(rule: ScalingRule, memory: Memory | None = None) -> Rule:
    """Return a scaling rule of `ab.scale_rate`; `memory` is the unit in which running averages keep their length."""

    def scale(base: StudyRun, size: int) -> StudyRun:
        is_sgd = base.optimizer == "SGD"
        rate = scale_rate(
            base.learning_rate,
            base_batch_size=base.batch_size,
            effective_batch_size=size,
            rule=rule,
            betas=() if is_sgd else base.betas,
            eps=None if is_sgd else base.eps,
            momentum=base.betas[0] if is_sgd else 0.0,
            memory=memory,
        )
        betas = (rate.momentum,) if is_sgd else rate.betas
        eps = base.eps if rate.eps is None else rate.eps
        return replace(base, batch_size=size, learning_rate=rate.learning_rate, betas=betas, eps=eps)

    return scale


def gain_rule(noise_scale: float) -> Rule:
    """Return the rule that scales the rate by the gain from the noise scale, or by its square root for AdamW."""

    def scale(base: StudyRun, size: int) -> StudyRun:
        gain = noise_gain(noise_scale, base_batch_size=base.batch_size, effective_batch_size=size)
        factor = gain if base.optimizer == "SGD" else math.sqrt(gain)
        return replace(base, batch_size=size, learning_rate=base.learning_rate * factor)

    return scale


def rules_of(noise_scale: float) -> dict[str, Rule]:
    """Return the rules by name; "sqrt" also changes the betas, as in the library."""
    return {
        "none": library_rule("none"),
        "linear": library_rule("linear"),
        "sqrt": library_rule("sqrt"),
        "memory": library_rule("linear", "samples"),
        "gain": gain_rule(noise_scale),
    }


def run(emit: Emit) -> Data:
    """Run every grid, and one run for each rule and size, at the rate that the rule derives from the smallest size."""
    maps = [{"name": name, **_map_data(RateStudy(grid, emit))} for name, grid in GRIDS.items()]
    return {"seeds": list(SEEDS), "as_good": MAX_LOSS_RATIO, "maps": maps}


def _map_data(study: RateStudy) -> dict[str, Any]:
    grid = study.grid
    base = study.best(grid.sizes[0])
    rules = rules_of(noise_scale_of(base))
    if base.optimizer == "AdamW":
        rules |= {"sqrt, betas kept": library_rule("sqrt", "steps")}
        del rules["memory"]  # linear scaling with rescaled betas is not a common rule
    return {
        "epochs": base.epochs,
        "batch_sizes": list(grid.sizes),
        "rates": list(grid.rates),
        "losses": [[study.losses(study.at(size, rate)) for size in grid.sizes] for rate in grid.rates],
        "best_rates": [study.best(size).learning_rate for size in grid.sizes],
        "rules": [
            {
                "name": name,
                "as_good_to": study.largest_tuned_size(rule),
                "points": [
                    {"batch_size": run.batch_size, "learning_rate": run.learning_rate, "losses": study.losses(run)}
                    for run in (rule(base, size) for size in grid.sizes)
                ],
            }
            for name, rule in rules.items()
        ],
    }


EXPERIMENT = Experiment(
    name="rates_by_batch",
    question="Which learning rate is best at each batch size, and which rate does each rule choose?",
    run=run,
    seconds=150,
    runs_here=False,
    tolerance=0.1,
)
