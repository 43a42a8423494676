"""The seconds of a step by part, from the measurements of every rank, and the causes of slow steps."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from anybatch.core.collectives import Link
from anybatch.core.geometry import smallest_of_the_fastest
from anybatch.core.units import in_bytes
from anybatch.diagnostics.scaling_ranks import ALONE, CURRENT, UNREDUCED, BucketCut, RankTimes, RunSettings
from anybatch.diagnostics.step_times import MAX_QUEUED, Estimate, RankSeconds, estimate, median_of, slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """The seconds of a step by part; they are not negative, and add up to `step`."""

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
        return max(0.0, self.step - sum(self.by_name.values()))

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
class BucketTrial:
    """The step time with one way to divide gradients into buckets."""

    cut: BucketCut
    step_seconds: float  # the fastest way's median on the slowest rank, plus `longer`
    longer: Estimate  # compared with the fastest way, round by round


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingEvidence:
    """Measurements of a step on a number of ranks, and of the same step with changed settings."""

    parts: StepBreakdown
    alone: StepBreakdown | None  # one rank with the whole batch; None if there is only one rank
    efficiency: Estimate  # time on one rank / (number of ranks x time on all), without loading
    reduction: Estimate  # extra seconds with reduction; 0 on one rank
    waiting: Estimate  # extra seconds of steps that load their samples, on the rank that waits longest
    straggling: Estimate  # extra seconds of the slowest rank's own work, compared with the mean rank
    buckets: tuple[BucketTrial, ...]  # from the smallest to the largest size; empty on one rank
    current_bucket: BucketTrial | None  # None on one rank
    link: Link | None  # None on one rank
    gradient_bytes: int  # of all gradients on one rank
    slowest_rank: int
    loads: tuple[float, float]  # seconds and processor seconds to load a share in one process
    micro_batch_size: int
    num_samples: int  # of a step
    device: str

    @property
    def ideal(self) -> float:
        """Seconds of a step if N ranks were N times as fast as one."""
        return (self.alone or self.parts).step / self.parts.world_size

    @property
    def is_busy(self) -> bool:
        """Whether a rank waits for a core while other ranks are idle, so that only other programs can use it."""
        parts = self.alone or self.parts
        return parts.queued > MAX_QUEUED * (parts.step - parts.waiting - parts.communication)

    @property
    def unclear(self) -> dict[str, Estimate]:
        """The parts that may be 0 or a quarter of a step, by the intervals of their seconds."""
        parts = {"waiting for data": self.waiting, "exposed communication": self.reduction}
        limit = _UNCLEAR * self.parts.step
        return {name: part for name, part in parts.items() if not part.is_sure and part.high > limit}

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
    last = busy.index(max(busy))
    work = [[step.busy for step in steps] for steps in zip(*unreduced, strict=True)]
    buckets = _bucket_trials(ranks) if len(ranks) > 1 else []
    whole = slowest(current)
    one_rank = [step / len(ranks) for step in slowest(alone)] if alone else whole
    return ScalingEvidence(
        parts=_breakdown(current, unreduced, [rank.loading for rank in ranks]),
        alone=None if alone is None else _breakdown(alone, alone, [first.loading_alone]),
        efficiency=estimate([ideal / step for ideal, step in zip(one_rank, whole, strict=True)]),
        reduction=difference(whole, slowest(unreduced)),
        waiting=_waiting([rank.loading for rank in ranks], unreduced),
        buckets=tuple(buckets),
        current_bucket=next((trial for n, trial in enumerate(buckets) if f"buckets {n}" not in first.steps), None),
        link=_link(ranks) if first.messages else None,
        gradient_bytes=first.gradient_bytes,
        straggling=estimate([seconds[last] - statistics.fmean(seconds) for seconds in work]),
        slowest_rank=last,
        loads=(max(rank.load_seconds for rank in ranks), max(rank.load_processor_seconds for rank in ranks)),
        micro_batch_size=first.micro_batch_size,
        num_samples=first.num_samples,
        device=first.device,
    )


def _breakdown(
    current: Sequence[Sequence[RankSeconds]],
    unreduced: Sequence[Sequence[RankSeconds]],
    loading: Sequence[Sequence[RankSeconds]],
) -> StepBreakdown:
    """Return the parts of a step from the steps of each rank: with reduction, without, and with loading.

    Parts without reduction are mean shares of a step over rounds, so that they add up on a busy machine too.
    """
    # Not from the loading steps, which ran at another time, when the machine may have been slower or faster.
    step, unreduced_step = (statistics.median(slowest(steps)) for steps in (current, unreduced))
    communication = min(step, max(0.0, difference(slowest(current), slowest(unreduced)).value))
    scale = (step - communication) / unreduced_step / len(unreduced)

    def mean(part: str) -> float:
        shares = [statistics.fmean(getattr(step, part) / step.whole for step in steps) for steps in unreduced]
        return scale * sum(share * median_of(steps, "whole") for share, steps in zip(shares, unreduced, strict=True))

    busy = [median_of(steps, "busy") for steps in unreduced]
    late = unreduced_step - statistics.fmean(median_of(steps, "whole") for steps in unreduced)
    waiting = max(0.0, _waiting(loading, unreduced).value)
    return StepBreakdown(
        world_size=len(current),
        step=step + waiting,
        waiting=waiting,
        copies=mean("load"),
        compute=mean("on_core"),
        queued=mean("queued_compute"),
        communication=communication,
        stragglers=min(max(busy) - statistics.fmean(busy), late),
        update=mean("update"),
    )


def _waiting(loading: Sequence[Sequence[RankSeconds]], cached: Sequence[Sequence[RankSeconds]]) -> Estimate:
    """Return the extra seconds of steps that load their samples, on the rank that waits longest."""
    waits = [
        estimate([step.load - median_of(steps, "load") for step in live])
        for live, steps in zip(loading, cached, strict=True)
    ]
    return max(waits, key=lambda wait: wait.value)


def difference(longer: Sequence[float], shorter: Sequence[float]) -> Estimate:
    """Return the difference over rounds."""
    return estimate([long - short for long, short in zip(longer, shorter, strict=True)])


def _seconds(ranks: Sequence[RankTimes], kind: str) -> list[float]:
    """Return the seconds of the slowest rank in steps of a kind, or in current steps if the kind was not run."""
    return slowest([rank.steps.get(kind, rank.steps[CURRENT]) for rank in ranks])


def _bucket_trials(ranks: Sequence[RankTimes]) -> list[BucketTrial]:
    """Return one trial for each way to divide gradients into buckets."""
    cuts = ranks[0].cuts
    seconds = [_seconds(ranks, f"buckets {number}") for number in range(len(cuts))]
    best = min(seconds, key=statistics.median)
    # Compare round by round, since medians may be from different times if the machine's speed varies.
    found = [difference(times, best) for times in seconds]
    longer = [replace(more, value=max(0.0, more.value)) for more in found]
    fastest = statistics.median(best)
    return [BucketTrial(cut, fastest + more.value, more) for cut, more in zip(cuts, longer, strict=True)]


def _link(ranks: Sequence[RankTimes]) -> Link:
    """Return the link: latency from the smallest message, rate from the extra time of the largest."""
    seconds = {num_bytes: max(dict(rank.messages)[num_bytes] for rank in ranks) for num_bytes, _ in ranks[0].messages}
    small, large = min(seconds), max(seconds)
    longer = max(seconds[large] - seconds[small], 1e-9)
    return Link(seconds[small], max(1, large - small) / longer)


_MIN_COST = 0.1
"""Minimum share of a step for a cause to be reported."""
_NEGLIGIBLE, _UNCLEAR = 0.05, 0.25
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
    """Return the causes that take at least a tenth of a step, the largest first; empty for a healthy run.

    If other programs use the cores, they are the only cause.
    """
    step = evidence.parts.step
    found = [*_shared_cores(evidence, num_cores)]
    if not evidence.is_busy and (evidence.parts.world_size > num_cores or evidence.parts.queued <= MAX_QUEUED * step):
        found += [
            *_loading(evidence, settings, num_cores),
            *_parts_of_ranks(evidence),
            *_buckets(evidence, settings),
            *_link_causes(evidence),
        ]
    causes = [
        Cause(code=code, cost=cost, what=what, change=change, predicted_step=step - min(saved, cost))
        for code, cost, what, change, saved in found
        if cost >= _MIN_COST * step
    ]
    return tuple(sorted(causes, key=lambda cause: -cause.cost))


def _loading(evidence: ScalingEvidence, settings: RunSettings, num_cores: int) -> Iterator[CauseFields]:
    parts, now = evidence.parts, settings.num_workers
    if parts.waiting <= _NEGLIGIBLE * parts.step or not evidence.waiting.is_sure:
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


def _shared_cores(evidence: ScalingEvidence, num_cores: int) -> Iterator[CauseFields]:
    parts, size = evidence.parts, evidence.parts.world_size
    what = f"ranks wait {_ms(parts.queued)} of a step for a core: {size} ranks on {num_cores} cores"
    change = "use fewer ranks" if size > num_cores else "stop other programs on these cores, or use fewer ranks"
    yield "shared_cores", parts.queued, what, change, parts.queued


def _parts_of_ranks(evidence: ScalingEvidence) -> Iterator[CauseFields]:
    """Yield the causes in copies, stragglers and update."""
    parts, rank, size = evidence.parts, evidence.slowest_rank, evidence.parts.world_size
    if evidence.device != "cpu":
        what = f"copies to the device take {_ms(parts.copies)} of {_ms(parts.step)}"
        change = "use pin_memory=True in ab.batches, and load samples in the number type of the model"
        yield "copies", parts.copies, what, change, parts.copies
    longer = parts.stragglers / (parts.compute + parts.update + parts.copies)
    what = f"rank {rank} takes {longer:.0%} longer than the mean rank"
    change = f"look at the host of rank {rank}, and for computations that run on that rank only"
    straggling = parts.stragglers if evidence.straggling.is_sure else 0.0
    yield "straggler", straggling, what, change, parts.stragglers
    replicated = parts.update * (1.0 - 1.0 / size)
    what = f"every rank makes the whole update, {_ms(parts.update)}, regardless of the number of ranks"
    change = 'strategy="zero1" shards it; or a larger effective batch, if training allows'
    yield "replicated_update", replicated, what, change, replicated


def _buckets(evidence: ScalingEvidence, settings: RunSettings) -> Iterator[CauseFields]:
    current, best = evidence.current_bucket, evidence.best_bucket
    if current is None or best is None or best is current:
        return
    # A gain above the time of the messages, or above the time that all messages add to a step, is noise.
    most = min(evidence.parts.communication, _max_message_seconds(evidence, current.cut.num_buckets))
    gain = min(current.longer.value - best.longer.value, most)
    size = best.cut.sizes[0]
    code = "tiny_buckets" if current.cut.num_buckets > best.cut.num_buckets else "giant_buckets"
    what = f"{current.cut} of {in_bytes(settings.bucket_bytes)} take {_ms(gain)} longer than {best.cut}"
    yield code, gain, what, f"bucket_bytes={size} ({in_bytes(size)})", gain


def _link_causes(evidence: ScalingEvidence) -> Iterator[CauseFields]:
    """Yield the exposed communication at the best bucket size, split into latency and rate."""
    link, best, current = evidence.link, evidence.best_bucket, evidence.current_bucket
    if link is None or best is None or current is None or not evidence.reduction.is_sure:
        return
    by_buckets = 0.0 if best is current else max(0.0, current.longer.value - best.longer.value)
    num_messages = best.cut.num_buckets + _NUM_OTHER_MESSAGES
    exposed = evidence.parts.communication - by_buckets
    left = max(0.0, min(exposed, _max_message_seconds(evidence, best.cut.num_buckets)))
    latency, rate = num_messages * link.latency_seconds, evidence.gradient_bytes / link.bytes_per_second
    of_latency = left * latency / (latency + rate)
    larger = f"a larger effective batch, if training allows: twice the samples per message save {_ms(left / 2)}"
    what = f"the latency of {num_messages} messages adds {_ms(of_latency)}"
    yield "high_latency", of_latency, what, larger, left / 2
    size, speed = in_bytes(evidence.gradient_bytes), in_bytes(round(link.bytes_per_second))
    what = f"{size} of gradients at {speed}/s add {_ms(left - of_latency)}"
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
