"""The seconds of a step by part, from the measurements of every rank, and the causes of slow steps."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anybatch.core.collectives import Link
from anybatch.core.geometry import smallest_of_the_fastest
from anybatch.core.units import in_bytes
from anybatch.diagnostics.scaling_ranks import (
    ALONE,
    CURRENT,
    LARGER,
    UNREDUCED,
    BucketCut,
    RankTimes,
    RunSettings,
)
from anybatch.diagnostics.step_times import RankSeconds, median_of, slowest

_MIN_ROUNDS, _MIN_SHARE_OF_ROUNDS = 6, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The seconds of a step by part; they add up to `step`."""

    world_size: int
    step: float  # slowest rank with samples loaded beforehand, plus the wait if a step loads them
    waiting: float  # for data, on the rank that waits longest
    copies: float  # to the device; on a CPU the time to hand over a micro-batch
    compute: float  # forwards and backwards, mean of the ranks
    queued: float  # waiting for a core, mean of the ranks; not included in compute
    communication: float  # the slowest rank with reduction minus the slowest rank without
    stragglers: float  # the slowest rank minus the mean, without reduction
    update: float  # with clipping, mean of the ranks

    @property
    def ranks(self) -> str:
        """The number of ranks, as text."""
        return f"{self.world_size} rank{'s' * (self.world_size != 1)}"

    @property
    def other(self) -> float:
        """The rest of the step: the engine's own work, and jitter."""
        return self.step - sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds by name of the part, without `other`."""
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
    """How much longer one kind of step takes than another."""

    seconds: float  # median over rounds
    is_sure: bool = False  # whether it took longer in nine tenths of at least six rounds


@dataclass(frozen=True, slots=True)
class BucketTrial:
    """The step time with one way to divide gradients into buckets."""

    cut: BucketCut
    step_seconds: float  # the fastest way's median on the slowest rank, plus `longer`
    longer: Difference  # compared with the fastest way, round by round


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingEvidence:
    """Measurements of a step on a number of ranks, and of the same step with changed settings."""

    parts: StepBreakdown
    alone: StepBreakdown | None  # one rank with the whole batch; None if there is only one rank
    reduction: Difference  # extra time with reduction; 0 on one rank
    buckets: tuple[BucketTrial, ...]  # from the smallest to the largest size; empty on one rank
    current_bucket: BucketTrial | None  # None on one rank
    larger_micro_batch: Difference | None  # saved by one micro-batch per rank; None if a rank has only one already
    link: Link | None  # None on one rank
    gradient_bytes: int  # of all gradients on one rank
    slowest_rank: int
    loads: tuple[float, float]  # seconds and processor seconds to load a share in one process
    micro_batch_size: int
    share: int  # samples of the largest share
    num_samples: int  # of a step
    device: str

    @property
    def ideal(self) -> float:
        """Seconds of a step if N ranks were N times as fast as one."""
        return (self.alone or self.parts).step / self.parts.world_size

    @property
    def best_bucket(self) -> BucketTrial | None:
        """The smallest of the fastest bucket sizes if the current size is surely slower, else the current size."""
        if self.current_bucket is None or not self.current_bucket.longer.is_sure:
            return self.current_bucket
        return next((trial for trial in self.buckets if not trial.longer.is_sure), self.current_bucket)


def evidence_of(ranks: Sequence[RankTimes]) -> ScalingEvidence:
    """Return the evidence from the measurements of all ranks."""
    first = ranks[0]
    current = [rank.steps[CURRENT] for rank in ranks]
    unreduced = [rank.steps[UNREDUCED] for rank in ranks] if len(ranks) > 1 else current
    alone = [first.steps[ALONE]] if ALONE in first.steps else None
    busy = [median_of(steps, "busy") for steps in unreduced]
    buckets = _bucket_trials(ranks) if len(ranks) > 1 else []
    return ScalingEvidence(
        parts=_breakdown(current, unreduced, [rank.loading for rank in ranks]),
        alone=None if alone is None else _breakdown(alone, alone, [first.loading_alone]),
        reduction=difference(slowest(current), slowest(unreduced)),
        buckets=tuple(buckets),
        current_bucket=next((trial for n, trial in enumerate(buckets) if f"buckets {n}" not in first.steps), None),
        larger_micro_batch=_compute_gain(ranks) if LARGER in first.steps else None,
        link=_link(ranks) if first.messages else None,
        gradient_bytes=first.gradient_bytes,
        slowest_rank=busy.index(max(busy)),
        loads=(max(rank.load_seconds for rank in ranks), max(rank.load_processor_seconds for rank in ranks)),
        micro_batch_size=first.micro_batch_size,
        share=max(rank.share for rank in ranks),
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

    step_seconds, busy = slowest(current), [median_of(steps, "busy") for steps in unreduced]
    waits = [
        max(0.0, median_of(live, "load") - median_of(steps, "load"))
        for live, steps in zip(loading, unreduced, strict=True)
    ]
    return StepBreakdown(
        world_size=len(current),
        # Not from the loading steps, which ran at another time, when the machine may have been slower or faster.
        step=statistics.median(step_seconds) + max(waits),
        waiting=max(waits),
        copies=mean("load"),
        compute=mean("on_core"),
        queued=mean("queued"),
        communication=max(0.0, difference(step_seconds, slowest(unreduced)).seconds),
        stragglers=max(busy) - statistics.fmean(busy),
        update=mean("update"),
    )


def difference(longer: Sequence[float], shorter: Sequence[float]) -> Difference:
    """Return the median difference over rounds, and whether it is positive in nearly all of them."""
    found = [long - short for long, short in zip(longer, shorter, strict=True)]
    # Not by the mean: on a busy machine, a few rounds are far off.
    is_sure = len(found) >= _MIN_ROUNDS and sum(seconds > 0.0 for seconds in found) >= _MIN_SHARE_OF_ROUNDS * len(found)
    return Difference(statistics.median(found), is_sure)


def _seconds(ranks: Sequence[RankTimes], kind: str) -> list[float]:
    """Return the seconds of the slowest rank in steps of a kind, or in current steps if the kind was not run."""
    return slowest([rank.steps.get(kind, rank.steps[CURRENT]) for rank in ranks])


def _bucket_trials(ranks: Sequence[RankTimes]) -> list[BucketTrial]:
    """Return one trial for each way to divide gradients into buckets."""
    cuts = ranks[0].cuts
    seconds = [_seconds(ranks, f"buckets {number}") for number in range(len(cuts))]
    best = min(seconds, key=statistics.median)
    # Compare round by round, since medians may be from different times if the machine's speed varies.
    longer = [difference(times, best) for times in seconds]
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


def _link(ranks: Sequence[RankTimes]) -> Link:
    """Return the link: latency from the smallest message, rate from the extra time of the largest."""
    seconds = {num_bytes: max(dict(rank.messages)[num_bytes] for rank in ranks) for num_bytes, _ in ranks[0].messages}
    small, large = min(seconds), max(seconds)
    longer = max(seconds[large] - seconds[small], 1e-9)
    return Link(seconds[small], max(1, large - small) / longer)


_MIN_COST = 0.1
"""Minimum share of a step for a cause to be reported."""
_NEGLIGIBLE = 0.05
_MAX_WORKERS = 8
_OVERLAP_FACTOR = 2.0
_NUM_OTHER_MESSAGES = 2
"""Messages of a step that carry no gradients: one for agreement between ranks, and one of the control plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that makes a step longer."""

    code: str
    cost: float  # seconds per step
    what: str
    change: str
    predicted_step: float  # seconds after the change


CauseFields = tuple[str, float, str, str, float]
"""The code of a cause, its cost in seconds, the observation, the change, and the seconds that the change saves."""


def causes_of(evidence: ScalingEvidence, settings: RunSettings, num_cores: int) -> tuple[Cause, ...]:
    """Return the causes that take at least a tenth of a step, the largest first; empty for a healthy run."""
    step = evidence.parts.step
    found = [
        *_loading(evidence, settings, num_cores),
        *_parts_of_ranks(evidence, num_cores),
        *_buckets(evidence, settings),
        *_link_causes(evidence),
        *_micro_batches(evidence),
    ]
    causes = [
        Cause(code=code, cost=cost, what=what, change=change, predicted_step=step - saved)
        for code, cost, what, change, saved in found
        if cost >= _MIN_COST * step
    ]
    return tuple(sorted(causes, key=lambda cause: -cause.cost))


def _loading(evidence: ScalingEvidence, settings: RunSettings, num_cores: int) -> Iterator[CauseFields]:
    parts, now = evidence.parts, settings.num_workers
    if parts.waiting <= _NEGLIGIBLE * parts.step:
        return
    predicted = {
        number: step_with_workers(evidence, number, num_cores=num_cores)
        for number in range(now + 1, max(now + 1, _MAX_WORKERS) + 1)
    }
    best = smallest_of_the_fastest(predicted)
    change = f"num_workers={best} instead of {now}"
    if predicted[best] > (1.0 - _NEGLIGIBLE) * parts.step:
        change = f"make samples cheaper to load: {num_cores} cores are too few for ranks and more workers"
    what = (
        f"ranks wait {_ms(parts.waiting)} of {_ms(parts.step)} for data; a rank's share takes "
        f"{_ms(evidence.loads[0])} to load in one process, {_ms(evidence.loads[1])} of them on a core"
    )
    code = "too_few_workers" if now else "slow_loader"
    yield code, parts.waiting, what, change, max(0.0, parts.step - predicted[best])


def step_with_workers(evidence: ScalingEvidence, num_workers: int, *, num_cores: int) -> float:
    """Return the seconds of a step with this number of loading processes per rank.

    The maximum of three times: the step without waiting; the loading time per worker; and the work of all ranks,
    training and loading, per core.
    """
    parts = evidence.parts
    rest = parts.step - parts.waiting
    load, on_core = evidence.loads
    work = parts.world_size * (parts.compute + parts.update + on_core) / num_cores if evidence.device == "cpu" else 0.0
    return max(rest, load / num_workers, work)


def _parts_of_ranks(evidence: ScalingEvidence, num_cores: int) -> Iterator[CauseFields]:
    """Yield the causes in copies, stragglers, update and shared cores."""
    parts, rank, size = evidence.parts, evidence.slowest_rank, evidence.parts.world_size
    if evidence.device != "cpu":
        what = f"copies to the device take {_ms(parts.copies)} of {_ms(parts.step)}"
        change = "use pin_memory=True in ab.batches, and load samples in the number type of the model"
        yield "copies", parts.copies, what, change, parts.copies
    longer = parts.stragglers / (parts.compute + parts.update + parts.copies)
    what = f"rank {rank} takes {longer:.0%} longer than the mean rank"
    change = f"look at the host of rank {rank}, and for computations that run on that rank only"
    yield "straggler", parts.stragglers, what, change, parts.stragglers
    replicated = parts.update * (1.0 - 1.0 / size)
    what = f"every rank makes the whole update, {_ms(parts.update)}, regardless of the number of ranks"
    change = 'strategy="zero1" shards it; or a larger effective batch, if training allows'
    yield "replicated_update", replicated, what, change, replicated
    what = f"ranks wait {_ms(parts.queued)} of a step for a core: {size} ranks on {num_cores} cores"
    change = "use fewer ranks" if size > num_cores else "stop other programs on these cores, or use fewer ranks"
    yield "shared_cores", parts.queued, what, change, parts.queued


def _buckets(evidence: ScalingEvidence, settings: RunSettings) -> Iterator[CauseFields]:
    current, best = evidence.current_bucket, evidence.best_bucket
    if current is None or best is None or best is current:
        return
    # A gain above the time of the messages is noise.
    gain = min(current.longer.seconds - best.longer.seconds, _max_message_seconds(evidence, current.cut.num_buckets))
    size = best.cut.sizes[0]
    code = "tiny_buckets" if current.cut.num_buckets > best.cut.num_buckets else "giant_buckets"
    what = f"{current.cut} of {in_bytes(settings.bucket_bytes)} take {_ms(gain)} longer than {best.cut}"
    yield code, gain, what, f"bucket_bytes={size} ({in_bytes(size)})", gain


def _link_causes(evidence: ScalingEvidence) -> Iterator[CauseFields]:
    """Yield the exposed communication at the best bucket size, split into latency and rate."""
    link, best, current = evidence.link, evidence.best_bucket, evidence.current_bucket
    if link is None or best is None or current is None or not evidence.reduction.is_sure:
        return
    by_buckets = 0.0 if best is current else max(0.0, current.longer.seconds - best.longer.seconds)
    num_messages = best.cut.num_buckets + _NUM_OTHER_MESSAGES
    exposed = evidence.parts.communication - by_buckets
    left = max(0.0, min(exposed, _max_message_seconds(evidence, best.cut.num_buckets)))
    latency, rate = num_messages * link.latency_seconds, evidence.gradient_bytes / link.bytes_per_second
    of_latency = left * latency / (latency + rate)
    larger = f"a larger effective batch, if training allows: twice the samples per message save {_ms(left / 2)}"
    what = f"{num_messages} messages with a latency of {_ms(link.latency_seconds)} each"
    yield "high_latency", of_latency, what, larger, left / 2
    size, speed = in_bytes(evidence.gradient_bytes), in_bytes(round(link.bytes_per_second))
    what = f"{size} of gradients at {speed}/s: {_ms(rate)} a step"
    change = f'DDP(compression="bf16"), which halves the bytes and rounds gradients once per rank; or {larger}'
    yield "slow_link", left - of_latency, what, change, left / 2


def _max_message_seconds(evidence: ScalingEvidence, num_buckets: int) -> float:
    """Return the maximum seconds that messages add to a step; a longer delay comes from waiting for slow ranks.

    Messages that overlap with a backward may take twice as long as messages that do not.
    """
    if evidence.link is None:
        return 0.0
    latency = (num_buckets + _NUM_OTHER_MESSAGES) * evidence.link.latency_seconds
    return _OVERLAP_FACTOR * (latency + evidence.gradient_bytes / evidence.link.bytes_per_second)


def _micro_batches(evidence: ScalingEvidence) -> Iterator[CauseFields]:
    gain = evidence.larger_micro_batch
    if gain is not None and gain.is_sure:
        size, share = evidence.micro_batch_size, evidence.share
        what = f"micro-batches of {size} samples compute {_ms(gain.seconds)} longer than one of {share}"
        change = f"micro_batch_size={share}, or as much of it as memory allows"
        yield "small_micro_batches", gain.seconds, what, change, gain.seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
