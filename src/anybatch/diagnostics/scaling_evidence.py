"""The seconds of a step by part, from the measurements of every rank, and the causes of slow steps. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.core.units import in_bytes
from anybatch.diagnostics.scaling_ranks import (
    ALONE,
    COMPRESSED,
    CURRENT,
    LARGER,
    UNREDUCED,
    BucketCut,
    RankTimes,
    RunSettings,
)
from anybatch.diagnostics.step_times import RankSeconds, median_of, slowest

_MANY_ROUNDS, _NEARLY_ALL = 6, 0.9
_SURE = 3.0
"""A difference above this many uncertainties is significant, also for the best of several trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The seconds of a step by part; they add up to `step`."""

    world_size: int
    step: float  # slowest rank, with loaded samples, plus the extra wait of a step that loads them
    waiting: float  # for data, on the rank that waits longest
    copies: float  # to the device; on a CPU the time to hand over a micro-batch
    compute: float  # forwards and backwards, mean of the ranks
    queued: float  # for a core, mean of the ranks; not included in compute
    communication: float  # a step with reduction minus one without, the slowest rank of each
    stragglers: float  # the slowest rank minus the mean, without reduction
    update: float  # with clipping, mean of the ranks

    @property
    def ranks(self) -> str:
        """The number of ranks, in words."""
        return f"{self.world_size} rank{'s' * (self.world_size != 1)}"

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
    """The extra time of one kind of step over another."""

    seconds: float  # median over rounds
    uncertainty: float  # quartile range over rounds / sqrt(rounds)
    always: bool = False  # whether it took longer in nine tenths of many rounds

    @property
    def is_sure(self) -> bool:
        """Whether the difference is significant, since on a busy machine a few rounds are far off."""
        return self.seconds > (1.0 if self.always else _SURE) * self.uncertainty


@dataclass(frozen=True, slots=True)
class BucketTrial:
    """One way to cut gradients into buckets."""

    cut: BucketCut
    step_seconds: float  # the fastest cut's median on the slowest rank, plus `longer`
    longer: Difference  # than the fastest cut, round by round


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
    """Measurements of a step on a number of ranks, and of changes of it."""

    parts: StepBreakdown
    alone: StepBreakdown | None  # one rank with the whole batch; None if there is only one rank
    reduction: Difference  # extra time with reduction; 0 on one rank
    held_step: float  # with loaded samples, on the slowest rank
    unreduced_step: float  # the same without reduction
    buckets: tuple[BucketTrial, ...]  # from the smallest to the largest size; empty on one rank
    current_bucket: BucketTrial | None  # None on one rank
    compressed: Difference | None  # saved per step by gradients in bf16; None if not tried
    larger_micro_batch: Difference | None  # saved by a share in one micro-batch; None if it is one already
    link: MeasuredLink | None  # None on one rank
    num_messages: int  # collectives with gradients per step
    gradient_bytes: int  # of one copy
    slowest_rank: int
    loads: tuple[float, float]  # seconds to load a share in its own process, and processor time
    micro_batch_size: int
    share: int  # samples of the largest share
    num_samples: int  # of a step
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
    current = [one.steps[CURRENT] for one in ranks]
    unreduced = [one.steps[UNREDUCED] for one in ranks] if len(ranks) > 1 else current
    alone = [first.steps[ALONE]] if ALONE in first.steps else None
    held, bare = slowest(current), slowest(unreduced)
    busy = [median_of(steps, "busy") for steps in unreduced]
    buckets = _bucket_trials(ranks) if len(ranks) > 1 else []
    return ScalingEvidence(
        parts=_breakdown(current, unreduced, [one.loading for one in ranks]),
        alone=None if alone is None else _breakdown(alone, alone, [first.loading_alone]),
        reduction=difference(held, bare),
        held_step=statistics.median(held),
        unreduced_step=statistics.median(bare),
        buckets=tuple(buckets),
        current_bucket=next((one for n, one in enumerate(buckets) if f"buckets {n}" not in first.steps), None),
        compressed=difference(held, _seconds(ranks, COMPRESSED)) if COMPRESSED in first.steps else None,
        larger_micro_batch=_compute_gain(ranks) if LARGER in first.steps else None,
        link=_link(ranks) if first.messages else None,
        num_messages=first.steps[CURRENT][0].num_messages,
        gradient_bytes=first.gradient_bytes,
        slowest_rank=busy.index(max(busy)),
        loads=(max(one.load_seconds for one in ranks), max(one.load_processor_seconds for one in ranks)),
        micro_batch_size=first.micro_batch_size,
        share=max(one.share for one in ranks),
        num_samples=first.num_samples,
        device=first.device,
    )


def _breakdown(
    current: Sequence[Sequence[RankSeconds]],
    unreduced: Sequence[Sequence[RankSeconds]],
    loading: Sequence[Sequence[RankSeconds]],
) -> StepBreakdown:
    """Return the parts of a step from the steps of each rank: with reduction, without, and with loading."""

    def mean(part: str) -> float:
        return statistics.fmean(median_of(steps, part) for steps in unreduced)

    held, busy = slowest(current), [median_of(steps, "busy") for steps in unreduced]
    waits = [
        max(0.0, median_of(live, "load") - median_of(steps, "load"))
        for live, steps in zip(loading, unreduced, strict=True)
    ]
    return StepBreakdown(
        world_size=len(current),
        # Not from the loading steps, which ran at another time, when the machine may have been slower or faster.
        step=statistics.median(held) + max(waits),
        waiting=max(waits),
        copies=mean("load"),
        compute=mean("on_core"),
        queued=mean("queued"),
        communication=max(0.0, difference(held, slowest(unreduced)).seconds),
        stragglers=max(busy) - statistics.fmean(busy),
        update=mean("update"),
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


def _seconds(ranks: Sequence[RankTimes], kind: str) -> list[float]:
    """Return the seconds of the slowest rank in steps of a kind; without such steps, in current ones."""
    return slowest([one.steps.get(kind, one.steps[CURRENT]) for one in ranks])


def _bucket_trials(ranks: Sequence[RankTimes]) -> list[BucketTrial]:
    """Return the trial of each cut of the gradients."""
    cuts = ranks[0].cuts
    seconds = [_seconds(ranks, f"buckets {number}") for number in range(len(cuts))]
    best = min(seconds, key=statistics.median)
    # Compare round by round, since medians may be from different times if the machine's speed varies.
    longer = [difference(one, best) for one in seconds]
    fastest = statistics.median(best)
    return [BucketTrial(cut, fastest + more.seconds, more) for cut, more in zip(cuts, longer, strict=True)]


def _compute_gain(ranks: Sequence[RankTimes]) -> Difference:
    """Return the gain of larger micro-batches in compute time, which is less noisy than the time of whole steps."""
    now, larger = (
        [
            statistics.fmean(step.on_core for step in steps)
            for steps in zip(*(r.steps[kind] for r in ranks), strict=True)
        ]
        for kind in (CURRENT, LARGER)
    )
    return difference(now, larger)


def _link(ranks: Sequence[RankTimes]) -> MeasuredLink:
    """Return the link: latency from the smallest message, rate from the extra time of the largest."""
    seconds = {num_bytes: max(dict(one.messages)[num_bytes] for one in ranks) for num_bytes, _ in ranks[0].messages}
    small, large = min(seconds), max(seconds)
    longer = max(seconds[large] - seconds[small], 1e-9)
    return MeasuredLink(seconds[small], max(1, large - small) / longer)


_WORTH = 0.1
"""Minimum share of a step for a cause to be reported."""
_NEGLIGIBLE = 0.05
_MOST_WORKERS = 8
_BESIDE_COMPUTE = 2.0
_OWN_MESSAGES = 2
"""Messages of a step other than gradients: its agreement and the control plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that makes a step longer."""

    code: str
    cost: float  # seconds per step
    what: str
    change: str
    predicted_step: float | None  # seconds after the change; None if unknown
    settings: RunSettings | None = None  # after the change; None if it is not a setting


def causes_of(evidence: ScalingEvidence, settings: RunSettings, num_cores: int) -> tuple[Cause, ...]:
    """Return the causes that take at least a tenth of a step, the largest first; empty for a healthy run."""
    settings = replace(settings, micro_batch_size=evidence.micro_batch_size)
    found = [
        _loading(evidence, settings, num_cores),
        *_parts_of_ranks(evidence, num_cores),
        _buckets(evidence, settings),
        *_link_causes(evidence, settings),
        _micro_batches(evidence, settings),
    ]
    worth = [cause for cause in found if cause is not None and cause.cost >= _WORTH * evidence.parts.step]
    return tuple(sorted(worth, key=lambda cause: -cause.cost))


def _saving(
    evidence: ScalingEvidence, code: str, seconds: float, what: str, change: str, *, settings: RunSettings | None = None
) -> Cause:
    """Return a cause whose change saves all the seconds that it costs."""
    predicted = evidence.parts.step - seconds
    return Cause(code=code, cost=seconds, what=what, change=change, predicted_step=predicted, settings=settings)


def _loading(evidence: ScalingEvidence, settings: RunSettings, num_cores: int) -> Cause | None:
    parts, now = evidence.parts, settings.num_workers
    if parts.waiting <= _NEGLIGIBLE * parts.step:
        return None
    predicted = {
        number: step_with_workers(evidence, number, num_cores=num_cores) for number in range(now + 1, _MOST_WORKERS + 1)
    }
    what = (
        f"ranks wait {_ms(parts.waiting)} of {_ms(parts.step)} for data; a rank's share takes {_ms(evidence.loads[0])} "
        f"to load in one process, {_ms(evidence.loads[1])} of them on a core"
    )
    code = "too_few_workers" if now else "slow_loader"
    if not predicted:
        change = f"{now} workers are many; make samples cheaper to load"
        return Cause(code=code, cost=parts.waiting, what=what, change=change, predicted_step=None)
    least = min(predicted.values())
    best = next(number for number, seconds in predicted.items() if seconds <= 1.03 * least)
    change = f"num_workers={best} instead of {now}"
    if predicted[best] > (1.0 - _NEGLIGIBLE) * parts.step:
        change = f"make samples cheaper to load: {num_cores} cores are too few for ranks and more workers"
    return Cause(
        code=code,
        cost=parts.waiting,
        what=what,
        change=change,
        predicted_step=min(parts.step, predicted[best]),
        settings=replace(settings, num_workers=best),
    )


def step_with_workers(evidence: ScalingEvidence, num_workers: int, *, num_cores: int) -> float:
    """Return the seconds of a step with this number of loading processes per rank.

    The maximum of three times: the step without waiting; the loading time per worker; and the work of all ranks,
    training and loading, per core.
    """
    parts = evidence.parts
    rest = parts.step - parts.waiting
    load, on_core = evidence.loads
    asked = parts.world_size * (parts.compute + parts.update + on_core) / num_cores if evidence.device == "cpu" else 0.0
    return max(rest, load / num_workers, asked)


def _parts_of_ranks(evidence: ScalingEvidence, num_cores: int) -> list[Cause]:
    """Return a cause for each part of a step that is not due to messages, loading or settings."""
    parts, rank, size = evidence.parts, evidence.slowest_rank, evidence.parts.world_size
    longer = parts.stragglers / (parts.compute + parts.update + parts.copies)
    causes = [
        _saving(
            evidence,
            "straggler",
            parts.stragglers,
            f"rank {rank} takes {longer:.0%} longer than the mean rank",
            f"look at the host of rank {rank}, and at what only that rank computes",
        ),
        _saving(
            evidence,
            "replicated_update",
            parts.update * (1.0 - 1.0 / size),
            f"every rank makes the whole update, {_ms(parts.update)}, regardless of the number of ranks",
            'strategy="zero1" shards it; or a larger effective batch, if training allows',
        ),
        _saving(
            evidence,
            "shared_cores",
            parts.queued,
            f"ranks wait {_ms(parts.queued)} of a step for a core: {size} ranks on {num_cores} cores",
            "use fewer ranks" if size > num_cores else "stop other programs on these cores, or use fewer ranks",
        ),
    ]
    if evidence.device == "cpu":
        return causes
    what = f"copies to the device take {_ms(parts.copies)} of {_ms(parts.step)}"
    change = "use pin_memory=True in ab.batches, and load samples in the number type of the model"
    return [_saving(evidence, "copies", parts.copies, what, change), *causes]


def _buckets(evidence: ScalingEvidence, settings: RunSettings) -> Cause | None:
    current, best = evidence.current_bucket, evidence.best_bucket
    if current is None or best is None or best is current:
        return None
    # At most the time of these messages alone; the rest is noise.
    gain = min(current.longer.seconds - best.longer.seconds, _most_by_messages(evidence, current.cut.num_buckets))
    size = best.cut.sizes[0]
    code = "tiny_buckets" if current.cut.num_buckets > best.cut.num_buckets else "giant_buckets"
    what = f"{current.cut} of {in_bytes(settings.bucket_bytes)} take {_ms(gain)} longer than {best.cut}"
    change = f"bucket_bytes={size} ({in_bytes(size)})"
    return _saving(evidence, code, gain, what, change, settings=replace(settings, bucket_bytes=size))


def _link_causes(evidence: ScalingEvidence, settings: RunSettings) -> list[Cause]:
    """Return the exposed communication at the best bucket size, split into latency and rate."""
    link, best, current = evidence.link, evidence.best_bucket, evidence.current_bucket
    if link is None or best is None or current is None or not evidence.reduction.is_sure:
        return []
    parts = evidence.parts
    by_buckets = 0.0 if best is current else max(0.0, current.longer.seconds - best.longer.seconds)
    num_messages = best.cut.num_buckets + _OWN_MESSAGES
    left = max(0.0, min(parts.communication - by_buckets, _most_by_messages(evidence, best.cut.num_buckets)))
    latency, rate = num_messages * link.latency, evidence.gradient_bytes / link.bytes_per_second
    speed = f"{in_bytes(round(link.bytes_per_second))}/s"
    of_latency = left * latency / (latency + rate)
    larger = f"a larger effective batch, if training allows: twice the samples per message save {_ms(left / 2)}"
    tries = evidence.compressed is not None and evidence.compressed.is_sure
    saved = min(evidence.compressed.seconds, left) if tries and evidence.compressed else 0.0
    compress = f'DDP(compression="bf16") ({_ms(saved)} less, a rounding of gradients per rank); or ' if tries else ""
    return [
        Cause(
            code="high_latency",
            cost=of_latency,
            what=f"{num_messages} messages of {_ms(link.latency)} each, before a byte of gradients",
            change=larger,
            predicted_step=parts.step - left / 2,
        ),
        Cause(
            code="slow_link",
            cost=left - of_latency,
            what=f"{in_bytes(evidence.gradient_bytes)} of gradients at {speed}: {_ms(rate)} a step",
            change=f"{compress}{larger}",
            predicted_step=parts.step - (saved if tries else left / 2),
            settings=replace(settings, strategy="ddp", compression="bf16") if tries else None,
        ),
    ]


def _most_by_messages(evidence: ScalingEvidence, num_buckets: int) -> float:
    """Return the maximum effect of messages on a step; a longer delay comes from ranks that wait for each other.

    Messages during a backward may take twice as long as alone.
    """
    if evidence.link is None:
        return 0.0
    return _BESIDE_COMPUTE * evidence.link.seconds(num_buckets + _OWN_MESSAGES, evidence.gradient_bytes)


def _micro_batches(evidence: ScalingEvidence, settings: RunSettings) -> Cause | None:
    gain = evidence.larger_micro_batch
    if gain is None or not gain.is_sure:
        return None
    size, share = evidence.micro_batch_size, evidence.share
    what = f"micro-batches of {size} samples compute {_ms(gain.seconds)} longer than one of {share}"
    change = f"micro_batch_size={share}, or as much of it as memory allows"
    changed = replace(settings, micro_batch_size=share)
    return _saving(evidence, "small_micro_batches", gain.seconds, what, change, settings=changed)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
