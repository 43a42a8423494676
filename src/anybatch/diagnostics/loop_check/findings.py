"""Findings about loops: a code and values, and a table with the text for each code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a finding, with places for its values."""

    what: str
    found_and_expected: tuple[str, str]
    change: str
    in_gradient: bool = True
    is_undecided: bool = False


_STEP_AT_THE_END = "Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader)."
_UNEVEN = "weights {low} and {high} in step {step}", "{even} each"
_TOTAL = "weights of step {step} add up to {total}", "1"

FINDINGS: Mapping[str, _Text] = MappingProxyType(
    {
        "never_steps": _Text(
            "No optimizer with the model's parameters makes a step.",
            ("0 steps in two epochs", "one per window"),
            "Call optimizer.step() once per window, on an optimizer for model.parameters().",
        ),
        "does_not_end": _Text(
            "The loop did not end and was stopped; the other findings are about the steps before that.",
            ("still running after {forwards} forwards", "two passes over 31 samples"),
            "Give the loop a parameter epochs or max_steps, and end it there.",
            in_gradient=False,
        ),
        "steps_every_micro_batch": _Text(
            "The optimizer steps after every micro-batch, so nothing is accumulated.",
            ("1 micro-batch per step", "{expected}"),
            "Step where (i + 1) % accumulation_steps == 0, and at the end of the epoch.",
        ),
        "window_size": _Text(
            "Step {step} has the wrong number of micro-batches, and does not end an epoch.",
            ("{size} micro-batches", "{expected}"),
            "Step where (i + 1) % accumulation_steps == 0, not where i % accumulation_steps == 0.",
        ),
        "zero_grad_missing": _Text(
            "Gradients are not cleared after a step, so the next step uses them again.",
            ("old gradients in {steps} steps, first in step {step}", "none"),
            "Call optimizer.zero_grad() after every optimizer.step(), also after the last one of an epoch.",
        ),
        "zero_grad_inside_window": _Text(
            "Gradients are cleared between the micro-batches of a window, so only the last one counts.",
            ("1 micro-batch in the gradient", "{expected}"),
            "Call zero_grad() right after optimizer.step(), under the same condition.",
        ),
        "zero_grad_before_step": _Text(
            "Gradients are cleared after the last backward and before optimizer.step().",
            ("no gradient in {steps} steps", "the gradient of the window"),
            "Call zero_grad() after optimizer.step(), not before it.",
        ),
        "tail_carried": _Text(
            "The last micro-batches of an epoch are added to step {step}, in the next epoch. "
            "After the last epoch they are lost.",
            ("{size} micro-batches in step {step}", "at most {expected}"),
            _STEP_AT_THE_END,
        ),
        "tail_dropped": _Text(
            "The last micro-batches of an epoch are never part of a step.",
            ("{samples} samples of the last window without effect", "0"),
            _STEP_AT_THE_END,
        ),
        "not_divided": _Text(
            "The mean losses of the micro-batches are added and not divided, so the gradient is too large.",
            _TOTAL,
            "Divide the loss sum of each micro-batch by the number of samples in its window.",
        ),
        "constant_divisor": _Text(
            "Every loss is divided by the same number, also in step {step}, which has only {size} micro-batches.",
            _TOTAL,
            "Divide the loss sum of each micro-batch by the number of samples that its window really has.",
        ),
        "constant_factor": _Text(
            "Every gradient is the gradient of the un-split batch times the same number.",
            ("weights add up to {total}", "1"),
            "Divide once, by the number of items that the loss is a mean over.",
        ),
        "wrong_total": _Text(
            "The gradients are too large or too small, by different factors.",
            _TOTAL,
            "Divide the loss sum of each micro-batch by the items that the loss is a mean over, counted over the "
            "window: samples, targets, or the class weights of the targets.",
        ),
        "mean_of_means": _Text(
            "Micro-batches of different sizes count equally, so a sample in a smaller one counts more.",
            _UNEVEN,
            "Add up loss sums and divide by the number of samples in the window, not by micro-batches.",
        ),
        "mean_of_token_means": _Text(
            "Micro-batches with different numbers of targets count equally, so a target among few counts more.",
            _UNEVEN,
            "Add up the losses of all targets and divide by the number of targets in the window.",
        ),
        "mean_of_weighted_means": _Text(
            "Each micro-batch's loss is a mean over class weights or masked samples, and these means count equally.",
            _UNEVEN,
            "Use reduction='sum' and divide by the total over the window, such as weight[targets].sum() of all its "
            "micro-batches for class weights.",
        ),
        "uneven_ranks": _Text(
            "Ranks with shares of different sizes count equally, so a sample in a smaller share counts more.",
            _UNEVEN,
            "Divide by the number of samples of all ranks; multiply by the number of ranks if gradients are averaged.",
        ),
        "uneven_weights": _Text(
            "The samples of a step have different weights.",
            _UNEVEN,
            "Add up loss sums and divide by the items that the loss is a mean over, counted over the window.",
        ),
        "not_a_weighted_sum": _Text(
            "The gradient of step {step} is not a weighted sum of its samples' gradients in one batch: the loss "
            "depends on other samples of the micro-batch, so no divisor corrects it.",
            ("another direction", "a weighted sum"),
            "Compute a ratio over the batch (dice, F1) for each sample, and average. A comparison of samples "
            "(contrastive) needs the outputs of the whole window: use ab.joint(encode, loss).",
        ),
        "draws_random_numbers": _Text(
            "The gradient of step {step} depends on random numbers that the loop draws (mixup, noise, dropout), so "
            "it cannot be compared with the un-split batch.",
            ("another gradient from another seed", "the same"),
            "Switch the random part off and check again.",
            is_undecided=True,
        ),
        "not_unscaled": _Text(
            "The gradient of step {step} depends on the scale of GradScaler: it is clipped or used while scaled.",
            ("a gradient {ratio} times as large with scale 1024 as with scale 1", "the same"),
            "Call scaler.unscale_(optimizer) before clipping, and step by scaler.step(optimizer).",
        ),
        "unexplained": _Text(
            "The gradient of step {step} differs from that of the un-split batch for an unknown reason.",
            ("other weights, see the table", "the weights in its last column"),
            "Look at the lines between the backward and optimizer.step().",
        ),
        "samples_duplicated": _Text(
            "Samples are trained on more than once per epoch. On several ranks, DistributedSampler repeats samples "
            "to make the shares equal.",
            ("samples {samples} twice", "each once"),
            "Use shares of different lengths and divide by the number of samples of all ranks, as ab.batches does.",
        ),
        "ranks_share_samples": _Text(
            "Every rank trains on the same samples, so a second rank adds nothing.",
            ("{shared} of {total} samples on more than one rank", "none"),
            "Give the loader a DistributedSampler (and call set_epoch), or each rank a part of the data.",
        ),
        "samples_missing": _Text(
            "Samples are never trained on.",
            ("samples {samples} in no forward", "each once per epoch"),
            "Look at drop_last, at an early break, and at how ranks share the data.",
        ),
        "schedules_every_micro_batch": _Text(
            "The learning rate changes between the micro-batches of one step: the schedule runs too fast.",
            ("{before} and {after} inside one window", "one learning rate per step"),
            "Call scheduler.step() right after optimizer.step(), under the same condition.",
            in_gradient=False,
        ),
        "clips_every_micro_batch": _Text(
            "Gradients are clipped after every micro-batch, before they are complete.",
            ("gradients that change inside a window", "one clipping, before optimizer.step()"),
            "Clip right before optimizer.step(), under the same condition.",
        ),
        "clips_after_step": _Text(
            "Gradients are clipped after optimizer.step(), so clipping has no effect.",
            ("gradients that change after the step", "one clipping, before optimizer.step()"),
            "Clip right before optimizer.step().",
            in_gradient=False,
        ),
        "logs_last_loss": _Text(
            "The returned loss is the loss of the last micro-batch, not of the window.",
            ("{loss}", "{expected}"),
            "Add up loss sums over the window, and divide by its number of samples.",
            in_gradient=False,
        ),
        "not_reduced": _Text(
            "Ranks step with different gradients, so their parameters drift apart.",
            ("different gradients in step {step}", "the same on every rank"),
            "Reduce the gradients before optimizer.step(). With no_sync(): leave it in the micro-batch before "
            "optimizer.step(), also in the last one of an epoch.",
        ),
        "reduces_every_micro_batch": _Text(
            "Gradients are reduced after every micro-batch: correct, but slow.",
            ("{reductions} reductions in step {step}", "1"),
            "Run all micro-batches of a window but the last inside model.no_sync(), forward and backward.",
            in_gradient=False,
        ),
        "no_sync_around_backward_only": _Text(
            "Gradients are reduced after every micro-batch, because the forward is outside no_sync().",
            ("{reductions} reductions in step {step}", "1"),
            "Put the forward inside no_sync() too: DistributedDataParallel decides there whether to reduce.",
            in_gradient=False,
        ),
    }
)
"""Code -> text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFinding:
    """A fault of a loop.

    Attributes:
        code: one of `FINDINGS`.
        values: the numbers in its text.
        file: name of the loop's file.
        lines: lines of that file, where they are known.
    """

    code: str
    values: Mapping[str, object] = field(default_factory=dict)
    file: str = "the loop"
    lines: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The fault, in a sentence."""
        return FINDINGS[self.code].what.format_map(self.values)

    @property
    def found(self) -> str:
        """The value that shows it."""
        return FINDINGS[self.code].found_and_expected[0].format_map(self.values)

    @property
    def expected(self) -> str:
        """The value in a correct loop."""
        return FINDINGS[self.code].found_and_expected[1].format_map(self.values)

    @property
    def change(self) -> str:
        """The fix."""
        return FINDINGS[self.code].change

    @property
    def where(self) -> str:
        """The file and lines."""
        return f"{self.file}:{', '.join(map(str, self.lines))}" if self.lines else self.file

    @property
    def in_gradient(self) -> bool:
        """Whether it makes gradients wrong; otherwise it only costs time or misleads."""
        return FINDINGS[self.code].in_gradient

    @property
    def is_undecided(self) -> bool:
        """Whether it prevents a verdict on the gradients."""
        return FINDINGS[self.code].is_undecided

    def __str__(self) -> str:
        """Return it as a paragraph."""
        values = f"found {self.found}; expected {self.expected}"
        return "\n  ".join((f"{self.code} ({self.where})", self.what, values, self.change))


def fraction(weight: float) -> str:
    """Return a weight as a fraction such as 1/12 where it is one, otherwise with four digits."""
    near = Fraction(weight).limit_denominator(400)
    if near.numerator != 0 and abs(float(near) - weight) <= 1e-6 * abs(weight):
        return str(near)
    return f"{weight:.4g}"
