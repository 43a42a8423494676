"""Common claims about batch size, and their measurements."""

import math
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from anybatch_guide.claims import rules
from anybatch_guide.claims.claim import Claim, Number, Numbers
from anybatch_guide.claims.rules import RULES
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.experiments import sharp_minima
from anybatch_guide.experiments.batch_strategies import STEPS, variances
from anybatch_guide.experiments.rates_by_batch import GRIDS, RateStudy, rules_of
from anybatch_guide.experiments.sharp_minima import BASE, SEEDS
from anybatch_guide.study import (
    MICRO_BATCH_SIZE,
    StudyRun,
    engine_of,
    evaluate_held_out,
    held_out_loss,
    new_model,
    noise_scale_of,
    steps_of,
)

TARGET = 0.3
"""Target of the held-out loss: training stops when it is reached."""
EVALUATE_EVERY = 128
"""Number of samples between evaluations of the held-out loss; rounded down to whole steps, at least one step."""
RATES = {16: (0.02, 0.04, 0.08), 64: (0.08, 0.16, 0.32), 256: (0.16, 0.32, 0.64)}
"""Learning rates to try at each batch size."""


def larger_batch(emit: Emit) -> Numbers:
    """Train with three batch sizes, each at its best rate, until the held-out loss reaches a target."""
    best: dict[int, TargetCost] = {}
    for done, (size, rates) in enumerate(RATES.items()):
        emit_progress(emit, done, len(RATES) + 1, f"batches of {size}")
        best[size] = min(cost_to_target(replace(BASE, batch_size=size, learning_rate=rate)) for rate in rates)
    smallest, *larger = RATES
    emit_progress(emit, len(RATES), len(RATES) + 1, f"batches of {larger[-1]}, accumulated")
    large_run = replace(BASE, batch_size=larger[-1], learning_rate=best[larger[-1]].rate)
    accumulated = cost_to_target(large_run, micro_batch_size=smallest)
    return {
        **{f"steps_{size}": cost.steps for size, cost in best.items()},
        **{f"samples_{size}": cost.samples for size, cost in best.items()},
        **{f"time_{size}": best[size].seconds / best[smallest].seconds for size in larger},
        "time_accumulated": accumulated.seconds / best[smallest].seconds,
    }


class TargetCost(NamedTuple):
    """Mean cost of reaching the target, over seeds; instances are ordered by steps first."""

    steps: float
    samples: float
    seconds: float
    rate: float


def cost_to_target(run: StudyRun, micro_batch_size: int = MICRO_BATCH_SIZE) -> TargetCost:
    """Return the cost of reaching the target; infinite if a seed never reaches it. Seconds are CPU time."""
    results = [_cost_to_target(replace(run, seed=seed), micro_batch_size) for seed in SEEDS]
    steps, samples, seconds = (statistics.fmean(values) for values in zip(*results, strict=True))
    return TargetCost(steps, samples, seconds, run.learning_rate)


def _cost_to_target(run: StudyRun, micro_batch_size: int) -> tuple[float, float, float]:
    model, samples, seconds = new_model(run), 0, 0.0
    interval = max(1, EVALUATE_EVERY // run.batch_size)
    with engine_of(run, model, micro_batch_size=micro_batch_size) as engine:
        for number, batch in enumerate(steps_of(run), start=1):
            begin = time.process_time()
            engine.step(batch)
            seconds += time.process_time() - begin
            samples += len(batch["targets"])
            if number % interval == 0 and evaluate_held_out(model, run)[0] <= TARGET:
                return number, samples, seconds
    return math.inf, math.inf, math.inf


def one_rule(emit: Emit) -> Numbers:
    """Return each rule's worst held-out loss as a multiple of the loss with the best rate, in three cases."""
    worst_ratios = {}
    for name, grid in GRIDS.items():
        study = RateStudy(grid, emit)
        by_rule = rules_of(noise_scale_of(study.best(grid.sizes[0])))
        for rule in RULES:
            worst = max(study.loss_ratio(by_rule[rule], size) for size in grid.sizes[1:])
            worst_ratios[f"{rule}_{name.replace(', ', '_').lower()}"] = worst
    return worst_ratios


def less_noise(emit: Emit) -> Numbers:
    """Compare the gradient variance and the final loss of batches of 16 and 128 samples."""
    layers, _ = variances(30, emit)
    small = replace(BASE, epochs=4)
    rates = {"small": (0.02, 0.04, 0.08), "large": (0.08, 0.16, 0.32)}
    ways = {
        "loss_small": (small, rates["small"]),
        "loss_same_samples": (replace(small, batch_size=128), rates["large"]),
        "loss_same_steps": (replace(small, batch_size=128, epochs=4 * 8), rates["large"]),
    }
    numbers = {"noise_ratio": layers["native"]["all parameters"] / layers["small"]["all parameters"] * STEPS}
    for done, (name, (run, candidates)) in enumerate(ways.items()):
        emit_progress(emit, done, len(ways), name)
        numbers[name] = min(
            statistics.fmean(held_out_loss(replace(run, learning_rate=rate, seed=seed)) for seed in SEEDS)
            for rate in candidates
        )
    return numbers


def sharp(emit: Emit) -> Numbers:
    """Measure the largest eigenvalue and the accuracy after training with batches of 16 and 256."""
    numbers: dict[str, float] = {}
    ways = list(sharp_minima.ways((256,)))
    for done, (way, run) in enumerate(ways):
        emit_progress(emit, done, len(ways), way)
        results = [sharp_minima.measure_minimum(replace(run, seed=seed)) for seed in SEEDS]
        name = way.replace(",", "").replace(" ", "_")
        numbers[f"eigenvalue_{name}"] = statistics.fmean(end["eigenvalue"] for end in results)
        numbers[f"accuracy_{name}"] = 100 * statistics.fmean(end["accuracy"] for end in results)
    return numbers


_RULES = {"none": "unchanged rate", "linear": "linear", "sqrt": "square root", "gain": "noise gain"}
_CASES = {"digits_sgd": "digits, SGD", "digits_adamw": "digits, AdamW", "text_sgd": "text, SGD"}

BATCH_SIZE_CLAIMS = (
    Claim(
        name="larger_batch",
        side="batch_size",
        title="A larger batch",
        statement="Training is faster with a larger batch.",
        how=(
            "SGD trains a small network on digits until the held-out loss is 0.3, with the best of three learning "
            "rates for each batch size; means over two seeds. Time is CPU time on one thread."
        ),
        measure=larger_batch,
        numbers={
            **{f"steps_{size}": Number(f"steps, batches of {size}") for size in (16, 64, 256)},
            **{f"samples_{size}": Number(f"samples, batches of {size}") for size in (16, 64, 256)},
            **{f"time_{size}": Number(f"time, batches of {size} / 16", "x", noisy=True) for size in (64, 256)},
            "time_accumulated": Number("time, batches of 16 x 16 / 16", "x", noisy=True),
        },
        rule=rules.larger_batch,
        rule_in_words=(
            "False: a larger batch does not need fewer steps. True: it needs at most 1.1 times the samples of the "
            "smallest one. True with a condition: otherwise."
        ),
        texts={
            "only_if": (
                "To reach a held-out loss of 0.3, batches of 256 need {steps_256} steps instead of the {steps_16} of "
                "batches of 16, but {samples_256} samples instead of {samples_16}. (The last batch of an epoch is "
                "smaller, so this is not exactly steps times batch size.) Batches of 64 need {steps_64} steps and "
                "{samples_64} samples. So training is faster only if a sample costs less in a larger batch: on more "
                "devices, or if the fixed cost of a step or micro-batch is high, as with this small network on one "
                "thread. In one pass, batches of 64 take {time_64} the time, and batches of 256 {time_256}. In "
                "micro-batches of 16, batches of 256 take {time_accumulated}."
            ),
        },
        seconds=25,
        tolerance=0.1,
    ),
    Claim(
        name="one_rule",
        side="batch_size",
        title="One rule",
        statement="One rule scales the learning rate to any batch size.",
        how=(
            "Each rule scales the best learning rate of the smallest batch to batches up to 64 times as large. The "
            "number is the held-out loss / the loss with the best rate. Digits with SGD and AdamW, text with SGD."
        ),
        measure=one_rule,
        numbers={
            f"{rule}_{case}": Number(f"{words}, {where}: worst case", "x")
            for case, where in _CASES.items()
            for rule, words in _RULES.items()
        },
        rule=rules.one_rule,
        rule_in_words=(
            "True: the unchanged rate, linear scaling or square-root scaling is within 1.25 times the best loss in all "
            "three cases. True with a condition: none of them is, but the noise gain is. False: otherwise."
        ),
        texts={
            "only_if": (
                "In these three cases, only a rule that uses the measured noise of the gradient works at all sizes: "
                "linear scaling works for digits with SGD in batches of 256, but not of 1,024. The following "
                "numbers are for digits with SGD, digits with AdamW, and text with SGD. In the worst case, the loss "
                "with linear scaling is {linear_digits_sgd}, {linear_digits_adamw} and {linear_text_sgd} the loss "
                "with the best rate. With square-root scaling it is {sqrt_digits_sgd}, {sqrt_digits_adamw} and "
                "{sqrt_text_sgd}, and with an unchanged rate {none_digits_sgd}, {none_digits_adamw} and "
                "{none_text_sgd}. With the noise gain, measured in the middle of a run, it is {gain_digits_sgd}, "
                "{gain_digits_adamw} and {gain_text_sgd}; but in the larger study, this rule fails at some sizes too."
            ),
        },
        seconds=150,
        tolerance=0.1,
        runs_here=False,
    ),
    Claim(
        name="less_noise",
        side="batch_size",
        title="Less noise",
        statement="A larger batch has less gradient noise, so training converges better.",
        how=(
            "Variance of the gradients of 16 and of 128 digits; held-out losses after four epochs of both, and after "
            "equally many steps, each with the best of three rates; means over two seeds."
        ),
        measure=less_noise,
        numbers={
            "noise_ratio": Number("variance with 128 / expected (1/8 of the variance with 16)", "x"),
            "loss_small": Number("held-out loss, batches of 16"),
            "loss_same_samples": Number("held-out loss, batches of 128, same samples"),
            "loss_same_steps": Number("held-out loss, batches of 128, same steps"),
        },
        rule=rules.less_noise,
        rule_in_words=(
            "False: the variance is more than 1.25 times the expected one, or the loss after the same number of steps "
            "is not lower. True: it is also lower after the same number of samples. True with a condition: otherwise."
        ),
        texts={
            "only_if": (
                "Only if both runs make the same number of steps: then the loss on held-out data is {loss_same_steps} "
                "instead of {loss_small}, but the large batches have used eight times the samples. After the same "
                "number of samples, the loss with large batches is {loss_same_samples}. There is less noise: the "
                "variance is {noise_ratio} the expected eighth."
            ),
        },
        seconds=30,
        tolerance=0.1,
    ),
    Claim(
        name="sharp",
        side="batch_size",
        title="Sharp minima",
        statement="Larger batches converge to sharp minima, which generalise worse.",
        how=(
            "The largest eigenvalue of the Hessian over all training digits, and the held-out accuracy, after SGD with "
            "batches of 16 and 256; means over two seeds."
        ),
        measure=sharp,
        numbers={
            f"{number}_{way}": Number(f"{words}, {what}", unit)
            for way, what in {
                "base": "batches of 16",
                "same_rate": "256 at the same rate",
                "scaled_rate": "256 at the scaled rate",
                "scaled_rate_same_steps": "256 at the scaled rate, same number of steps",
            }.items()
            for number, words, unit in (("eigenvalue", "largest eigenvalue", ""), ("accuracy", "accuracy", "%"))
        },
        rule=rules.sharp,
        rule_in_words=(
            "True: the eigenvalue is more than 1.25 times as large at the same rate, at the scaled rate, and after the "
            "same number of steps. False: it is not even at the same rate. True with a condition: otherwise."
        ),
        texts={
            "only_if": (
                "Only if the large-batch run has made less progress: at the same rate, the eigenvalue changes from "
                "{eigenvalue_base} to {eigenvalue_same_rate}, and the accuracy from {accuracy_base} to "
                "{accuracy_same_rate}. At the scaled rate it is {eigenvalue_scaled_rate} ({accuracy_scaled_rate}). "
                "After the same number of steps, on more samples, it is {eigenvalue_scaled_rate_same_steps} "
                "({accuracy_scaled_rate_same_steps}). It depends on the learning rate and the progress of a run more "
                "than on the batch size."
            ),
        },
        seconds=45,
        tolerance=0.1,
    ),
)
