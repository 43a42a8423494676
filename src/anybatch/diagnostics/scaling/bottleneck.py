"""Causes of slow steps on several ranks, with the change and the expected gain. Pure: evidence in, causes out."""

from dataclasses import dataclass, replace
from typing import Literal

from anybatch.core.units import in_bytes
from anybatch.diagnostics.scaling.breakdown import MeasuredLink, ScalingEvidence
from anybatch.diagnostics.scaling.measure import RunSettings

Code = Literal[
    "slow_loader",
    "too_few_workers",
    "copies",
    "straggler",
    "tiny_buckets",
    "giant_buckets",
    "slow_link",
    "high_latency",
    "small_micro_batches",
    "replicated_update",
    "shared_cores",
]
WORTH = 0.1
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
        code: its name.
        cost: its seconds per step.
        what: the observation, with figures.
        change: the change to make.
        predicted_step: seconds of a step after the change; None if unknown.
        settings: the run's settings after the change; None if it is not a setting.
    """

    code: Code
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
        _copies(evidence),
        _straggler(evidence),
        _buckets(evidence, settings),
        *_link_causes(evidence, settings),
        _micro_batches(evidence, settings),
        _update(evidence),
        _cores(evidence, num_cores),
    ]
    worth = [cause for cause in found if cause is not None and cause.cost >= WORTH * evidence.parts.step]
    return tuple(sorted(worth, key=lambda cause: -cause.cost))


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
    code: Code = "too_few_workers" if now else "slow_loader"
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


def _copies(evidence: ScalingEvidence) -> Cause | None:
    if evidence.device == "cpu":
        return None
    parts = evidence.parts
    return Cause(
        code="copies",
        cost=parts.copies,
        what=f"copies to the device take {_ms(parts.copies)} of {_ms(parts.step)}",
        change="use pin_memory=True in ab.batches, and load samples in the number type of the model",
        predicted_step=parts.step - parts.copies,
    )


def _straggler(evidence: ScalingEvidence) -> Cause:
    parts = evidence.parts
    mean = parts.compute + parts.update + parts.copies
    return Cause(
        code="straggler",
        cost=parts.stragglers,
        what=f"rank {evidence.slowest_rank} takes {parts.stragglers / mean:.0%} longer than the mean rank",
        change=f"look at the host of rank {evidence.slowest_rank}, and at what only that rank computes",
        predicted_step=parts.step - parts.stragglers,
    )


def _buckets(evidence: ScalingEvidence, settings: RunSettings) -> Cause | None:
    current, best = evidence.current_bucket, evidence.best_bucket
    if current is None or best is None or best is current:
        return None
    # At most the time of these messages alone; the rest is noise.
    gain = min(current.longer.seconds - best.longer.seconds, _most_by_messages(evidence, current.cut.num_buckets))
    size = best.cut.sizes[0]
    return Cause(
        code="tiny_buckets" if current.cut.num_buckets > best.cut.num_buckets else "giant_buckets",
        cost=gain,
        what=(
            f"{_counted(current.cut.num_buckets)} of {in_bytes(settings.bucket_bytes)} take {_ms(gain)} longer than "
            f"{_counted(best.cut.num_buckets)}"
        ),
        change=f"bucket_bytes={size} ({in_bytes(size)})",
        predicted_step=evidence.parts.step - gain,
        settings=replace(settings, bucket_bytes=size),
    )


def _link_causes(evidence: ScalingEvidence, settings: RunSettings) -> list[Cause]:
    """Return the exposed communication at the best bucket size, split into latency and rate."""
    link, best, current = evidence.link, evidence.best_bucket, evidence.current_bucket
    if link is None or best is None or current is None:
        return []
    parts = evidence.parts
    by_buckets = 0.0 if best is current else max(0.0, current.longer.seconds - best.longer.seconds)
    num_messages = best.cut.num_buckets + _OWN_MESSAGES
    left = max(0.0, min(parts.communication - by_buckets, _most_by_messages(evidence, best.cut.num_buckets)))
    if not evidence.reduction.is_sure:
        return []
    latency, rate = num_messages * link.latency, evidence.gradient_bytes / link.bytes_per_second
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
            what=f"{in_bytes(evidence.gradient_bytes)} of gradients at {_rate(link)}: {_ms(rate)} a step",
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
    return Cause(
        code="small_micro_batches",
        cost=gain.seconds,
        what=f"micro-batches of {evidence.micro_batch_size} samples compute {_ms(gain.seconds)} longer than one of "
        f"{evidence.share}",
        change=f"micro_batch_size={evidence.share}, or as much of it as memory allows",
        predicted_step=evidence.parts.step - gain.seconds,
        settings=replace(settings, micro_batch_size=evidence.share),
    )


def _update(evidence: ScalingEvidence) -> Cause:
    parts = evidence.parts
    shared = parts.update * (1.0 - 1.0 / parts.world_size)
    return Cause(
        code="replicated_update",
        cost=shared,
        what=f"every rank makes the whole update, {_ms(parts.update)}, regardless of the number of ranks",
        change='strategy="zero1" shards it; or a larger effective batch, if training allows',
        predicted_step=parts.step - shared,
    )


def _cores(evidence: ScalingEvidence, num_cores: int) -> Cause:
    parts = evidence.parts
    too_many = parts.world_size > num_cores
    return Cause(
        code="shared_cores",
        cost=parts.queued,
        what=f"ranks wait {_ms(parts.queued)} of a step for a core: {parts.world_size} ranks on {num_cores} cores",
        change="use fewer ranks" if too_many else "stop other programs on these cores, or use fewer ranks",
        predicted_step=parts.step - parts.queued,
    )


def _counted(num_buckets: int) -> str:
    return f"{num_buckets} bucket{'s' * (num_buckets != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(link: MeasuredLink) -> str:
    return f"{in_bytes(round(link.bytes_per_second))}/s"
