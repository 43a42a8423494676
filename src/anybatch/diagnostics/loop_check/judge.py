"""From the runs of a loop to its report: each fault is found once, with the first step that shows it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from anybatch.diagnostics.loop_check.judged_loop import (
    ACCUMULATION_STEPS,
    LOUD_GAIN,
    MICRO_BATCH_SIZE,
    NUM_EPOCHS,
    JudgedLoop,
)
from anybatch.diagnostics.loop_check.probe import Forward, LoopTrace, is_close, near
from anybatch.diagnostics.loop_check.report import LoopFinding, LoopReport, Window, fraction, ranges
from anybatch.diagnostics.loop_check.steps import (
    Share,
    Step,
    UnitGradients,
    all_near,
    is_combination,
    set_epochs,
    shares_of,
    steps_of,
    total_of,
    visible,
    weights,
)
from anybatch.errors import LoopError

LOSS_SCALE = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything recorded about a loop."""

    loop: JudgedLoop
    traces: Sequence[LoopTrace]  # one per rank, with gradients that are never clipped
    loud: LoopTrace | None  # with gradients that always are; None on several ranks
    scaled: Sequence[tuple[LoopTrace, LoopTrace]]  # pairs with gradient scales 1 and 1024; one rank and GradScaler only
    is_random: bool  # another seed gives another gradient
    steps: Sequence[Step]
    units: UnitGradients
    accumulation_steps: int  # given to the loop, or those it seems to use

    def finding(self, code: str, found: str, expected: object, *lines: int | None) -> LoopFinding:
        """Return a finding about this loop."""
        file = self.loop.place[0]
        known = tuple(sorted({line for line in lines if line is not None})[:4])
        name = "the loop" if file is None else Path(file).name
        return LoopFinding(code=code, found=found, expected=str(expected), file=name, lines=known)

    @property
    def micro_batches(self) -> list[Forward]:
        """The micro-batches of all ranks."""
        return list(chain.from_iterable(trace.forwards for trace in self.traces))

    @property
    def ended(self) -> bool:
        """Whether the loop ended without help, or after the passes that are looked at."""
        return all(trace.ended for trace in self.traces)


def judge(loop: JudgedLoop, traces: Sequence[LoopTrace]) -> LoopReport:
    """Return the report on one kind of data, with faults in the gradient first."""
    if traces[0].has_more_passes and not traces[0].steps:
        message = (
            f"{loop.name} made no step in {len(traces[0].forwards)} micro-batches, and was stopped. Give it a "
            f"parameter accumulation_steps (it will be {ACCUMULATION_STEPS}), or accumulate over fewer micro-batches."
        )
        raise LoopError(message)
    evidence = _evidence(loop, traces)
    return LoopReport(
        loop=loop.name,
        findings=tuple(sorted(_findings(evidence), key=lambda finding: not finding.in_gradient)),
        windows=tuple(_window(step, evidence.units) for step in evidence.steps),
        accumulation_steps=evidence.accumulation_steps,
        num_ranks=len(traces),
        remarks=tuple(_remarks(evidence)),
    )


def _evidence(loop: JudgedLoop, traces: Sequence[LoopTrace]) -> Evidence:
    """Run the loop under other settings, and return everything recorded about it. Unit gradients need one rank."""
    loud, scaled, is_random = None, [], False
    if len(traces) == 1:
        loud, again = loop.run(gain=LOUD_GAIN), loop.run(seed=1)
        pairs = zip(traces[0].steps, again.steps, strict=False)
        is_random = any(not is_close(step.gradient, other.gradient) for step, other in pairs)
        if loop.parameters.uses_scaler:
            scaled = [(traces[0], loop.run(loss_scale=LOSS_SCALE))]
            scaled.append((loud, loop.run(gain=LOUD_GAIN, loss_scale=LOSS_SCALE)))
    # Shares of ranks differ by one sample at most.
    batches_per_epoch = math.ceil(math.ceil(len(loop.ids) / len(traces)) / MICRO_BATCH_SIZE)
    # A loop that counts steps may end anywhere.
    num_epochs = 0 if {"max_steps", "epochs"} & loop.parameters.needed == {"max_steps"} else NUM_EPOCHS
    for rank, trace in enumerate(traces):
        set_epochs(trace, rank, num_epochs, batches_per_epoch)
    steps = steps_of(traces)
    sizes = Counter(step.size for step in steps)
    usual = max(sizes, key=lambda size: (sizes[size], size), default=ACCUMULATION_STEPS)
    return Evidence(
        loop=loop,
        traces=traces,
        loud=loud,
        scaled=scaled,
        is_random=is_random,
        steps=steps,
        units=UnitGradients(loop, traces[0]),
        accumulation_steps=ACCUMULATION_STEPS if loop.knows_steps else usual,
    )


def _remarks(evidence: Evidence) -> Iterator[str]:
    """Yield aspects of the loop that could not be judged."""
    loop, trace, units = evidence.loop, evidence.traces[0], evidence.units
    if trace.has_more_passes:
        yield f"The loop was stopped after {NUM_EPOCHS} passes over the data."
    if loop.parameters.is_stream:
        yield "The loop asks for one batch at a time, so a smaller last batch and padding were not tested."
    if guesses := ", ".join(f"{name}={value!r}" for name, value in trace.guesses.items()):
        yield f"Unknown settings, with the values that the loop got: {guesses}."
    if not units.scale_is_known:
        yield (
            "The loop has no parameter for accumulation steps and an uncommon loss, so a factor that all gradients "
            "share cannot be detected."
        )
    rows = units.of(loop.ids)
    if rows is not None and (hidden := sorted(set(loop.ids) - set(visible(loop.ids, rows)))):
        yield f"The loss has no gradient for these samples, so they have no weight: {ranges(hidden)}."


def _window(step: Step, units: UnitGradients) -> Window:
    """Return a step for the report; in a faulty one, samples are measured in one batch of all samples."""
    rows = units.of(tuple(step.ids)) if step.is_clean else None
    rows = units.of(range(len(step.gradient))) if rows is None else rows
    seen = tuple(step.ids) if rows is None else visible(tuple(step.ids), rows)
    return Window(
        step=step.number,
        micro_batches=tuple(each.ids for each in step.micro_batches),
        found={} if rows is None else weights(step.gradient, rows),
        expected={sample: step.ids[sample] / step.ids.total() for sample in seen},
    )


def _findings(evidence: Evidence) -> list[LoopFinding]:
    """Return all faults. A fault that explains later symptoms hides them."""
    findings = [*_about_end(evidence)]
    if not evidence.steps:
        return [evidence.finding("never_steps", "0 steps in two epochs", "one per window"), *findings]
    findings += _about_places(evidence)
    codes = {finding.code for finding in findings}
    if "steps_every_micro_batch" not in codes:
        findings += [*_about_clearing(evidence), *_about_tails(evidence), *_about_rates(evidence)]
        codes = {finding.code for finding in findings}
        findings += _about_weights(evidence, has_carried="tail_carried" in codes)
    findings += _about_samples(evidence, has_dropped="tail_dropped" in codes)
    findings += [*_about_reductions(evidence), *_about_clipping(evidence), *_about_scaling(evidence)]
    findings += _about_loss(evidence)
    if not any(finding.in_gradient for finding in findings):
        findings += _about_the_rest(evidence)
    return findings


def _about_end(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the loop had to be stopped."""
    if not evidence.ended:
        value = f"still running after {len(evidence.traces[0].forwards)} forwards"
        lines = [step.line for step in evidence.steps[-1:]]
        yield evidence.finding("does_not_end", value, "two passes over 31 samples", *lines)


def _about_places(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `optimizer.step()`."""
    steps, expected, every = evidence.steps, evidence.accumulation_steps, evidence.micro_batches
    largest = min(MICRO_BATCH_SIZE, len(evidence.loop.ids))
    cuts_batches = max(len(each.ids) for each in every) < largest and all(max(step.ids.values()) == 1 for step in steps)
    if cuts_batches or not evidence.loop.knows_steps:  # then no number of micro-batches is expected
        return
    if expected > 1 and len(steps) > 1 and max(step.size for step in steps) == 1:
        yield evidence.finding("steps_every_micro_batch", "1 micro-batch per step", expected, steps[0].line)
        return
    # A shorter window is correct at the end of an epoch.
    last = set({(each.rank, each.epoch): each for each in every}.values())
    for step in steps:
        is_short = step.size < expected and not last & set(step.micro_batches)
        if step.micro_batches and len(step.epochs) == 1 and (step.size > expected or is_short):
            value = f"{step.size} micro-batches in step {step.number}"
            yield evidence.finding("window_size", value, expected, step.line)
            return


def _about_clearing(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `zero_grad()`."""
    steps, backward = evidence.steps, evidence.traces[0].backward_line
    if stale := [step for step in steps if step.of_rank.is_stale]:
        value = f"old gradients in {len(stale)} steps, first in step {stale[0].number}"
        yield evidence.finding("zero_grad_missing", value, "none", stale[0].line)
    if lost := [step for step in steps if step.lost]:
        value = f"{len(lost[0].lost)} of {len(lost[0].micro_batches)} micro-batches without effect"
        yield evidence.finding("zero_grad_inside_window", value, 0, backward, lost[0].line)
    if cleared := [step for step in steps if step.is_cleared]:
        value = f"no gradient in {len(cleared)} steps"
        yield evidence.finding("zero_grad_before_step", value, "the gradient of the window", backward, cleared[0].line)


def _about_tails(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults with the micro-batches at the end of an epoch that do not fill a window."""
    steps, expected = evidence.steps, evidence.accumulation_steps
    for step in steps:
        if len(step.epochs) > 1 and step.size != expected:
            value = f"{step.size} micro-batches in step {step.number}"
            yield evidence.finding("tail_carried", value, f"at most {expected}", step.line)
            return
    lost = next((step.lost_tail for step in steps if step.lost_tail), ())
    # A loop that was stopped has micro-batches left because of that.
    if not lost and evidence.ended and not any(trace.has_more_passes for trace in evidence.traces):
        lost = tuple(each for trace in evidence.traces for each in trace.forwards[trace.steps[-1].num_forwards :])
    if lost:
        value = f"{sum(len(each.ids) for each in lost)} samples of the last window without effect"
        yield evidence.finding("tail_dropped", value, 0, steps[-1].line)


def _about_rates(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the learning rate changes inside a window."""
    for step in evidence.steps:
        of_step = [each for each in step.micro_batches if each.rank == 0]
        for before, after in pairwise(forward.learning_rates for forward in of_step):
            # An optimizer that the loop makes is recorded from its first step on, which makes the list longer.
            if len(before) == len(after) and before != after:
                value = f"{before[0]:g} and {after[0]:g} in step {step.number}"
                lines = of_step[0].line, step.line
                yield evidence.finding("schedules_every_micro_batch", value, "one learning rate per step", *lines)
                return


def _about_weights(evidence: Evidence, *, has_carried: bool) -> Iterator[LoopFinding]:
    """Yield faults in the divisor of the loss."""
    weighed: list[tuple[Step, list[Share]]] = []
    is_sum = True
    for step in evidence.steps:
        rows = evidence.units.of(tuple(step.ids)) if step.is_clean else None
        if rows is None:
            continue
        if is_combination(step.gradient, rows):
            shares = shares_of(step, evidence.units)
            # A window over two epochs has a finding already.
            if shares and not (has_carried and len(step.epochs) > 1):
                weighed.append((step, shares))
        elif is_sum:
            is_sum = False
            code = "draws_random_numbers" if evidence.is_random else "not_a_weighted_sum"
            yield evidence.finding(code, f"another gradient in step {step.number}", "a weighted sum", step.line)
    if weighed:
        yield from _about_totals(evidence, weighed)
        yield from _about_shares(evidence, weighed)


def _about_totals(evidence: Evidence, weighed: Sequence[tuple[Step, list[Share]]]) -> Iterator[LoopFinding]:
    """Yield faults in the sum of the weights of a step."""
    totals = [total_of(shares) for _, shares in weighed]
    if not evidence.units.scale_is_known:  # then the first step defines 1
        totals = [total / (totals[0] or 1.0) for total in totals]
    wrong = next((number for number, total in enumerate(totals) if not near(total, 1.0)), None)
    if wrong is None:
        return
    sizes = [step.size for step, _ in weighed]
    per_micro_batch = [total / size for total, size in zip(totals, sizes, strict=True)]
    # The same weight per micro-batch in full and partial windows: the loop divides by a constant.
    if all_near(per_micro_batch) and near(per_micro_batch[0], 1.0):
        code = "not_divided"
    elif all_near(per_micro_batch) and len(set(sizes)) > 1:
        code = "constant_divisor"
    else:
        code = "constant_factor" if all_near(totals) else "wrong_total"
    step = weighed[wrong][0]
    yield evidence.finding(code, f"weights of step {step.number} add up to {fraction(totals[wrong])}", 1, step.line)


def _about_shares(evidence: Evidence, weighed: Sequence[tuple[Step, list[Share]]]) -> Iterator[LoopFinding]:
    """Yield why micro-batches of one step count wrongly: each cause once, for the first step that shows it."""
    codes = set()
    for step, shares in weighed:
        code = _cause(shares, has_targets=evidence.loop.kind == "tokens")
        if code and code not in codes:
            codes.add(code)
            total = total_of(shares) or 1.0
            share = max(shares, key=lambda share: abs(share.found / total / share.expected - 1))
            value = f"share {fraction(share.found / total)} of a micro-batch of {len(share.micro_batch.ids)} samples"
            yield evidence.finding(code, f"{value} in step {step.number}", fraction(share.expected), step.line)


def _cause(shares: Sequence[Share], *, has_targets: bool) -> str:
    """Return the code of the reason why found shares are not proportional to expected ones, or ""."""
    by_rank: dict[int, list[float]] = defaultdict(list)
    for share in shares:
        by_rank[share.micro_batch.rank].append(share.found / share.expected)
    if all_near([ratio for ratios in by_rank.values() for ratio in ratios]):
        return ""
    if all(all_near(ratios) for ratios in by_rank.values()):
        return "uneven_ranks"
    sizes = [len(share.micro_batch.ids) for share in shares]
    if all_near([share.found for share in shares]):
        if all_near([share.expected / size for share, size in zip(shares, sizes, strict=True)]):
            return "mean_of_means"
        return "mean_of_token_means" if has_targets else "mean_of_weighted_means"
    is_by_samples = all_near([share.found / size for share, size in zip(shares, sizes, strict=True)])
    return "mean_of_token_means" if has_targets and is_by_samples else "uneven_weights"


def _about_samples(evidence: Evidence, *, has_dropped: bool) -> Iterator[LoopFinding]:
    """Yield which samples occur twice in an epoch, and which never."""
    if not evidence.ended:
        return
    line, total = evidence.traces[0].forwards[0].line, len(evidence.loop.ids)
    seen = Counter((each.epoch, sample) for each in evidence.micro_batches for sample in each.ids)
    ranks: dict[int, set[int]] = defaultdict(set)
    for each in evidence.micro_batches:
        for sample in each.ids:
            ranks[sample].add(each.rank)
    shared = sum(len(of_sample) > 1 for of_sample in ranks.values())
    # If all samples occur equally often (two forwards per batch, say), that is intended.
    usual = min(seen.values(), default=1)
    twice = sorted({sample for (_, sample), times in seen.items() if times > usual})
    # A sampler repeats a few samples; if at least half are shared, the data is not split between ranks at all.
    if len(evidence.traces) > 1 and shared * 2 >= len(ranks):
        yield evidence.finding("ranks_share_samples", f"{shared} of {total} samples on several ranks", "none", line)
    elif twice:
        yield evidence.finding("samples_duplicated", f"samples {ranges(twice)} twice", "each once", line)
    missing = sorted(set(evidence.loop.ids) - ranks.keys())
    if missing and not has_dropped:
        yield evidence.finding("samples_missing", f"samples {ranges(missing)} in no forward", "each once", line)


def _about_clipping(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether gradients are clipped in the wrong place."""
    plain, loud = evidence.traces[0], evidence.loud
    expected = "one clipping, before optimizer.step()"
    # Clipping changes large gradients and not small ones; other changes act on both.
    if loud is not None and loud.changed_lines and not plain.changed_lines:
        lines = loud.changed_lines
        yield evidence.finding("clips_every_micro_batch", "gradients that change inside a window", expected, *lines)
    if loud is not None and loud.changed_after_lines and not plain.changed_after_lines:
        lines = loud.changed_after_lines
        yield evidence.finding("clips_after_step", "gradients that change after a step", expected, *lines)


def _about_scaling(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the optimizer uses a gradient that depends on the scale of a GradScaler."""
    for plain, scaled in evidence.scaled:
        for number, (step, scaled_step) in enumerate(zip(plain.steps, scaled.steps, strict=False), start=1):
            if not is_close(scaled_step.gradient, step.gradient):
                ratio = float(scaled_step.gradient.norm() / step.gradient.norm())
                value = f"{ratio:.4g} times the gradient in step {number} with scale 1024 instead of 1"
                yield evidence.finding("not_unscaled", value, "the same gradient", scaled_step.line)
                return


def _about_reductions(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield how often gradients are reduced."""
    trace = evidence.traces[0]
    apart = next((step for step in evidence.steps if not step.is_equal_on_ranks), None)
    if apart is not None:
        value = f"different gradients in step {apart.number}"
        yield evidence.finding("not_reduced", value, "the same on every rank", apart.line)
    often = next((step for step in evidence.steps if step.of_rank.num_reductions > 1), None)
    if often is not None and len(evidence.traces) > 1:
        code = "no_sync_around_backward_only" if trace.has_late_no_sync else "reduces_every_micro_batch"
        value = f"{often.of_rank.num_reductions} reductions in step {often.number}"
        yield evidence.finding(code, value, 1, trace.backward_line)


def _about_loss(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the returned loss of one window is the loss of its last micro-batch."""
    loop = evidence.loop
    if len(evidence.traces) > 1 or not evidence.ended or not {"loader", "accumulation_steps"} <= loop.parameters.needed:
        return
    window = range(MICRO_BATCH_SIZE * ACCUMULATION_STEPS)
    returned = loop.run(window, epochs=1).returned_loss
    expected = loop.run(window, size=len(window), steps=1, epochs=1).returned_loss
    last = loop.run(window[-MICRO_BATCH_SIZE:], steps=1, epochs=1).returned_loss
    if returned is None or expected is None or last is None or near(returned, expected):
        return
    # The last loss may be returned unchanged, or divided for accumulation.
    if near(returned, last) or near(returned, last / ACCUMULATION_STEPS):
        yield evidence.finding("logs_last_loss", f"{returned:.4g}", f"{expected:.4g}", loop.place[1])


def _about_the_rest(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield the first step whose gradient differs from its un-split gradient for another reason."""
    for step in evidence.steps if evidence.units.scale_is_known else ():
        unsplit = step.gradient * 0
        if (rows := evidence.units.of(tuple(step.ids))) is not None:
            for sample, times in step.ids.items():
                unsplit[sample] = rows[sample] * times / step.ids.total()
        if not is_close(step.gradient, unsplit):
            yield evidence.finding("unexplained", f"other weights in step {step.number}", "see the table", step.line)
            return
