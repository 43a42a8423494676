"""Findings about loops: a table with the text for each code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

FINDINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "never_steps": (
            "No optimizer with the model's parameters makes a step.",
            "Call optimizer.step() once per window, on an optimizer for model.parameters().",
        ),
        "does_not_end": (
            "The loop did not end and was stopped; the other findings are about the steps before that.",
            "Give the loop a parameter epochs or max_steps, and end it there.",
        ),
        "steps_every_micro_batch": (
            "The optimizer steps after every micro-batch, so nothing is accumulated.",
            "Step where (i + 1) % accumulation_steps == 0, and at the end of the epoch.",
        ),
        "window_size": (
            "A step has the wrong number of micro-batches, and does not end an epoch.",
            "Step where (i + 1) % accumulation_steps == 0, not where i % accumulation_steps == 0.",
        ),
        "zero_grad_missing": (
            "Gradients are not cleared after a step, so the next step uses them again.",
            "Call optimizer.zero_grad() after every optimizer.step(), also after the last one of an epoch.",
        ),
        "zero_grad_inside_window": (
            "Gradients are cleared between the micro-batches of a window, so only the last one counts.",
            "Call zero_grad() right after optimizer.step(), under the same condition.",
        ),
        "zero_grad_before_step": (
            "Gradients are cleared after the last backward and before optimizer.step().",
            "Call zero_grad() after optimizer.step(), not before it.",
        ),
        "tail_carried": (
            "The last micro-batches of an epoch are added to a step of the next epoch, or lost after the last one.",
            "Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).",
        ),
        "tail_dropped": (
            "The last micro-batches of an epoch are never part of a step.",
            "Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).",
        ),
        "not_divided": (
            "The mean losses of the micro-batches are added and not divided, so the gradient is too large.",
            "Divide the loss sum of each micro-batch by the number of samples in its window.",
        ),
        "constant_divisor": (
            "Every loss is divided by the same number, also in a step with fewer micro-batches.",
            "Divide the loss sum of each micro-batch by the number of samples that its window really has.",
        ),
        "constant_factor": (
            "Every gradient is the gradient of the un-split batch times the same number.",
            "Divide once, by the number of items that the loss is a mean over.",
        ),
        "wrong_total": (
            "The gradients are too large or too small, by different factors.",
            "Divide loss sums by the items that the loss is a mean over, counted over the window.",
        ),
        "mean_of_means": (
            "Micro-batches of different sizes count equally, so a sample in a smaller one counts more.",
            "Add up loss sums and divide by the number of samples in the window, not by micro-batches.",
        ),
        "mean_of_token_means": (
            "Micro-batches with different numbers of targets count equally, so a target among few counts more.",
            "Add up the losses of all targets and divide by the number of targets in the window.",
        ),
        "mean_of_weighted_means": (
            "The loss is a mean over class weights or unmasked samples, and these means count equally.",
            "Use reduction='sum' and divide by the total over the window, such as weight[targets].sum().",
        ),
        "uneven_ranks": (
            "Ranks with shares of different sizes count equally, so a sample in a smaller share counts more.",
            "Divide by the number of samples of all ranks; multiply by the number of ranks if gradients are averaged.",
        ),
        "uneven_weights": (
            "The samples of a step have different weights.",
            "Divide loss sums by the items that the loss is a mean over, counted over the window.",
        ),
        "not_a_weighted_sum": (
            "A gradient is not a weighted sum of its samples' own gradients: the loss compares samples.",
            "Average a ratio (dice, F1) over samples; for a comparison of samples, use ab.joint(encode, loss).",
        ),
        "draws_random_numbers": (
            "A gradient depends on random numbers of the loop (mixup, noise), so it cannot be compared.",
            "Switch the random part off and check again.",
        ),
        "not_unscaled": (
            "A gradient depends on the scale of GradScaler: it is clipped or used while scaled.",
            "Call scaler.unscale_(optimizer) before clipping, and step by scaler.step(optimizer).",
        ),
        "unexplained": (
            "A gradient differs from that of the un-split batch for an unknown reason.",
            "Look at the lines between the backward and optimizer.step().",
        ),
        "samples_duplicated": (
            "Samples occur more than once per epoch. DistributedSampler repeats some to make the ranks' shares equal.",
            "Use shares of different lengths and divide by the number of samples of all ranks, as ab.batches does.",
        ),
        "ranks_share_samples": (
            "Every rank trains on the same samples, so a second rank adds nothing.",
            "Give the loader a DistributedSampler (and call set_epoch), or each rank a part of the data.",
        ),
        "samples_missing": (
            "Samples are never trained on.",
            "Look at drop_last, at an early break, and at how ranks share the data.",
        ),
        "schedules_every_micro_batch": (
            "The learning rate changes between the micro-batches of one step: the schedule runs too fast.",
            "Call scheduler.step() right after optimizer.step(), under the same condition.",
        ),
        "clips_every_micro_batch": (
            "Gradients are clipped after every micro-batch, before they are complete.",
            "Clip right before optimizer.step(), under the same condition.",
        ),
        "clips_after_step": (
            "Gradients are clipped after optimizer.step(), so clipping has no effect.",
            "Clip right before optimizer.step().",
        ),
        "logs_last_loss": (
            "The returned loss is the loss of the last micro-batch, not of the window.",
            "Add up loss sums over the window, and divide by its number of samples.",
        ),
        "not_reduced": (
            "Ranks step with different gradients, so their parameters drift apart.",
            "Reduce gradients before optimizer.step(); leave no_sync() in the last micro-batch of every window.",
        ),
        "reduces_every_micro_batch": (
            "Gradients are reduced after every micro-batch: correct, but slow.",
            "Run all micro-batches of a window but the last inside model.no_sync(), forward and backward.",
        ),
        "no_sync_around_backward_only": (
            "Gradients are reduced after every micro-batch, because the forward is outside no_sync().",
            "Put the forward inside no_sync() too: DistributedDataParallel decides there whether to reduce.",
        ),
    }
)
"""Code -> the fault, and the fix."""
HARMLESS = frozenset(
    {
        *("does_not_end", "logs_last_loss", "schedules_every_micro_batch", "clips_after_step"),
        *("reduces_every_micro_batch", "no_sync_around_backward_only"),
    }
)
"""Codes of faults that leave the gradients correct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFinding:
    """A fault of a loop.

    Attributes:
        code: a key of `FINDINGS`.
        what: the fault, in a sentence.
        found: the value that shows it.
        expected: the value in a correct loop.
        file: name of the loop's file.
        lines: lines of that file, where they are known.
        change: the fix.
        in_gradient: whether it makes gradients wrong; otherwise it only costs time or misleads.
    """

    code: str
    what: str
    found: str
    expected: str
    file: str
    lines: tuple[int, ...]
    change: str
    in_gradient: bool

    @property
    def where(self) -> str:
        """The file and lines."""
        return f"{self.file}:{', '.join(map(str, self.lines))}" if self.lines else self.file

    def __str__(self) -> str:
        """Return it as a paragraph."""
        values = f"found {self.found}; expected {self.expected}"
        return "\n  ".join((f"{self.code} ({self.where})", self.what, values, self.change))


def make_finding(code: str, found: str, expected: str, path: str | None, lines: Sequence[int | None]) -> LoopFinding:
    """Return a finding about the loop of a file, at up to four lines."""
    what, change = FINDINGS[code]
    return LoopFinding(
        code=code,
        what=what,
        found=found,
        expected=expected,
        file="the loop" if path is None else Path(path).name,
        lines=tuple(sorted({line for line in lines if line is not None})[:4]),
        change=change,
        in_gradient=code not in HARMLESS,
    )


def fraction(weight: float) -> str:
    """Return a weight as a fraction such as 1/12 where it is one, otherwise with four digits."""
    near = Fraction(weight).limit_denominator(400)
    if near.numerator != 0 and abs(float(near) - weight) <= 1e-6 * abs(weight):
        return str(near)
    return f"{weight:.4g}"
