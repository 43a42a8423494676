"""The findings about loops in words: what, both values, where, what to change."""

from collections.abc import Sequence

from anybatch.diagnostics.loop_check.loop_report import LoopFinding, fraction, ranges


def never_steps(where: str) -> LoopFinding:
    """The optimizer is never stepped."""
    return LoopFinding(
        code="never_steps",
        what="No optimizer that holds the model's parameters makes a step.",
        found="0 steps in two epochs",
        expected="one per window",
        where=where,
        change="Call optimizer.step() once per window, on an optimizer made from this model's parameters.",
    )


def does_not_end(num_forwards: int, where: str) -> LoopFinding:
    """The loop had to be ended."""
    return LoopFinding(
        code="does_not_end",
        what="The loop did not end by itself; what follows is about the steps it had made.",
        found=f"still running after {num_forwards} forwards",
        expected="two passes over 31 samples",
        where=where,
        change="Give the loop a parameter epochs or max_steps, and let it end there.",
        in_gradient=False,
    )


def steps_every_micro_batch(steps_given: int, where: str) -> LoopFinding:
    """The optimizer steps after each micro-batch."""
    return LoopFinding(
        code="steps_every_micro_batch",
        what="The optimizer steps after every micro-batch, so nothing is accumulated.",
        found="1 micro-batch per step",
        expected=f"{steps_given}",
        where=where,
        change="Step where (i + 1) % accumulation_steps == 0, and at the end of the epoch.",
    )


def window_size(step: int, found: int, steps_given: int, where: str) -> LoopFinding:
    """A window that should be full is not."""
    return LoopFinding(
        code="window_size",
        what=f"Step {step} is not made of as many micro-batches as the loop was asked for, and no epoch ends there.",
        found=f"{found} micro-batches",
        expected=f"{steps_given}",
        where=where,
        change="Count from one: step where (i + 1) % accumulation_steps == 0, not where i % accumulation_steps == 0.",
    )


def zero_grad_missing(step: int, number: int, where: str) -> LoopFinding:
    """Gradients stay after a step."""
    return LoopFinding(
        code="zero_grad_missing",
        what="The gradient of one step is still there when the next window begins, and is stepped with again.",
        found=f"old gradients in {number} steps, first in step {step}",
        expected="none",
        where=where,
        change="Call optimizer.zero_grad() after every optimizer.step(), the last one of the epoch included.",
    )


def zero_grad_inside_window(steps_given: int, where: str) -> LoopFinding:
    """Gradients are cleared between micro-batches."""
    return LoopFinding(
        code="zero_grad_inside_window",
        what="Gradients are cleared between the micro-batches of one window: only the last one is stepped with.",
        found="1 micro-batch in the gradient",
        expected=f"{steps_given}",
        where=where,
        change="Move zero_grad() behind optimizer.step(), under the same condition.",
    )


def zero_grad_before_step(number: int, where: str) -> LoopFinding:
    """Gradients are cleared before they are used."""
    return LoopFinding(
        code="zero_grad_before_step",
        what="Gradients are cleared after the last backward and before optimizer.step(), which then has nothing.",
        found=f"no gradient in {number} steps",
        expected="the window's",
        where=where,
        change="Call zero_grad() after optimizer.step(), not before it.",
    )


def tail_carried(step: int, found: int, steps_given: int, where: str) -> LoopFinding:
    """An epoch's rest is added to the next epoch's first window."""
    return LoopFinding(
        code="tail_carried",
        what=f"The last micro-batches of an epoch are not stepped with; step {step}, in the next epoch, has them. "
        "After the last epoch they are lost.",
        found=f"{found} micro-batches in step {step}",
        expected=f"at most {steps_given}",
        where=where,
        change="Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).",
    )


def tail_dropped(num_samples: int, is_cleared: bool, where: str) -> LoopFinding:  # noqa: FBT001 (one of two reasons)
    """An epoch's rest is never stepped with."""
    why = "are cleared without a step" if is_cleared else "are never stepped with"
    return LoopFinding(
        code="tail_dropped",
        what=f"The gradients of the last micro-batches {why}.",
        found=f"{num_samples} samples of the last window without effect",
        expected="0",
        where=where,
        change="Step at the end of the epoch too: if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader).",
    )


def not_divided(step: int, total: float, where: str) -> LoopFinding:
    """Micro-batch means are added up."""
    return LoopFinding(
        code="not_divided",
        what="The micro-batches' mean losses are added and not divided: the step is too long by their number.",
        found=f"weights of step {step} add up to {fraction(total)}",
        expected="1",
        where=where,
        change="Divide every micro-batch's loss sum by the number of samples of its window.",
    )


def constant_divisor(step: int, size: int, divisor: float, total: float, where: str) -> LoopFinding:
    """A partial window is divided by the number of a full one."""
    return LoopFinding(
        code="constant_divisor",
        what=f"Every loss is divided by {divisor:g}, also in step {step}, whose window has {size} micro-batches.",
        found=f"weights of step {step} add up to {fraction(total)}",
        expected="1",
        where=where,
        change="Divide every micro-batch's loss sum by the number of samples its window really has.",
    )


def constant_factor(total: float, where: str) -> LoopFinding:
    """All gradients are too large or too small by one factor."""
    return LoopFinding(
        code="constant_factor",
        what="Every gradient is that of the un-split batch times the same number.",
        found=f"weights add up to {fraction(total)}",
        expected="1",
        where=where,
        change="Divide once, by what the loss is a mean over.",
    )


def wrong_total(step: int, total: float, where: str) -> LoopFinding:
    """Weights add up to something else in each step."""
    return LoopFinding(
        code="wrong_total",
        what="The gradients are too large or too small, and not all by the same number.",
        found=f"weights of step {step} add up to {fraction(total)}",
        expected="1",
        where=where,
        change="Divide every micro-batch's loss sum by what it is a mean over, counted over its window: samples, "
        "targets, or the class weights of these.",
    )


_UNEVEN = {
    "mean_of_means": (
        "Micro-batches of different sizes count the same, so a sample of the smaller one counts more.",
        "Add up loss sums and divide by the window's number of samples, not by micro-batches.",
    ),
    "mean_of_token_means": (
        "Micro-batches with different numbers of targets count the same, so a target among few counts more.",
        "Add up the losses of all targets and divide by the number of targets in the window.",
    ),
    "mean_of_weighted_means": (
        (
            "Each micro-batch's loss is a mean over something else than samples (class weights, a mask), and these "
            "means count the same, so what is in a micro-batch with less of it counts more."
        ),
        (
            "Take the loss as a sum (reduction='sum') and divide it by what the mean is over, added up over the "
            "window: for class weights, weight[targets].sum() of all its micro-batches."
        ),
    ),
    "uneven_ranks": (
        "Ranks with shares of different sizes count the same, so a sample of the smaller one counts more.",
        "Divide by the number of samples of all ranks; multiply by the number of ranks where gradients are averaged.",
    ),
    "uneven_weights": (
        "The samples of one step do not weigh the same.",
        (
            "Add up loss sums and divide by what they are a mean over, counted over the window: samples, targets, or "
            "the class weights of these."
        ),
    ),
}


def uneven(code: str, step: int, pairs: Sequence[tuple[int, str]], expected: str, where: str) -> LoopFinding:
    """Samples of one step weigh differently; `pairs` are (samples of the micro-batch, weight of each)."""
    what, change = _UNEVEN[code]
    found = " and ".join(f"{weight} (micro-batch of {size})" for size, weight in pairs)
    return LoopFinding(
        code=code,
        what=what,
        found=f"weights {found} in step {step}",
        expected=f"{expected} each",
        where=where,
        change=change,
    )


def not_a_weighted_sum(step: int, where: str) -> LoopFinding:
    """The gradient is not made of the samples' own."""
    return LoopFinding(
        code="not_a_weighted_sum",
        what=f"The gradient of step {step} is not a weighted sum of the gradients that its samples have in one batch: "
        "the loss looks across the samples of a micro-batch, so no divisor mends it.",
        found="another direction",
        expected="a weighted sum",
        where=where,
        change="A ratio of sums over the batch (dice, F1): compute it for each sample, and average over samples. "
        "A comparison of samples (contrastive, a covariance): it needs the outputs of the whole window at once, as "
        "ab.joint(encode, loss) gives them.",
    )


def draws_random_numbers(step: int, where: str) -> LoopFinding:
    """Another seed gives another gradient, so windows cannot be compared."""
    return LoopFinding(
        code="draws_random_numbers",
        what=f"The gradient of step {step} depends on random numbers that the loop draws (mixup, noise, dropout of "
        "its own), which another cut draws differently: whether it is that of the un-split batch cannot be said.",
        found="another gradient from another seed",
        expected="the same",
        where=where,
        change="Leave out what is drawn, by a setting say, and check again.",
        is_undecided=True,
    )


def not_unscaled(step: int, ratio: float, where: str) -> LoopFinding:
    """What the optimizer meets depends on the scale of a GradScaler."""
    return LoopFinding(
        code="not_unscaled",
        what=f"What the optimizer meets in step {step} depends on the scale of GradScaler: gradients are clipped, or "
        "stepped with, while they are scaled.",
        found=f"a gradient {ratio:.4g} times as large where the scale is 1024 as where it is 1",
        expected="the same",
        where=where,
        change="Call scaler.unscale_(optimizer) before clipping, and step by scaler.step(optimizer).",
    )


def unexplained(step: int, where: str) -> LoopFinding:
    """The gradient is wrong, and nothing else was found."""
    return LoopFinding(
        code="unexplained",
        what=f"The gradient of step {step} is not that of its un-split batch, for no reason that is known here.",
        found="other weights, see the table",
        expected="those in its last column",
        where=where,
        change="Look at the lines between the backward and optimizer.step().",
    )


def samples_duplicated(samples: Sequence[int], has_ranks: bool, where: str) -> LoopFinding:  # noqa: FBT001 (a reason)
    """Samples come twice in an epoch."""
    why = " DistributedSampler fills the ranks' shares up with them." if has_ranks else ""
    return LoopFinding(
        code="samples_duplicated",
        what=f"Samples are trained on more than once per epoch.{why}",
        found=f"samples {ranges(samples)} twice",
        expected="each once",
        where=where,
        change="Let shares differ in length and divide by the number of samples of all ranks, as ab.batches does.",
    )


def ranks_share_samples(number: int, total: int, where: str) -> LoopFinding:
    """All ranks train on the same."""
    return LoopFinding(
        code="ranks_share_samples",
        what="Every rank goes through the same samples, so a second rank adds nothing.",
        found=f"{number} of {total} samples on more than one rank",
        expected="none",
        where=where,
        change="Give the loader a DistributedSampler (and call set_epoch), or each rank a part of the data.",
    )


def samples_missing(samples: Sequence[int], where: str) -> LoopFinding:
    """Samples never come."""
    return LoopFinding(
        code="samples_missing",
        what="Samples are never trained on.",
        found=f"samples {ranges(samples)} in no forward",
        expected="each once per epoch",
        where=where,
        change="Look at drop_last, at an early break, and at how ranks share the data.",
    )


def schedules_every_micro_batch(before: float, after: float, where: str) -> LoopFinding:
    """The learning rate changes inside a window."""
    return LoopFinding(
        code="schedules_every_micro_batch",
        what="The learning rate changes between the micro-batches of one step: the schedule runs too fast.",
        found=f"{before:g} and {after:g} inside one window",
        expected="one learning rate per step",
        where=where,
        change="Call scheduler.step() right after optimizer.step(), under the same condition.",
        in_gradient=False,
    )


def clips_every_micro_batch(where: str) -> LoopFinding:
    """Parts of the gradient are clipped."""
    return LoopFinding(
        code="clips_every_micro_batch",
        what="Gradients are clipped after every micro-batch: what is clipped is a part of the gradient, each time.",
        found="gradients that change inside a window",
        expected="one clipping, before optimizer.step()",
        where=where,
        change="Clip right before optimizer.step(), under the same condition.",
    )


def logs_last_loss(found: float, expected: float, where: str) -> LoopFinding:
    """The reported loss is that of the last micro-batch."""
    return LoopFinding(
        code="logs_last_loss",
        what="The loss that the loop returns is that of the last micro-batch, not of the window.",
        found=f"{found:.4g}",
        expected=f"{expected:.4g}",
        where=where,
        change="Add up loss sums over the window, and divide by its number of samples.",
        in_gradient=False,
    )


def not_reduced(step: int, is_tail: bool, where: str) -> LoopFinding:  # noqa: FBT001 (one of two reasons)
    """Ranks step with different gradients."""
    why = "the last window of an epoch never leaves no_sync" if is_tail else "nothing sums the gradients over ranks"
    return LoopFinding(
        code="not_reduced",
        what=f"Ranks step with gradients of their own, so their parameters drift apart: {why}.",
        found=f"different gradients in step {step}",
        expected="the same on every rank",
        where=where,
        change="Leave no_sync in the micro-batch that is followed by optimizer.step(), the epoch's last one included.",
    )


_REDUCES = {
    "no_sync_around_backward_only": "Put the forward inside no_sync() too: whether to reduce is decided there.",
    "reduces_every_micro_batch": "Run all micro-batches of a window but the last inside model.no_sync(), forward "
    "and backward.",
}


def reduces(code: str, step: int, number: int, where: str) -> LoopFinding:
    """Gradients are reduced more than once per step."""
    return LoopFinding(
        code=code,
        what="Gradients are reduced after every micro-batch; the result is right, and the traffic is not needed.",
        found=f"{number} reductions in step {step}",
        expected="1",
        where=where,
        change=_REDUCES[code],
        in_gradient=False,
    )
