"""Finds the faults in the recorded steps of a loop, and reports each once, with the first step that shows it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from anybatch.diagnostics.loop_check.judged_loop import (
    ACCUMULATION_STEPS,
    LARGE_GAIN,
    MICRO_BATCH_SIZE,
    NUM_EPOCHS,
    JudgedLoop,
)
from anybatch.diagnostics.loop_check.probe import LoopTrace, is_close, near
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


class LoopJudge:
    """The traces of a loop on one kind of data, one per rank, and the faults found in them."""

    def __init__(self, loop: JudgedLoop, traces: Sequence[LoopTrace]) -> None:
        self.loop, self.traces = loop, traces
        # A loop on one rank runs again with gradients so large that any clipping changes them, and with another seed.
        self.large_trace = loop.run(gain=LARGE_GAIN) if len(traces) == 1 else None
        pairs = zip(traces[0].steps, loop.run(seed=1).steps if len(traces) == 1 else [], strict=False)
        self.is_random = any(not is_close(step.gradient, other.gradient) for step, other in pairs)
        # All ranks have this number of batches: 16 and 15 samples, for example, are both 4 batches of at most 4.
        batches_per_epoch = math.ceil(math.ceil(len(loop.ids) / len(traces)) / MICRO_BATCH_SIZE)
        # A loop that counts steps may end within an epoch.
        num_epochs = 0 if {"max_steps", "epochs"} & loop.needed == {"max_steps"} else NUM_EPOCHS
        for rank, trace in enumerate(traces):
            set_epochs(trace, rank, num_epochs, batches_per_epoch)
        self.micro_batches = [each for trace in traces for each in trace.forwards if each.has_backward]
        self.ended = all(trace.ended for trace in traces)
        self.steps = steps_of(traces)
        self.unit_gradients = UnitGradients(loop, traces[0])
        sizes = Counter(step.size for step in self.steps)
        most_common = max(sizes, key=lambda size: (sizes[size], size), default=ACCUMULATION_STEPS)
        self.accumulation_steps = ACCUMULATION_STEPS if loop.has_accumulation_steps else most_common
        self.findings: dict[str, LoopFinding] = {}

    def report(self) -> LoopReport:
        """Report all faults, first those in the gradient; raise `LoopError` if the loop was stopped without a step."""
        if self.traces[0].has_more_passes and not self.steps:
            message = f"{self.loop.name} made no step in {len(self.traces[0].forwards)} micro-batches and was stopped."
            message += " Accumulate over fewer, or give it a parameter accumulation_steps."
            raise LoopError(message)
        self._find()
        return LoopReport(
            loop=self.loop.name,
            findings=tuple(sorted(self.findings.values(), key=lambda finding: not finding.in_gradient)),
            windows=tuple(map(self._window, self.steps)),
            accumulation_steps=self.accumulation_steps,
            num_ranks=len(self.traces),
            remarks=tuple(self._remarks()),
        )

    def _remarks(self) -> Iterator[str]:
        """Yield aspects of the loop that could not be judged."""
        loop, trace = self.loop, self.traces[0]
        if trace.has_more_passes:
            yield f"The loop was stopped after {NUM_EPOCHS} passes over the data."
        if loop.is_stream:
            yield "The loop asks for one batch at a time, so a smaller last batch and padding were not tested."
        if guesses := ", ".join(f"{name}={value!r}" for name, value in trace.guesses.items()):
            yield f"Unknown settings, with the values that the loop got: {guesses}."
        if not self.unit_gradients.scale_is_known:
            yield "A constant factor cannot be detected without a parameter accumulation_steps or a common loss."
        rows = self.unit_gradients.of(loop.ids)
        if rows is not None and (hidden := sorted(set(loop.ids) - set(visible(loop.ids, rows)))):
            yield f"The loss has no gradient for these samples, so they have no weight: {ranges(hidden)}."

    def _window(self, step: Step) -> Window:
        """Return a step for the report; weights of a faulty step are relative to a batch of all samples."""
        rows = self.unit_gradients.of(step.ids) if step.is_clean else None
        rows = self.unit_gradients.of(range(len(step.gradient))) if rows is None else rows
        seen = tuple(step.ids) if rows is None else visible(tuple(step.ids), rows)
        return Window(
            step=step.number,
            micro_batches=tuple(each.ids for each in step.micro_batches),
            found={} if rows is None else weights(step.gradient, rows),
            expected={sample: step.ids[sample] / step.ids.total() for sample in seen},
        )

    def _add(self, code: str, found: str, expected: object, *lines: int | None) -> None:
        """Add a fault unless an earlier step has the same fault."""
        known = tuple(sorted({line for line in lines if line is not None})[:4])
        file = Path(self.loop.file or "the loop").name
        finding = LoopFinding(code=code, found=found, expected=str(expected), file=file, lines=known)
        self.findings.setdefault(code, finding)

    def _find(self) -> None:
        """Find all faults; skip checks whose symptoms an earlier fault explains."""
        if not self.ended:
            value = f"still running after {len(self.traces[0].forwards)} forwards"
            self._add("does_not_end", value, "two passes over 31 samples", *(step.line for step in self.steps[-1:]))
        if not self.steps:
            self._add("never_steps", "0 steps in two epochs", "one per window of micro-batches")
            return
        self._find_step_faults()
        if "steps_every_micro_batch" not in self.findings:
            self._find_clearing_faults()
            self._find_tail_faults()
            self._find_rate_faults()
            self._find_weight_faults()
        self._find_sample_faults()
        self._find_reduction_faults()
        self._find_clipping_faults()
        self._find_scaling_faults()
        if not any(finding.in_gradient for finding in self.findings.values()):
            self._find_unexplained()

    def _find_step_faults(self) -> None:
        """Find calls of `optimizer.step()` in the wrong places."""
        steps, expected, every = self.steps, self.accumulation_steps, self.micro_batches
        largest = min(MICRO_BATCH_SIZE, len(self.loop.ids))
        is_single = all(max(step.ids.values(), default=1) == 1 for step in steps)
        is_split = is_single and max((len(each.ids) for each in every), default=0) < largest
        if is_split or not self.loop.has_accumulation_steps:  # any number of micro-batches per step is correct
            return
        if expected > 1 and len(steps) > 1 and max(step.size for step in steps) == 1:
            self._add("steps_every_micro_batch", "1 micro-batch per step", expected, steps[0].line)
            return
        # A shorter window is correct at the end of an epoch.
        last = set({(each.rank, each.epoch): each for each in every}.values())
        for step in steps:
            is_short = step.size < expected and not last & set(step.micro_batches)
            if step.micro_batches and len(step.epochs) == 1 and (step.size > expected or is_short):
                self._add("window_size", f"{step.size} micro-batches in step {step.number}", expected, step.line)

    def _find_clearing_faults(self) -> None:
        """Find calls of `zero_grad()` in the wrong places."""
        steps, backward = self.steps, self.traces[0].backward_line
        if stale := [step for step in steps if step.of_rank.is_stale]:
            value = f"old gradients in {len(stale)} steps, first in step {stale[0].number}"
            self._add("zero_grad_missing", value, "none", stale[0].line)
        if lost := [step for step in steps if step.lost]:
            value = f"{len(lost[0].lost)} of {len(lost[0].micro_batches)} micro-batches without effect"
            self._add("zero_grad_inside_window", value, 0, backward, lost[0].line)
        if cleared := [step for step in steps if step.is_cleared]:
            value = f"no gradient in {len(cleared)} steps"
            self._add("zero_grad_before_step", value, "the gradient of the window", backward, cleared[0].line)

    def _find_tail_faults(self) -> None:
        """Find faults with the micro-batches at the end of an epoch that do not fill a window."""
        steps, expected = self.steps, self.accumulation_steps
        for step in steps:
            if len(step.epochs) > 1 and step.size != expected:
                value = f"{step.size} micro-batches in step {step.number}"
                self._add("tail_carried", value, f"at most {expected}", step.line)
        if "tail_carried" in self.findings:
            return
        lost = next((step.lost_tail for step in steps if step.lost_tail), ())
        # A stopped loop may not have reached the step of its last micro-batches.
        if not lost and self.ended and not any(trace.has_more_passes for trace in self.traces):
            stepped = {each.key for step in steps for each in step.micro_batches}
            ends = [each for trace in self.traces for each in trace.forwards[trace.steps[-1].num_forwards :]]
            lost = tuple(each for each in ends if each.key not in stepped)
        if lost:
            value = f"{sum(len(each.ids) for each in lost)} samples of the last window without effect"
            self._add("tail_dropped", value, 0, steps[-1].line)

    def _find_rate_faults(self) -> None:
        """Find learning rates that change inside a window."""
        for step in self.steps:
            of_step = [each for each in step.micro_batches if each.rank == 0]
            for before, after in pairwise(forward.learning_rates for forward in of_step):
                # The list gets longer at the first step of an optimizer that the loop creates.
                if len(before) == len(after) and before != after:
                    value = f"{before[0]:g} and {after[0]:g} in step {step.number}"
                    expected = "one learning rate per step"
                    self._add("schedules_every_micro_batch", value, expected, of_step[0].line, step.line)

    def _find_weight_faults(self) -> None:
        """Find faults in the divisor of the loss."""
        weighed: list[tuple[Step, list[Share]]] = []
        for step in self.steps:
            rows = self.unit_gradients.of(step.ids) if step.is_clean else None
            if rows is None:
                continue
            shares = shares_of(step, self.unit_gradients) if is_combination(step.gradient, rows) else None
            if shares is None:
                code = "draws_random_numbers" if self.is_random else "not_a_weighted_sum"
                self._add(code, f"no weighted sum of gradients in step {step.number}", "a weighted sum", step.line)
                continue
            # A window over two epochs has a finding already.
            if shares and not ("tail_carried" in self.findings and len(step.epochs) > 1):
                weighed.append((step, shares))
        if complete := [pair for pair in weighed if not pair[0].unused]:
            self._find_total_faults(complete)
        for step, shares in weighed:
            if code := _cause(shares, has_targets=self.loop.kind == "tokens"):
                total = total_of(shares) or 1.0
                share = max(shares, key=lambda share: abs(share.found / total / share.expected - 1))
                found, size = fraction(share.found / total), len(share.micro_batch.ids)
                value = f"share {found} of a micro-batch of {size} samples in step {step.number}"
                self._add(code, value, fraction(share.expected), step.line)
        if self.findings.keys() & {"mean_of_token_means", "mean_of_weighted_means"}:
            self.findings.pop("mean_of_means", None)  # by chance: in this step, the items are proportional to samples

    def _find_total_faults(self, weighed: Sequence[tuple[Step, list[Share]]]) -> None:
        """Find faults in the sum of the weights of a step."""
        totals = [total_of(shares) for _, shares in weighed]
        if not self.unit_gradients.scale_is_known:  # compare with the total of the first step instead
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
        self._add(code, f"weights of step {step.number} add up to {fraction(totals[wrong])}", 1, step.line)

    def _find_sample_faults(self) -> None:
        """Find samples that occur twice in an epoch, and samples that never occur."""
        if not self.ended:
            return
        line, total = self.traces[0].forwards[0].line, len(self.loop.ids)
        seen = Counter((each.epoch, sample) for each in self.micro_batches for sample in each.ids)
        times_on_ranks = Counter(
            sample for sample, _ in {(s, each.rank) for each in self.micro_batches for s in each.ids}
        )
        shared = sum(times > 1 for times in times_on_ranks.values())
        # If all samples are equally frequent, repeating them is intended, as in two forwards per batch.
        usual = min(seen.values(), default=1)
        twice = sorted({sample for (_, sample), times in seen.items() if times > usual})
        # A DistributedSampler repeats a few samples; if at least half are on several ranks, the data are not split.
        if len(self.traces) > 1 and shared * 2 >= len(times_on_ranks):
            self._add("ranks_share_samples", f"{shared} of {total} samples on several ranks", "none", line)
        elif twice:
            self._add("samples_duplicated", f"samples {ranges(twice)} twice", "each once", line)
        missing = set(self.loop.ids) - times_on_ranks.keys()
        if missing and not {"tail_dropped", "tail_carried"} & self.findings.keys():
            self._add("samples_missing", f"samples {ranges(missing)} without effect", "each once", line)

    def _find_reduction_faults(self) -> None:
        """Find gradients that are reduced too often or not at all."""
        trace = self.traces[0]
        for step in self.steps:
            reductions = step.of_rank.num_reductions
            if not step.is_equal_on_ranks:
                value = f"different gradients in step {step.number}"
                self._add("not_reduced", value, "the same on every rank", step.line)
            if reductions > 1 and len(self.traces) > 1:
                value = f"{reductions} reductions in step {step.number}"
                self._add("reduces_every_micro_batch", value, 1, trace.backward_line)

    def _find_clipping_faults(self) -> None:
        """Find clipping in the wrong place."""
        plain, large = self.traces[0], self.large_trace or self.traces[0]
        # Clipping changes large gradients, but not small ones; other changes act on both.
        for code, when, lines, usual in (
            ("clips_every_micro_batch", "inside a window", large.changed_lines, plain.changed_lines),
            ("clips_after_step", "after a step", large.changed_after_lines, plain.changed_after_lines),
        ):
            if lines and not usual:
                self._add(code, f"gradients that change {when}", "one clipping, before optimizer.step()", *lines)

    def _find_scaling_faults(self) -> None:
        """Find gradients that the optimizer uses while a GradScaler still scales them."""
        if self.large_trace is None or not self.loop.uses_scaler:
            return
        scaled = self.loop.run(loss_scale=LOSS_SCALE), self.loop.run(gain=LARGE_GAIN, loss_scale=LOSS_SCALE)
        for plain, other in zip((self.traces[0], self.large_trace), scaled, strict=True):
            for number, (step, scaled_step) in enumerate(zip(plain.steps, other.steps, strict=False), start=1):
                if not is_close(scaled_step.gradient, step.gradient):
                    ratio = float(scaled_step.gradient.norm() / step.gradient.norm())
                    value = f"{ratio:.4g} times the gradient in step {number} with scale 1024 instead of 1"
                    self._add("not_unscaled", value, "the same gradient", scaled_step.line)

    def _find_unexplained(self) -> None:
        """Find a step whose gradient differs from its unsplit gradient for a reason that no other check finds."""
        for step in self.steps if self.unit_gradients.scale_is_known else ():
            rows, total = self.unit_gradients.of(step.ids), step.ids.total() or 1
            shares = torch.tensor([step.ids[sample] / total for sample in range(len(step.gradient))])
            unsplit = 0 * step.gradient if rows is None else rows * shares.double()[:, None, None]
            if not is_close(step.gradient, unsplit):
                self._add("unexplained", f"wrong weights in step {step.number}", "those in the table", step.line)


def _cause(shares: Sequence[Share], *, has_targets: bool) -> str:
    """Return the code of the fault that explains the shares; "" if they are proportional to the expected shares."""
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
