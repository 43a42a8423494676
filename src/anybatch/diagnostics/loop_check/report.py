"""The report on a loop: findings, a verdict, and a table of its windows (the micro-batches of an optimizer step)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import groupby

from anybatch.core.units import columns

_TEXTS = """\
never_steps: No optimizer with the model's parameters makes a step.
    Call optimizer.step() once per window of micro-batches, on an optimizer for model.parameters().
does_not_end: The loop did not end and was stopped; the other findings are about the steps before that.
    Give the loop a parameter epochs or max_steps, and end it there.
steps_every_micro_batch: The optimizer steps after every micro-batch, so nothing is accumulated.
    Step where (i + 1) % accumulation_steps == 0, and at the end of the epoch.
window_size: A step has the wrong number of micro-batches, and does not end an epoch.
    Step where (i + 1) % accumulation_steps == 0, not where i % accumulation_steps == 0.
zero_grad_missing: Gradients are not cleared after a step, so the next step uses them again.
    Call optimizer.zero_grad() after every optimizer.step(), also after the last one of an epoch.
zero_grad_inside_window: Gradients are cleared between the micro-batches of a window, so only the last one counts.
    Call zero_grad() right after optimizer.step(), under the same condition.
zero_grad_before_step: Gradients are cleared after the last backward and before optimizer.step().
    Call zero_grad() after optimizer.step(), not before it.
tail_carried: The last micro-batches of an epoch are added to the next epoch; those of the last epoch are lost.
    Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).
tail_dropped: The last micro-batches of an epoch are never part of a step.
    Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).
not_divided: The mean losses of the micro-batches are added and not divided, so the gradient is too large.
    Divide the loss sum of each micro-batch by the number of samples in its window.
constant_divisor: Every loss is divided by the same number, also in a step with fewer micro-batches.
    Divide the loss sum of each micro-batch by the number of samples that its window really has.
constant_factor: Every gradient is the gradient of the unsplit batch times the same number.
    Divide once, by the number of items that the loss is a mean over.
wrong_total: The gradients are too large or too small, by different factors.
    Divide loss sums by the items that the loss is a mean over, counted over the window.
mean_of_means: Micro-batches of different sizes count equally, so a sample in a smaller one counts more.
    Add up loss sums and divide by the number of samples in the window, not by micro-batches.
mean_of_token_means: Micro-batches with different numbers of targets count equally: with few targets, each counts more.
    Add up the losses of all targets and divide by the number of targets in the window.
mean_of_weighted_means: Class-weighted or masked means count equally, although micro-batches differ in total weight.
    Use reduction='sum' and divide by the total over the window, such as weight[targets].sum().
uneven_ranks: Ranks with shares of different sizes count equally, so a sample in a smaller share counts more.
    Divide by the number of samples of all ranks; multiply by the number of ranks if gradients are averaged.
uneven_weights: The samples of a step have different weights.
    Divide loss sums by the items that the loss is a mean over, counted over the window.
not_a_weighted_sum: A gradient is not a weighted sum of its samples' own gradients: the loss compares samples.
    Average ratios (dice, F1) over samples, whiten over the window, or compare samples by ab.joint(encode, loss).
draws_random_numbers: A gradient depends on random numbers of the loop (mixup, noise), so it cannot be compared.
    Switch the random part off and check again.
not_unscaled: A gradient depends on the scale of GradScaler: it is clipped or used while scaled.
    Call scaler.unscale_(optimizer) before clipping, and step by scaler.step(optimizer).
unexplained: A gradient differs from the unsplit gradient for an unknown reason.
    Look at the lines between the backward and optimizer.step().
samples_duplicated: Samples occur more than once per epoch, as DistributedSampler does to make shares equal.
    Use shares of different lengths and divide by the number of samples of all ranks, as ab.batches does.
ranks_share_samples: Every rank trains on the same samples, so a second rank adds nothing.
    Give the loader a DistributedSampler (and call set_epoch), or each rank a part of the data.
samples_missing: Samples are never trained on.
    Look at drop_last, at an early break, at detach(), and at how ranks share the data.
schedules_every_micro_batch: The learning rate changes inside a window: the schedule runs too fast.
    Call scheduler.step() right after optimizer.step(), under the same condition.
clips_every_micro_batch: Gradients are clipped after every micro-batch, before they are complete.
    Clip right before optimizer.step(), under the same condition.
clips_after_step: Gradients are clipped after optimizer.step(), so clipping has no effect.
    Clip right before optimizer.step().
not_reduced: Ranks step with different gradients, so their parameters drift apart.
    Reduce gradients before optimizer.step(); do not use no_sync() for the last micro-batch of a window.
reduces_every_micro_batch: Gradients are reduced after every micro-batch: correct, but slow.
    Run all micro-batches of a window but the last inside model.no_sync(), forward (which decides) and backward.
"""
FINDINGS: Mapping[str, tuple[str, str]] = {
    code: (fault, fix) for code, fault, fix in re.findall(r"^(\w+): (.+)\n    (.+)$", _TEXTS, re.MULTILINE)
}
"""Code -> (the fault, the fix)."""
HARMLESS = frozenset({"does_not_end", "schedules_every_micro_batch", "clips_after_step", "reduces_every_micro_batch"})
"""Codes of faults that leave the gradients correct."""
_MAX_PRINTED_STEPS = 8


class LoopVerdict(StrEnum):
    """How the gradients of a loop compare with unsplit gradients."""

    EXACT = "exact"
    CONSTANT_FACTOR = "equal up to a constant factor"
    UNDECIDED = "cannot be judged"
    NOT_EQUAL = "not equal"


_VERDICTS = {
    frozenset[str](): LoopVerdict.EXACT,
    frozenset({"constant_factor"}): LoopVerdict.CONSTANT_FACTOR,
    frozenset({"draws_random_numbers"}): LoopVerdict.UNDECIDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFinding:
    """A fault of a loop."""

    code: str  # a key of `FINDINGS`
    found: str
    expected: str
    file: str = "the loop"
    lines: tuple[int, ...] = ()  # lines of `file`; empty if unknown

    @property
    def what(self) -> str:
        """The fault, in a sentence."""
        return FINDINGS[self.code][0]

    @property
    def change(self) -> str:
        """The fix."""
        return FINDINGS[self.code][1]

    @property
    def in_gradient(self) -> bool:
        """Whether the fault makes gradients wrong; other faults only cost time or mislead."""
        return self.code not in HARMLESS

    def __str__(self) -> str:
        """Return the finding as a paragraph."""
        where = f"{self.file}:{', '.join(map(str, self.lines))}" if self.lines else self.file
        values = f"found {self.found}; expected {self.expected}"
        return "\n  ".join((f"{self.code} ({where})", self.what, values, self.change))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches and weights of one optimizer step."""

    step: int  # from 1
    micro_batches: tuple[tuple[int, ...], ...]  # samples of each forward, rank by rank
    found: Mapping[int, float]  # sample -> weight in the optimizer's gradient, without zeros
    expected: Mapping[int, float]  # sample -> weight in the unsplit batch, without samples that have no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReport:
    """The report on a training loop."""

    loop: str  # name of the loop
    findings: tuple[LoopFinding, ...]  # faults, most important first; empty for a correct loop
    windows: tuple[Window, ...]  # the optimizer steps of two epochs
    accumulation_steps: int  # the number given to the loop; if it has no such parameter, the number that it used
    num_ranks: int  # number of ranks that ran the loop
    remarks: tuple[str, ...] = ()  # aspects that could not be judged, and why

    @property
    def verdict(self) -> LoopVerdict:
        """The verdict on the gradients."""
        wrong = frozenset(finding.code for finding in self.findings if finding.in_gradient)
        return _VERDICTS.get(wrong, LoopVerdict.NOT_EQUAL)

    @property
    def codes(self) -> frozenset[str]:
        """The codes of the findings."""
        return frozenset(finding.code for finding in self.findings)

    def __str__(self) -> str:
        """Return verdict, findings and table, as `anybatch check --loop` prints them."""
        ranks = f" on {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        number = len(self.findings)
        count = f"{number or 'no'} finding{'s' * (number != 1)}"
        head = f"{self.loop}: {self.verdict} (accumulation steps {self.accumulation_steps}{ranks}); {count}"
        return "\n\n".join([head, *map(str, self.findings), *self.remarks, self.table()])

    def table(self) -> str:
        """Return the steps as a table: samples, their weights, and the expected weights."""
        rows = [("step", "samples", "weight", "expected")]
        for window in self.windows[:_MAX_PRINTED_STEPS]:
            rows += [("" if index else str(window.step), *row) for index, row in enumerate(_rows(window))]
        lines = columns(rows, num_left=4)
        if len(self.windows) > _MAX_PRINTED_STEPS:
            lines.append(f"... and {len(self.windows) - _MAX_PRINTED_STEPS} more steps")
        return "\n".join(lines)


def _rows(window: Window) -> list[tuple[str, str, str]]:
    """Return (samples, weight, expected weight) for each group of samples with the same weights."""
    groups: dict[tuple[str, str], list[int]] = {}
    for sample in sorted(window.found.keys() | window.expected.keys()):
        weights = fraction(window.found.get(sample, 0.0)), fraction(window.expected.get(sample, 0.0))
        groups.setdefault(weights, []).append(sample)
    return [(ranges(samples), *weights) for weights, samples in groups.items()]


def fraction(weight: float) -> str:
    """Return a weight as a fraction such as 1/12 if it nearly equals such a fraction, else with four digits."""
    near = Fraction(weight).limit_denominator(400)
    if near.numerator != 0 and abs(float(near) - weight) <= 1e-6 * abs(weight):
        return str(near)
    return f"{weight:.4g}"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges: 0-3, 8."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
