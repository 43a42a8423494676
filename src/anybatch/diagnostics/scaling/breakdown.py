"""Compute the seconds of a step by part, from the measurements of every rank. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.diagnostics.scaling.bucket_sizes import BucketCut
from anybatch.diagnostics.scaling.measure import ALONE, COMPRESSED, CURRENT, LARGER, UNREDUCED, RankTimes
from anybatch.diagnostics.scaling.phase_clock import RankSeconds

_MANY_ROUNDS, _NEARLY_ALL = 6, 0.9
_SURE = 3.0
"""A difference above this many uncertainties is significant, also for the best of several trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The seconds of a step by part; they add up to `step`.

    Attributes:
        world_size: number of ranks.
        step: a step with loaded samples on the slowest rank, plus the extra wait of a step that loads them.
        waiting: waiting for data, on the rank that waits longest.
        copies: copies to the device; on a CPU the time to hand over a micro-batch.
        compute: forwards and backwards, the mean of the ranks.
        queued: waiting for a core, the mean of the ranks; not included in compute.
        communication: exposed communication: a step with reduction minus one without, the slowest rank of each.
        stragglers: extra time of the slowest rank over the mean rank, without reduction.
        update: clipping and the optimizer, the mean of the ranks.
    """

    world_size: int
    step: float
    waiting: float
    copies: float
    compute: float
    queued: float
    communication: float
    stragglers: float
    update: float

    @property
    def other(self) -> float:
        """The rest: the engine itself, and jitter."""
        return self.step - sum(self.named.values())

    @property
    def named(self) -> dict[str, float]:
        """Return part to seconds, without the rest."""
        return {
            "waiting for data": self.waiting,
            "copies": self.copies,
            "compute": self.compute,
            "waiting for a core": self.queued,
            "exposed communication": self.communication,
            "stragglers": self.stragglers,
            "update": self.update,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """The extra time of one kind of step over another.

    Attributes:
        seconds: the median over rounds.
        uncertainty: the quartile range over rounds, divided by the square root of their number.
        always: whether it took longer in nine tenths of many rounds.
    """

    seconds: float
    uncertainty: float
    always: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether the difference is significant, since on a busy machine a few rounds are far off."""
        return self.seconds > (1.0 if self.always else _SURE) * self.uncertainty


@dataclass(frozen=True, slots=True)
class BucketTrial:
    """One way to cut gradients into buckets.

    Attributes:
        cut: sizes and number of buckets.
        step_seconds: time of a step with loaded samples on the slowest rank: the fastest cut's median, plus `longer`.
        longer: extra time over the fastest cut, round by round.
    """

    cut: BucketCut
    step_seconds: float
    longer: Difference


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The time of one message between ranks: `latency + bytes / bytes_per_second`."""

    latency: float
    bytes_per_second: float

    def seconds(self, num_messages: int, num_bytes: float) -> float:
        """Return the seconds of consecutive messages with this total size."""
        return num_messages * self.latency + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingEvidence:
    """Measurements of a step on a number of ranks, and of changes of it.

    Attributes:
        parts: the step by part.
        alone: the same for one rank that runs the whole effective batch; None if there is only one rank.
        reduction: extra time with reduction; 0 on one rank.
        held_step: a step with loaded samples, on the slowest rank.
        unreduced_step: the same without reduction.
        buckets: trials of other bucket sizes, from the smallest to the largest; empty on one rank.
        current_bucket: the trial of the size in use; None on one rank.
        compressed: time saved per step by gradients in bf16; None if not tried.
        larger_micro_batch: compute time saved by a rank share in one micro-batch; None if it is one already.
        link: link between the ranks; None on one rank.
        num_messages: collectives with gradients per step.
        gradient_bytes: bytes of one copy of the gradients.
        slowest_rank: the straggler.
        loads: seconds to load each rank's share in its own process, and the processor time of that.
        micro_batch_size: micro-batch size used.
        share: samples of the largest share.
        num_samples: samples of a step.
        device: the device measured.
    """

    parts: StepBreakdown
    alone: StepBreakdown | None
    reduction: Difference
    held_step: float
    unreduced_step: float
    buckets: tuple[BucketTrial, ...]
    current_bucket: BucketTrial | None
    compressed: Difference | None
    larger_micro_batch: Difference | None
    link: MeasuredLink | None
    num_messages: int
    gradient_bytes: int
    slowest_rank: int
    loads: tuple[float, float]
    micro_batch_size: int
    share: int
    num_samples: int
    device: str

    @property
    def ideal(self) -> float:
        """Seconds of a step if N ranks were N times as fast as one."""
        return (self.alone or self.parts).step / self.parts.world_size

    @property
    def efficiency(self) -> float:
        """Speed relative to the ideal."""
        return self.ideal / self.parts.step

    @property
    def best_bucket(self) -> BucketTrial | None:
        """The recommended bucket size: the current one, or the smallest of the fastest if these are surely faster."""
        if self.current_bucket is None or not self.current_bucket.longer.is_sure:
            return self.current_bucket
        return next((one for one in self.buckets if not one.longer.is_sure), self.current_bucket)


def evidence_of(ranks: Sequence[RankTimes]) -> ScalingEvidence:
    """Return the evidence in the times of all ranks."""
    first = ranks[0]
    size = len(ranks)
    key = UNREDUCED if size > 1 else CURRENT
    busy = [_median(one.steps[key], lambda step: step.busy) for one in ranks]
    slow = max(range(size), key=lambda rank: busy[rank])
    held, bare = _slowest([one.steps[CURRENT] for one in ranks]), _slowest([one.steps[key] for one in ranks])
    reduction = difference(held, bare)
    waits = [
        max(0.0, _median(one.loading, lambda step: step.load) - _median(one.steps[key], lambda step: step.load))
        for one in ranks
    ]
    parts = StepBreakdown(
        world_size=size,
        # Not from the loading steps, which ran at another time, when the machine may have been slower or faster.
        step=statistics.median(held) + max(waits),
        waiting=max(waits),
        copies=_mean(_median(one.steps[key], lambda step: step.load) for one in ranks),
        compute=_mean(_median(one.steps[key], _on_core) for one in ranks),
        queued=_mean(_median(one.steps[key], lambda step: step.queued) for one in ranks),
        communication=max(0.0, reduction.seconds),
        stragglers=busy[slow] - statistics.fmean(busy),
        update=_mean(_median(one.steps[key], lambda step: step.update) for one in ranks),
    )
    buckets = _bucket_trials(ranks)
    own = next((one for one in buckets if one[0]), (True, None))[1]
    return ScalingEvidence(
        parts=parts,
        alone=_alone(first) if ALONE in first.steps else None,
        reduction=reduction,
        held_step=statistics.median(held),
        unreduced_step=statistics.median(bare),
        buckets=tuple(one[1] for one in buckets),
        current_bucket=own,
        compressed=_gain(ranks, COMPRESSED),
        larger_micro_batch=_compute_gain(ranks),
        link=_link(ranks),
        num_messages=first.steps[CURRENT][0].num_messages,
        gradient_bytes=first.gradient_bytes,
        slowest_rank=slow,
        loads=(max(one.load_seconds for one in ranks), max(one.load_processor_seconds for one in ranks)),
        micro_batch_size=first.micro_batch_size,
        share=max(one.share for one in ranks),
        num_samples=first.num_samples,
        device=first.device,
    )


def difference(longer: Sequence[float], shorter: Sequence[float]) -> Difference:
    """Return the median difference over rounds, and its uncertainty: quartile range / sqrt(rounds)."""
    found = sorted(one - other for one, other in zip(longer, shorter, strict=True))
    if len(found) < 2:  # noqa: PLR2004 (one number has no range)
        return Difference(found[0], math.inf)
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    num_longer = sum(one > 0.0 for one in found)
    always = len(found) >= _MANY_ROUNDS and num_longer >= _NEARLY_ALL * len(found)
    return Difference(statistics.median(found), (high - low) / math.sqrt(len(found)), always)


def _alone(rank: RankTimes) -> StepBreakdown:
    steps = rank.steps[ALONE]
    loaded = _median(steps, lambda step: step.load)
    waiting = max(0.0, _median(rank.loading_alone, lambda step: step.load) - loaded)
    return StepBreakdown(
        world_size=1,
        step=_median(steps, lambda step: step.whole) + waiting,
        waiting=waiting,
        copies=loaded,
        compute=_median(steps, _on_core),
        queued=_median(steps, lambda step: step.queued),
        communication=0.0,
        stragglers=0.0,
        update=_median(steps, lambda step: step.update),
    )


def _bucket_trials(ranks: Sequence[RankTimes]) -> list[tuple[bool, BucketTrial]]:
    """Return for each cut of the gradients whether it is the current one, and its trial."""
    if len(ranks) == 1:
        return []
    seconds: list[tuple[bool, BucketCut, list[float]]] = []
    for number, cut in enumerate(ranks[0].cuts):
        kind = f"buckets {number}"
        own = kind not in ranks[0].steps
        seconds.append((own, cut, _slowest([one.steps[CURRENT if own else kind] for one in ranks])))
    best = min(seconds, key=lambda one: statistics.median(one[2]))[2]
    fastest = statistics.median(best)
    trials = []
    for own, cut, taken in seconds:
        longer = difference(taken, best)
        # Compare round by round, since medians may be from different times if the machine's speed varies.
        trials.append((own, BucketTrial(cut, fastest + longer.seconds, longer)))
    return trials


def _gain(ranks: Sequence[RankTimes], kind: str) -> Difference | None:
    if kind not in ranks[0].steps:
        return None
    return difference(_slowest([one.steps[CURRENT] for one in ranks]), _slowest([one.steps[kind] for one in ranks]))


def _compute_gain(ranks: Sequence[RankTimes]) -> Difference | None:
    """Return the gain of larger micro-batches in compute time, which is less noisy than the time of whole steps."""
    if LARGER not in ranks[0].steps:
        return None
    per_round = [
        [statistics.fmean(_on_core(one.steps[kind][number]) for one in ranks) for number in range(len(first))]
        for kind in (CURRENT, LARGER)
        for first in (ranks[0].steps[kind],)
    ]
    return difference(*per_round)


def _link(ranks: Sequence[RankTimes]) -> MeasuredLink | None:
    """Return the link: latency from the smallest message, rate from the extra time of the largest."""
    if not ranks[0].messages:
        return None
    seconds = {num_bytes: max(dict(one.messages)[num_bytes] for one in ranks) for num_bytes, _ in ranks[0].messages}
    small, large = min(seconds), max(seconds)
    longer = max(seconds[large] - seconds[small], 1e-9)
    return MeasuredLink(seconds[small], max(1, large - small) / longer)


def _slowest(ranks: Sequence[Sequence[RankSeconds]]) -> list[float]:
    """Return the seconds of the slowest rank, for each round."""
    return [max(step.whole for step in steps) for steps in zip(*ranks, strict=True)]


def _median(steps: Sequence[RankSeconds], part: Callable[[RankSeconds], float]) -> float:
    return statistics.median(part(step) for step in steps)


def _on_core(step: RankSeconds) -> float:
    """Return the seconds of compute without the time in which other programs used the core."""
    return step.compute - step.queued


def _mean(values: "Sequence[float] | object") -> float:
    return statistics.fmean(values)  # type: ignore[arg-type]
