"""From steps to findings: each fault of a loop, reported once."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from anybatch.diagnostics.loop_check.findings import LoopFinding, fraction
from anybatch.diagnostics.loop_check.judged_loop import MICRO_BATCH_SIZE, JudgedLoop
from anybatch.diagnostics.loop_check.recorder import LoopTrace, TableGradient, is_close, near
from anybatch.diagnostics.loop_check.report import Window, ranges
from anybatch.diagnostics.loop_check.steps import MicroBatch, Step
from anybatch.diagnostics.loop_check.weights import UnitGradients, is_combination, visible, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything recorded about a loop.

    Attributes:
        loop: which.
        traces: one per rank, with gradients that are never clipped.
        loud: a trace with gradients that always are; None on several ranks.
        scaled: pairs of traces, with gradient scales 1 and 1024; none on several ranks or without a GradScaler.
        is_random: another seed gives another gradient.
        micro_batches: of each rank.
        steps: the optimizer steps.
        units: the samples' unit gradients.
        accumulation_steps: given to the loop, or those it seems to use.
    """

    loop: JudgedLoop
    traces: Sequence[LoopTrace]
    loud: LoopTrace | None
    scaled: Sequence[tuple[LoopTrace, LoopTrace]]
    is_random: bool
    micro_batches: Sequence[Sequence[MicroBatch]]
    steps: Sequence[Step]
    units: UnitGradients
    accumulation_steps: int

    def finding(self, code: str, lines: Sequence[int | None] = (), **values: object) -> LoopFinding:
        """Return a finding about this loop."""
        file = self.loop.file
        known = sorted({line for line in lines if line is not None})
        return LoopFinding(
            code=code, values=values, file="the loop" if file is None else Path(file).name, lines=tuple(known[:4])
        )

    @property
    def ended(self) -> bool:
        """Whether the loop ended by itself, or after the passes that are looked at."""
        return all(trace.ended for trace in self.traces)

    @property
    def has_targets(self) -> bool:
        """Whether samples have different numbers of targets."""
        return self.loop.kind == "tokens"

    @property
    def cuts_batches(self) -> bool:
        """Whether the loop makes micro-batches itself, from the batches of the loader."""
        largest = max(len(each.ids) for of_rank in self.micro_batches for each in of_rank)
        is_once = all(set(step.ids.values()) <= {1} for step in self.steps)
        return largest < min(MICRO_BATCH_SIZE, len(self.loop.ids)) and is_once


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedStep:
    """A step with a clean gradient, and the weights in it.

    Attributes:
        step: which.
        weights: sample -> weight, for samples whose weight can be seen.
        shares: the factor of each micro-batch's own mean, whatever that is a mean over; empty if samples of a
            micro-batch have different ones.
    """

    step: Step
    weights: Mapping[int, float]
    shares: Sequence[float] = ()

    @property
    def has_equal_shares(self) -> bool:
        """Whether the micro-batches' own means count equally."""
        return bool(self.shares) and _all_near(self.shares)

    @property
    def total(self) -> float:
        """The sum of the weights: one, for a mean. Samples whose weight cannot be seen count as the others."""
        if self.has_equal_shares:
            return self.shares[0] * len(self.step.micro_batches)
        seen = sum(times for sample, times in self.step.ids.items() if sample in self.weights)
        return sum(self.weights.values()) * self.step.ids.total() / seen

    @property
    def is_even(self) -> bool:
        """Whether each sample has the weight of its number of occurrences."""
        return _all_near([weight / self.step.ids[sample] for sample, weight in self.weights.items()])

    def is_even_in(self, micro_batch: MicroBatch) -> bool:
        """Whether the samples of a micro-batch have the same weight."""
        seen = [sample for sample in micro_batch.ids if sample in self.weights]
        return not seen or _all_near([self.weights[sample] / self.step.ids[sample] for sample in seen])

    def weight_in(self, micro_batch: MicroBatch) -> float | None:
        """Return the weight of a sample of a micro-batch; None if none can be seen."""
        seen = [sample for sample in micro_batch.ids if sample in self.weights]
        # A sample that occurs twice has the sum of two weights, so one that occurs once is preferred.
        seen.sort(key=lambda sample: self.step.ids[sample] > 1)
        return self.weights[seen[0]] / self.step.ids[seen[0]] if seen else None


def judge(evidence: Evidence) -> tuple[tuple[Window, ...], tuple[LoopFinding, ...]]:
    """Return the steps of a loop, and its faults, with those in the gradient first."""
    if not evidence.steps:
        return (), (evidence.finding("never_steps"), *_about_end(evidence))
    findings = [*_about_end(evidence), *_about_places(evidence)]
    # A step per micro-batch explains all later symptoms.
    if "steps_every_micro_batch" not in _codes(findings):
        findings += [*_about_clearing(evidence), *_about_tails(evidence), *_about_rates(evidence)]
        findings += _about_weights(evidence, has_carried="tail_carried" in _codes(findings))
    findings += _about_samples(evidence, has_dropped="tail_dropped" in _codes(findings))
    findings += [*_about_reductions(evidence), *_about_clipping(evidence), *_about_scaling(evidence)]
    if not any(finding.in_gradient for finding in findings):
        findings += _about_the_rest(evidence)
    windows = tuple(_window(step, evidence.units) for step in evidence.steps)
    return windows, tuple(sorted(findings, key=lambda finding: not finding.in_gradient))


def _codes(findings: Sequence[LoopFinding]) -> set[str]:
    return {finding.code for finding in findings}


def _window(step: Step, units: UnitGradients) -> Window:
    """Return a step for the report; samples of other windows, in a faulty one, are measured in one batch of all."""
    rows = units.of(tuple(step.ids)) if step.is_clean and step.ids else None
    rows = units.of(range(len(step.gradient))) if rows is None else rows
    seen = tuple(step.ids) if rows is None else visible(tuple(step.ids), rows)
    return Window(
        step=step.number + 1,
        micro_batches=tuple(each.ids for each in step.micro_batches),
        found={} if rows is None else weights(step.gradient, rows),
        expected={sample: step.ids[sample] / step.ids.total() for sample in seen},
    )


def _about_end(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the loop had to be stopped."""
    if not evidence.ended:
        lines = [step.line for step in evidence.steps[-1:]]
        yield evidence.finding("does_not_end", lines, forwards=len(evidence.traces[0].forwards))


def _about_places(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `optimizer.step()`."""
    steps, expected = evidence.steps, evidence.accumulation_steps
    if evidence.cuts_batches or not evidence.loop.knows_steps:  # no number of micro-batches is expected then
        return
    if expected > 1 and len(steps) > 1 and max(step.num_micro_batches for step in steps) == 1:
        yield evidence.finding("steps_every_micro_batch", [steps[0].line], expected=expected)
        return
    # A shorter window is correct at the end of an epoch.
    last = {(each.rank, each.epoch): each for of_rank in evidence.micro_batches for each in of_rank}.values()
    for step in steps:
        size, is_end = step.num_micro_batches, bool(set(last) & set(step.micro_batches))
        if step.micro_batches and len(step.epochs) == 1 and (size > expected or (size < expected and not is_end)):
            yield evidence.finding("window_size", [step.line], step=step.number + 1, size=size, expected=expected)
            return


def _about_clearing(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `zero_grad()`."""
    backward = evidence.traces[0].backward_line
    if stale := [step for step in evidence.steps if step.is_stale]:
        yield evidence.finding("zero_grad_missing", [stale[0].line], step=stale[0].number + 1, steps=len(stale))
    if any(step.is_lost for step in evidence.steps):
        lines = [backward, evidence.steps[0].line]
        yield evidence.finding("zero_grad_inside_window", lines, expected=evidence.accumulation_steps)
    if cleared := [step for step in evidence.steps if step.is_cleared]:
        yield evidence.finding("zero_grad_before_step", [backward, cleared[0].line], steps=len(cleared))


def _about_tails(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield faults with the micro-batches at the end of an epoch that do not fill a window."""
    steps, expected = evidence.steps, evidence.accumulation_steps
    for step in steps:
        size = step.num_micro_batches
        if len(step.epochs) > 1 and size != expected:
            yield evidence.finding("tail_carried", [step.line], step=step.number + 1, size=size, expected=expected)
            return
    lost = next((step.lost_tail for step in steps if step.lost_tail), ())
    # A loop that was stopped has micro-batches left because of that.
    if not lost and evidence.ended and not any(trace.has_more_passes for trace in evidence.traces):
        ends = [trace.steps[-1].num_forwards for trace in evidence.traces]
        lost = tuple(each for of_rank, end in zip(evidence.micro_batches, ends, strict=True) for each in of_rank[end:])
    if lost:
        yield evidence.finding("tail_dropped", [steps[-1].line], samples=sum(len(each.ids) for each in lost))


def _about_rates(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the learning rate changes inside a window."""
    forwards = evidence.traces[0].forwards
    for step in evidence.steps:
        own = [forwards[each.number] for each in step.micro_batches if each.rank == 0]
        for before, after in pairwise(forward.learning_rates for forward in own):
            # An optimizer that the loop makes is recorded from its first step on, which makes the list longer.
            if len(before) == len(after) and before != after:
                rates = {"before": f"{before[0]:g}", "after": f"{after[0]:g}"}
                yield evidence.finding("schedules_every_micro_batch", [own[0].line, step.line], **rates)
                return


def _about_weights(evidence: Evidence, *, has_carried: bool) -> Iterator[LoopFinding]:
    """Yield faults in the divisor of the loss."""
    weighed, others = _weighed(evidence)
    if others:
        code = "draws_random_numbers" if evidence.is_random else "not_a_weighted_sum"
        yield evidence.finding(code, [others[0].line], step=others[0].number + 1)
    # A window over two epochs has a finding already.
    weighed = [each for each in weighed if not has_carried or len(each.step.epochs) == 1]
    # If a loss is a mean over targets, the weights of samples add up to 1 only if they are even.
    is_by_samples = all(each.has_equal_shares or each.is_even or not evidence.has_targets for each in weighed)
    yield from _about_totals(evidence, weighed if is_by_samples else [each for each in weighed if each.is_even])
    yield from _about_evenness(evidence, weighed)


def _weighed(evidence: Evidence) -> tuple[list[WeighedStep], list[Step]]:
    """Return the clean steps with their weights, and those that are not a weighted sum of their samples."""
    weighed, others = [], []
    for step in evidence.steps:
        rows = evidence.units.of(tuple(step.ids)) if step.is_clean and step.ids else None
        if rows is None or not (seen := visible(tuple(step.ids), rows)):
            continue
        if is_combination(step.gradient, rows):
            found = weights(step.gradient, rows)
            own = {sample: found.get(sample, 0.0) for sample in seen}
            weighed.append(WeighedStep(step=step, weights=own, shares=_shares(step, evidence.units)))
        else:
            others.append(step)
    if weighed and not evidence.units.scale_is_known:  # then the first step defines 1
        factor = WeighedStep(step=weighed[0].step, weights=weighed[0].weights).total
        weighed = [
            WeighedStep(step=each.step, weights={sample: weight / factor for sample, weight in each.weights.items()})
            for each in weighed
        ]
    return weighed, others


def _shares(step: Step, units: UnitGradients) -> tuple[float, ...]:
    """Return the factor of the mean gradient of each micro-batch in a step."""
    if max(step.ids.values()) > 1:  # a sample that occurs twice belongs to two micro-batches
        return ()
    shares = []
    for micro_batch in step.micro_batches:
        rows = units.of(micro_batch.ids)
        if rows is None:
            return ()
        if seen := visible(micro_batch.ids, rows):
            found = weights(step.gradient, rows)
            if not _all_near([found.get(sample, 0.0) for sample in seen]):
                return ()
            shares.append(found.get(seen[0], 0.0) * len(micro_batch.ids))
    return tuple(shares)


def _about_totals(evidence: Evidence, weighed: Sequence[WeighedStep]) -> Iterator[LoopFinding]:
    """Yield faults in the sum of weights of a step."""
    wrong = next((each for each in weighed if not near(each.total, 1.0)), None)
    if wrong is None:
        return
    per_micro_batch = [each.total / each.step.num_micro_batches for each in weighed]
    # The same weight per micro-batch in full and partial windows: the loop divides by a constant.
    is_constant = _all_near(per_micro_batch)
    if is_constant and near(per_micro_batch[0], 1.0):
        code = "not_divided"
    elif is_constant and len({each.step.num_micro_batches for each in weighed}) > 1:
        code = "constant_divisor"
    else:
        code = "constant_factor" if _all_near([each.total for each in weighed]) else "wrong_total"
    yield evidence.finding(
        code,
        [wrong.step.line],
        step=wrong.step.number + 1,
        total=fraction(wrong.total),
        size=wrong.step.num_micro_batches,
    )


def _about_evenness(evidence: Evidence, weighed: Sequence[WeighedStep]) -> Iterator[LoopFinding]:
    """Yield why samples of one step have different weights: each cause once, for the first step that shows it."""
    codes = set()
    for each in weighed:
        seen = [(part, weight) for part in each.step.micro_batches if (weight := each.weight_in(part)) is not None]
        if each.is_even or (code := _cause_of_unevenness(each, seen, has_targets=evidence.has_targets)) in codes:
            continue
        codes.add(code)
        seen.sort(key=lambda pair: (pair[1], -len(pair[0].ids)))
        low, high = (f"{fraction(weight)} (micro-batch of {len(part.ids)})" for part, weight in (seen[0], seen[-1]))
        even = fraction(each.total / each.step.ids.total())
        yield evidence.finding(code, [each.step.line], step=each.step.number + 1, low=low, high=high, even=even)


def _cause_of_unevenness(each: WeighedStep, seen: Sequence[tuple[MicroBatch, float]], *, has_targets: bool) -> str:
    by_rank: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for part, weight in seen:
        by_rank[part.rank].append((len(part.ids), weight))
    if all(_all_near([weight for _, weight in of_rank]) for of_rank in by_rank.values()):
        return "uneven_ranks" if len(by_rank) > 1 else "uneven_weights"
    # Equal sums per micro-batch: each was averaged by itself, whatever its size.
    if all(_all_near([size * weight for size, weight in of_rank]) for of_rank in by_rank.values()):
        return "mean_of_means"
    if not each.has_equal_shares and not (has_targets and all(map(each.is_even_in, each.step.micro_batches))):
        return "uneven_weights"
    return "mean_of_token_means" if has_targets else "mean_of_weighted_means"


def _about_samples(evidence: Evidence, *, has_dropped: bool) -> Iterator[LoopFinding]:
    """Yield which samples occur twice in an epoch, and which never."""
    if not evidence.ended:
        return
    lines, has_ranks = [evidence.traces[0].forwards[0].line], len(evidence.traces) > 1
    seen: Counter[tuple[int, int]] = Counter()
    ranks: dict[int, set[int]] = defaultdict(set)
    for each in (each for of_rank in evidence.micro_batches for each in of_rank):
        for sample in each.ids:
            seen[each.epoch, sample] += 1
            ranks[sample].add(each.rank)
    shared = sum(len(of_sample) > 1 for of_sample in ranks.values())
    # If all samples occur equally often (two forwards per batch, say), that is intended.
    usual = min(seen.values(), default=1)
    twice = sorted({sample for (_, sample), times in seen.items() if times > usual})
    # A sampler repeats a few samples; if at least half are shared, the data is not split between ranks at all.
    if has_ranks and shared * 2 >= len(ranks):
        yield evidence.finding("ranks_share_samples", lines, shared=shared, total=len(evidence.loop.ids))
    elif twice:
        yield evidence.finding("samples_duplicated", lines, samples=ranges(twice))
    missing = sorted(set(evidence.loop.ids) - ranks.keys())
    if missing and not has_dropped:
        yield evidence.finding("samples_missing", lines, samples=ranges(missing))


def _about_clipping(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether gradients are clipped in the wrong place."""
    if evidence.loud is None:
        return
    plain = evidence.traces[0]
    # Clipping changes large gradients and not small ones; other changes act on both.
    if evidence.loud.rescaled_lines and not plain.rescaled_lines:
        yield evidence.finding("clips_every_micro_batch", evidence.loud.rescaled_lines)
    if evidence.loud.late_change_lines and not plain.late_change_lines:
        yield evidence.finding("clips_after_step", evidence.loud.late_change_lines)


def _about_scaling(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield whether the optimizer uses a gradient that depends on the scale of a GradScaler."""
    for plain, scaled in evidence.scaled:
        for number, (one, other) in enumerate(zip(plain.steps, scaled.steps, strict=False), start=1):
            if one.gradient is None or other.gradient is None or is_close(other.gradient, one.gradient):
                continue
            ratio = f"{float(other.gradient.norm() / one.gradient.norm()):.4g}"
            yield evidence.finding("not_unscaled", [other.line], step=number, ratio=ratio)
            return


def _about_reductions(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield how often gradients are reduced."""
    if len(evidence.traces) == 1:
        return
    apart = next((step for step in evidence.steps if not step.is_equal_on_ranks), None)
    if apart is not None:
        yield evidence.finding("not_reduced", [apart.line], step=apart.number + 1)
    often = next((step for step in evidence.steps if step.num_backwards > 1 and step.num_reductions > 1), None)
    if often is not None:
        trace, counts = evidence.traces[0], {"step": often.number + 1, "reductions": often.num_reductions}
        code = "no_sync_around_backward_only" if trace.unsynced_too_late else "reduces_every_micro_batch"
        yield evidence.finding(code, [trace.backward_line], **counts)


def _about_the_rest(evidence: Evidence) -> Iterator[LoopFinding]:
    """Yield the first step whose gradient differs from that of its un-split batch for another reason."""
    for step in evidence.steps if evidence.units.scale_is_known else ():
        if not is_close(step.gradient, _unsplit_gradient(step, evidence.units)):
            yield evidence.finding("unexplained", [step.line], step=step.number + 1)
            return


def _unsplit_gradient(step: Step, units: UnitGradients) -> TableGradient:
    gradient = step.gradient * 0
    rows = units.of(tuple(step.ids)) if step.ids else None
    if rows is not None:
        for sample, times in step.ids.items():
            gradient[sample] = rows[sample] * times / step.ids.total()
    return gradient


def _all_near(values: Sequence[float]) -> bool:
    return near(max(values), min(values))
