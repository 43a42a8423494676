"""From windows to findings: each fault of a loop, reported once."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from anybatch.diagnostics.loop_check import sentences
from anybatch.diagnostics.loop_check.loop_report import LoopFinding, Window, fraction
from anybatch.diagnostics.loop_check.loop_trace import LoopTrace, TableGradient
from anybatch.diagnostics.loop_check.unit_gradients import UnitGradients
from anybatch.diagnostics.loop_check.windows import (
    Part,
    StepParts,
    is_close,
    is_combination,
    near,
    rescaled_lines,
    weights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvidence:
    """All that was recorded of a loop.

    Attributes:
        traces: one per rank, with gradients that no clipping touches.
        parts: the forwards of each rank, with their epochs.
        steps: the optimizer steps.
        loud: a trace with gradients that every clipping touches; None on several ranks.
        scaled: pairs of traces, with a GradScaler that scales by 1 and by more; none on several ranks or without one.
        draws: whether another seed gives another gradient.
        units: the samples' unit gradients.
        ids: all samples of an epoch.
        accumulation_steps: those given to the loop, or those it seems to use.
        knows_steps: whether the loop has a parameter for them.
        micro_batch_size: samples of one batch of the loader.
        file: the loop's file.
    """

    traces: Sequence[LoopTrace]
    parts: Sequence[Sequence[Part]]
    steps: Sequence[StepParts]
    loud: LoopTrace | None
    scaled: Sequence[tuple[LoopTrace, LoopTrace]]
    draws: bool
    units: UnitGradients
    ids: Sequence[int]
    accumulation_steps: int
    knows_steps: bool
    micro_batch_size: int
    file: str | None

    def where(self, *lines: int | None) -> str:
        """Return lines of the loop's file in words."""
        name = "the loop" if self.file is None else Path(self.file).name
        known = sorted({line for line in lines if line is not None})
        return f"{name}:{', '.join(map(str, known[:4]))}" if known else name

    @property
    def has_targets(self) -> bool:
        """Whether samples have different numbers of targets."""
        return self.units.data.kind == "tokens"

    @property
    def cuts_batches(self) -> bool:
        """Whether the loop makes micro-batches itself, by cutting what the loader yields."""
        sizes = {len(part.ids) for parts in self.parts for part in parts}
        expected = min(self.micro_batch_size, len(self.ids))
        return max(sizes) < expected and all(set(step.ids.values()) <= {1} for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedWindow:
    """A clean window with its weights.

    Attributes:
        step: which.
        found: sample -> weight, relative to what it has in the un-split batch.
        shares: what each micro-batch's own mean is multiplied with, whatever it is a mean over; empty where a
            micro-batch is not taken as a whole.
    """

    step: StepParts
    found: Mapping[int, float]
    shares: Sequence[float] = ()

    @property
    def has_equal_shares(self) -> bool:
        """Whether the micro-batches' own means count the same."""
        return bool(self.shares) and _all_near(self.shares)

    @property
    def total(self) -> float:
        """Sum of the weights: one, for a mean."""
        if self.has_equal_shares:
            return sum(self.shares)
        return sum(self.found.get(sample, 0.0) for sample in self.step.ids)

    @property
    def is_even(self) -> bool:
        """Whether each sample weighs as much as it occurs."""
        shares = [self.found.get(sample, 0.0) / times for sample, times in self.step.ids.items()]
        return near(max(shares), min(shares))

    def is_even_in(self, part: Part) -> bool:
        """Whether the samples of a micro-batch weigh the same."""
        return _all_near([self.found.get(sample, 0.0) / self.step.ids[sample] for sample in part.ids])

    def weight_of(self, part: Part) -> float:
        """Return the weight of a sample of a micro-batch."""
        # A sample that comes twice has the sum of two weights; one that comes once shows that of its micro-batch.
        once = [self.found.get(s, 0.0) for s in part.ids if self.step.ids[s] == 1]
        return once[0] if once else self.found.get(part.ids[0], 0.0) / self.step.ids[part.ids[0]]


def judge(evidence: LoopEvidence) -> tuple[tuple[Window, ...], tuple[LoopFinding, ...]]:
    """Return the steps of a loop, and its faults."""
    if not evidence.steps:
        return (), (sentences.never_steps(evidence.where()), *_about_end(evidence))
    windows = tuple(_window(step, evidence.units, _clean_units(step, evidence)) for step in evidence.steps)
    findings = [*_about_end(evidence), *_about_steps(evidence)]
    # A step per micro-batch explains every later symptom, which would only repeat it.
    if "steps_every_micro_batch" not in {finding.code for finding in findings}:
        findings += [*_about_clearing(evidence), *_about_tails(evidence), *_about_rates(evidence)]
        findings += _about_weights(evidence, findings)
    findings += [*_about_samples(evidence, findings), *_about_reductions(evidence), *_about_clipping(evidence)]
    if not any(finding.in_gradient for finding in findings):
        findings += _about_the_rest(evidence)
    # Faults in the gradient come first; `sorted` is stable, so both groups keep the order of the checks.
    return windows, tuple(sorted(findings, key=lambda finding: not finding.in_gradient))


def _clean_units(step: StepParts, evidence: LoopEvidence) -> TableGradient | None:
    return evidence.units.of(tuple(step.ids)) if step.is_clean and step.ids else None


def _window(step: StepParts, units: UnitGradients, own: TableGradient | None) -> Window:
    """Return a step as the report shows it; samples of other windows are measured by units of their own."""
    every = units.of(range(len(step.gradient)))
    used = own if own is not None else every
    expected = {sample: times / step.ids.total() for sample, times in step.ids.items()}
    found = {} if used is None else weights(step.gradient, used)
    return Window(step=step.number + 1, micro_batches=tuple(p.ids for p in step.parts), found=found, expected=expected)


def _about_end(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield whether the loop had to be ended."""
    if not all(trace.ended for trace in evidence.traces):
        lines = [step.line for step in evidence.steps[-1:]]
        yield sentences.does_not_end(len(evidence.traces[0].forwards), evidence.where(*lines))


def _about_steps(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `optimizer.step()`."""
    steps, steps_given = evidence.steps, evidence.accumulation_steps
    # Then nothing says how many micro-batches a step should have.
    if evidence.cuts_batches or not evidence.knows_steps:
        return
    sizes = [step.num_micro_batches for step in steps]
    if steps_given > 1 and max(sizes) == 1 and len(steps) > 1:
        yield sentences.steps_every_micro_batch(steps_given, evidence.where(steps[0].line))
        return
    # A shorter window is in order where it ends an epoch.
    last = {(part.rank, part.epoch): part for parts in evidence.parts for part in parts}
    ends = set(last.values())
    odd = [
        step
        for step in steps
        if step.parts
        and step.num_micro_batches != steps_given
        and len(step.epochs) == 1
        and not (step.num_micro_batches < steps_given and ends & set(step.parts))
    ]
    if odd:
        yield sentences.window_size(
            odd[0].number + 1, odd[0].num_micro_batches, steps_given, evidence.where(odd[0].line)
        )


def _about_clearing(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield faults in the places of `zero_grad()`."""
    stale = [step for step in evidence.steps if step.is_stale]
    if stale:
        found = [step.number + 1 for step in stale]
        yield sentences.zero_grad_missing(found[0], len(found), evidence.where(stale[0].line))
    lost = [line for step in evidence.steps for line in step.lost]
    if lost:
        backward, step = evidence.traces[0].backwards[0], evidence.steps[0]
        yield sentences.zero_grad_inside_window(evidence.accumulation_steps, evidence.where(backward.line, step.line))
    cleared = [step for step in evidence.steps if step.is_cleared]
    if cleared:
        line = evidence.traces[0].backwards[0].line
        yield sentences.zero_grad_before_step(len(cleared), evidence.where(line, cleared[0].line))


def _about_tails(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield what happens to the micro-batches at the end of an epoch that do not fill a window."""
    steps_given, steps = evidence.accumulation_steps, evidence.steps
    carried = [step for step in steps if len(step.epochs) > 1 and step.num_micro_batches != steps_given]
    dropped = [step for step in steps if step.lost_tail]
    done = [trace.steps[-1].num_forwards for trace in evidence.traces]
    left = [part for parts, start in zip(evidence.parts, done, strict=True) for part in parts[start:]]
    if not all(trace.ended and not trace.has_more_passes for trace in evidence.traces):
        # A loop that was stopped has samples left because of that; what it does between two passes was seen.
        left = []
    if carried:
        step = carried[0]
        yield sentences.tail_carried(step.number + 1, step.num_micro_batches, steps_given, evidence.where(step.line))
    elif dropped or left:
        parts = dropped[0].lost_tail if dropped else left
        number = sum(len(part.ids) for part in parts)
        yield sentences.tail_dropped(number, bool(dropped), evidence.where(steps[-1].line))


def _judged(evidence: LoopEvidence) -> tuple[list[WeighedWindow], list[StepParts]]:
    """Return the clean windows with their weights, and those that are no weighted sum of their samples."""
    judged, others = [], []
    for step in evidence.steps:
        units = _clean_units(step, evidence)
        if units is None:
            continue
        if is_combination(step.gradient, units):
            found = weights(step.gradient, units)
            judged.append(WeighedWindow(step=step, found=found, shares=_shares(step, evidence.units)))
        else:
            others.append(step)
    if judged and not evidence.units.scale_is_known:
        # Without a known scale weights are compared with each other, so the first window defines 1.
        factor = sum(judged[0].found.get(sample, 0.0) for sample in judged[0].step.ids)
        judged = [
            WeighedWindow(step=each.step, found={s: w / factor for s, w in each.found.items()}) for each in judged
        ]
    return judged, others


def _shares(step: StepParts, units: UnitGradients) -> tuple[float, ...]:
    """Return what the mean gradient of each micro-batch by itself is multiplied with in a step."""
    if max(step.ids.values()) > 1:  # a sample that comes twice belongs to two micro-batches
        return ()
    shares = []
    for part in step.parts:
        own = units.of(part.ids)
        if own is None:
            return ()
        found = weights(step.gradient, own)
        if not _all_near([found.get(sample, 0.0) for sample in part.ids]):
            return ()
        shares.append(found.get(part.ids[0], 0.0) * len(part.ids))
    return tuple(shares)


def _about_weights(evidence: LoopEvidence, findings: Sequence[LoopFinding]) -> Iterator[LoopFinding]:
    """Yield faults in the divisor of the loss."""
    judged, others = _judged(evidence)
    if others and evidence.draws:
        yield sentences.draws_random_numbers(others[0].number + 1, evidence.where(others[0].line))
    elif others:
        yield sentences.not_a_weighted_sum(others[0].number + 1, evidence.where(others[0].line))
    carried = any(finding.code == "tail_carried" for finding in findings)
    # A window over two epochs has a finding of its own; its weights would only repeat it.
    judged = [each for each in judged if not carried or len(each.step.epochs) == 1]
    # Where a loss is a mean over anything but samples, weights of samples add up to 1 only if they are even.
    by_samples = all(each.has_equal_shares or each.is_even or not evidence.has_targets for each in judged)
    yield from _about_totals(evidence, judged if by_samples else [each for each in judged if each.is_even])
    yield from _about_evenness(evidence, judged)


def _about_totals(evidence: LoopEvidence, judged: Sequence[WeighedWindow]) -> Iterator[LoopFinding]:
    """Yield faults in the sums of weights of a step."""
    wrong = [each for each in judged if not near(each.total, 1.0)]
    if not wrong:
        return
    shown = wrong[0]
    number, total, where = shown.step.number + 1, shown.total, evidence.where(shown.step.line)
    per_micro_batch = [each.total / each.step.num_micro_batches for each in judged]
    # The same weight per micro-batch in full and partial windows: the loop divides by a constant.
    is_constant = all(near(each, per_micro_batch[0]) for each in per_micro_batch)
    if is_constant and near(per_micro_batch[0], 1.0):
        yield sentences.not_divided(number, total, where)
    elif is_constant and len({each.step.num_micro_batches for each in judged}) > 1:
        divisor, size = 1.0 / per_micro_batch[0], shown.step.num_micro_batches
        yield sentences.constant_divisor(number, size, divisor, total, where)
    elif all(near(each.total, judged[0].total) for each in judged):
        yield sentences.constant_factor(total, where)
    else:
        yield sentences.wrong_total(number, total, where)


def _about_evenness(evidence: LoopEvidence, judged: Sequence[WeighedWindow]) -> Iterator[LoopFinding]:
    """Yield why samples of one step weigh differently."""
    codes = set()
    for each in judged:
        if each.is_even:
            continue
        by_rank: dict[int, list[Part]] = defaultdict(list)
        for part in each.step.parts:
            by_rank[part.rank].append(part)
        inside = any(not _all_near([each.weight_of(part) for part in parts]) for parts in by_rank.values())
        means = [[each.weight_of(part) * len(part.ids) for part in parts] for parts in by_rank.values()]
        if inside:
            # Equal sums per micro-batch mean that each was averaged by itself, whatever its size.
            by_size = all(map(_all_near, means))
            by_own = "mean_of_token_means" if evidence.has_targets else "mean_of_weighted_means"
            by_targets = evidence.has_targets and all(map(each.is_even_in, each.step.parts))
            is_own = each.has_equal_shares or by_targets
            code = "mean_of_means" if by_size else by_own if is_own else "uneven_weights"
        else:
            code = "uneven_ranks" if len(by_rank) > 1 else "uneven_weights"
        # Each cause is reported once, for the first step that shows it.
        if code in codes:
            continue
        codes.add(code)
        low, high = (
            choose(each.step.parts, key=lambda part: (each.weight_of(part), -len(part.ids))) for choose in (min, max)
        )
        pairs = tuple((len(part.ids), fraction(each.weight_of(part))) for part in (low, high))
        expected = fraction(each.total / each.step.ids.total())
        yield sentences.uneven(code, each.step.number + 1, pairs, expected, evidence.where(each.step.line))


def _all_near(values: Sequence[float]) -> bool:
    return near(max(values), min(values))


def _about_samples(evidence: LoopEvidence, findings: Sequence[LoopFinding]) -> Iterator[LoopFinding]:
    """Yield which samples come twice in an epoch, and which never."""
    if not all(trace.ended for trace in evidence.traces):
        return
    every = [part for parts in evidence.parts for part in parts]
    seen = Counter((part.epoch, sample) for part in every for sample in part.ids)
    where = evidence.where(evidence.traces[0].forwards[0].line)
    ranks: dict[int, set[int]] = defaultdict(set)
    for part in every:
        for sample in part.ids:
            ranks[sample].add(part.rank)
    shared = [sample for sample, on in ranks.items() if len(on) > 1]
    # Where all samples come equally often, as in two forwards per batch or passes over what was collected, it is meant.
    usual = min(seen.values(), default=1)
    twice = sorted({sample for (_, sample), times in seen.items() if times > usual})
    # A sampler pads with a few samples; if half of them or more are shared, the data is not dealt to ranks at all.
    if len(evidence.traces) > 1 and len(shared) * 2 >= len(ranks):
        yield sentences.ranks_share_samples(len(shared), len(evidence.ids), where)
    elif twice:
        yield sentences.samples_duplicated(twice, len(evidence.traces) > 1, where)
    missing = sorted(set(evidence.ids) - ranks.keys())
    if missing and "tail_dropped" not in {finding.code for finding in findings}:
        yield sentences.samples_missing(missing, where)


def _about_rates(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield whether the learning rate changes inside a window."""
    trace = evidence.traces[0]
    for step in evidence.steps:
        rates = [trace.forwards[part.number].rates for part in step.parts if part.rank == 0]
        # An optimizer of the loop's own is known from its first step on, which lengthens the list without a change.
        changed = [(a, b) for a, b in pairwise(rates) if len(a) == len(b) and a != b]
        if changed:
            line = trace.forwards[step.parts[0].number].line
            yield sentences.schedules_every_micro_batch(
                changed[0][0][0], changed[0][1][0], evidence.where(line, step.line)
            )
            return


def _about_clipping(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield whether gradients are clipped before they are complete."""
    if evidence.loud is None:
        return
    lines = rescaled_lines(evidence.loud)
    # Clipping acts on large gradients and not on small ones; other rescaling acts on both.
    if lines and not rescaled_lines(evidence.traces[0]):
        yield sentences.clips_every_micro_batch(evidence.where(*lines))
    steps = [
        (number, one, other)
        for plain, scaled in evidence.scaled
        for number, (one, other) in enumerate(zip(plain.steps, scaled.steps, strict=False), start=1)
    ]
    for number, plain_step, scaled_step in steps:
        if not is_close(scaled_step.gradient, plain_step.gradient):
            ratio = float(scaled_step.gradient.norm() / plain_step.gradient.norm())
            yield sentences.not_unscaled(number, ratio, evidence.where(scaled_step.line))
            return


def _about_reductions(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield how often gradients are reduced."""
    if len(evidence.traces) == 1:
        return
    apart = [step for step in evidence.steps if not step.agree]
    if apart:
        # If only short windows differ, the last one of an epoch never leaves no_sync.
        tail = all(step.num_micro_batches < evidence.accumulation_steps for step in apart)
        yield sentences.not_reduced(apart[0].number + 1, tail, evidence.where(apart[0].line))
    often = [step for step in evidence.steps if step.num_backwards > 1 and (step.num_reductions or 0) > 1]
    if often:
        trace, step = evidence.traces[0], often[0]
        pairs = [(trace.forwards[each.forwards[0]].synced, each.synced) for each in trace.backwards if each.forwards]
        # DistributedDataParallel decides in the forward, so no_sync around the backward alone has no effect.
        code = "no_sync_around_backward_only" if (True, False) in pairs else "reduces_every_micro_batch"
        yield sentences.reduces(
            code, step.number + 1, step.num_reductions or 0, evidence.where(trace.backwards[0].line)
        )


def _about_the_rest(evidence: LoopEvidence) -> Iterator[LoopFinding]:
    """Yield the first step whose gradient is not that of its un-split batch, for a reason that nothing above names."""
    units = evidence.units
    for step in evidence.steps if units.scale_is_known else ():
        rows = units.of(tuple(step.ids)) if step.ids else None
        # A step without samples should have no gradient.
        expected = step.gradient * 0 if rows is None else _mean(step, rows)
        if not is_close(step.gradient, expected):
            yield sentences.unexplained(step.number + 1, evidence.where(step.line))
            return


def _mean(step: StepParts, rows: TableGradient) -> TableGradient:
    """Return the gradient of the un-split batch."""
    total = rows * 0
    for sample, times in step.ids.items():
        total[sample] = rows[sample] * times / step.ids.total()
    return total
