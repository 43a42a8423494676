"""Causes of slow steps on several ranks, with the change and the expected gain. Pure: evidence in, causes out."""

from dataclasses import dataclass, replace

from anybatch.core.units import in_bytes
from anybatch.diagnostics.scaling.breakdown import ScalingEvidence
from anybatch.diagnostics.scaling.measure import RunSettings

_WORTH = 0.1
"""Minimum share of a step for a cause to be reported."""
_NEGLIGIBLE = 0.05
_MOST_WORKERS = 8
_BESIDE_COMPUTE = 2.0
_OWN_MESSAGES = 2
"""Messages of a step other than gradients: its agreement and the control plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that makes a step longer.

    Attributes:
        code: its name, such as "slow_loader".
        cost: its seconds per step.
        what: the observation, with figures.
        change: the change to make.
        predicted_step: seconds of a step after the change; None if unknown.
        settings: the run's settings after the change; None if it is not a setting.
    """

    code: str
    cost: float
    what: str
    change: str
    predicted_step: float | None
    settings: RunSettings | None = None


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
