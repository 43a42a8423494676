"""The parts of a step add up, and each cause of poor scaling is reported first with its fix."""

import dataclasses
import math
from typing import Any

import pytest

from anybatch.diagnostics.scaling_evidence import (
    Cause,
    ScalingEvidence,
    causes_of,
    difference,
    evidence_of,
    step_with_workers,
)
from anybatch.diagnostics.scaling_ranks import CURRENT, UNREDUCED, BucketCut, RunSettings
from tests.diagnostics.scaling.made_times import COMPUTE, MESSAGES, UPDATE, rank_times


def test_parts() -> None:
    """Communication is the slowest step with reduction minus the slowest without; stragglers are separate."""
    slow = COMPUTE + 0.05
    found = evidence_of([rank_times(0, slowest=slow), rank_times(1, compute=slow)])

    assert found.parts.communication == pytest.approx(MESSAGES)
    assert found.parts.stragglers == pytest.approx(0.025)
    assert found.slowest_rank == 1
    assert found.parts.compute == pytest.approx(COMPUTE + 0.025)
    assert found.parts.update == pytest.approx(UPDATE)
    assert found.parts.step == pytest.approx(slow + UPDATE + MESSAGES, abs=1e-5)
    assert sum(found.parts.named.values()) + found.parts.other == pytest.approx(found.parts.step)
    assert found.parts.other == pytest.approx(0.0, abs=1e-5)
    assert found.efficiency == pytest.approx((2 * COMPUTE + UPDATE) / 2 / found.parts.step, abs=1e-4)


def test_waiting_is_that_of_live_steps() -> None:
    """Waiting for data is the extra time of live steps over steps with cached samples, on the worst rank."""
    found = evidence_of([rank_times(0, waiting=0.02), rank_times(1, waiting=0.03)])

    assert found.parts.waiting == pytest.approx(0.03)
    assert found.parts.step == pytest.approx(COMPUTE + UPDATE + MESSAGES + 0.03, abs=1e-5)
    assert found.alone is not None
    assert found.alone.waiting == pytest.approx(0.04)


def test_waiting_for_a_core_is_not_compute() -> None:
    """Time spent waiting for a core is separate from compute and does not make a rank a straggler."""
    one = rank_times(0)
    queued = tuple(dataclasses.replace(step, compute=step.compute + 0.04, queued=0.04) for step in one.steps[UNREDUCED])
    found = evidence_of([dataclasses.replace(one, steps={**one.steps, UNREDUCED: queued}), rank_times(1)])

    assert found.parts.queued == pytest.approx(0.02)
    assert found.parts.compute == pytest.approx(COMPUTE)
    assert found.parts.stragglers == pytest.approx(0.0, abs=1e-5)


def test_bucket_sizes_on_a_machine_that_changes_its_speed() -> None:
    """Bucket sizes are compared within each round, so a machine that slows down does not change the result."""
    current = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    four = (1.01, 1.01, 1.01, 1.01, 2.01, 2.01, 2.01, 2.01)  # it slows down between the two steps of round 5
    times = {CURRENT: current, "buckets 0": four}
    ranks = []
    for one in (rank_times(0), rank_times(1)):
        taken = {
            kind: tuple(
                dataclasses.replace(step, whole=whole) for step, whole in zip(one.steps[kind], found, strict=True)
            )
            for kind, found in times.items()
        }
        ranks.append(dataclasses.replace(one, steps={**one.steps, **taken}))
    four_buckets, one_bucket = evidence_of(ranks).buckets

    assert one_bucket.step_seconds == pytest.approx(1.0)
    assert four_buckets.step_seconds == pytest.approx(1.01)
    assert four_buckets.longer.seconds == pytest.approx(0.01)


def test_the_link_is_latency_and_rate() -> None:
    """The latency is the time of the smallest message; the bandwidth follows from the largest."""
    link = evidence_of([rank_times(0), rank_times(1)]).link

    assert link is not None
    assert link.latency == 0.001
    assert link.bytes_per_second == pytest.approx(996 / 0.007)
    assert link.seconds(3, 996) == pytest.approx(0.003 + 0.007)


def test_what_is_sure() -> None:
    """A difference within the noise of rounds is not sure; one present in every round is, despite the noise."""
    base = [1.0] * 8
    assert difference([1.1] * 8, base).is_sure
    assert not difference([1.1, 0.9, 1.2, 0.8, 1.1, 0.9, 1.3, 1.2], base).is_sure
    assert difference([1.2, 1.9, 1.3, 2.8, 1.2, 1.9, 1.4, 1.3], base).is_sure
    assert not difference([2.0], [1.0]).is_sure
    assert math.isinf(difference([2.0], [1.0]).uncertainty)


def test_the_bucket_size_in_use_stays_unless_another_is_surely_faster() -> None:
    """The best bucket size is the smallest of the fastest, or the one in use if none is surely faster."""
    same = evidence_of([rank_times(0), rank_times(1)])
    assert same.best_bucket is same.current_bucket is same.buckets[1]

    faster = evidence_of([rank_times(rank, four_buckets=0.002) for rank in range(2)])
    assert faster.best_bucket is faster.buckets[0]
    assert faster.current_bucket is faster.buckets[1]
    assert faster.current_bucket.longer.seconds == pytest.approx(MESSAGES - 0.002)


ONE_BUCKET = RunSettings(bucket_bytes=1000)


def found(**changed: Any) -> ScalingEvidence:
    """Return the evidence of two ranks that differ from healthy ones."""
    return evidence_of([rank_times(rank, **changed) for rank in range(2)])


def causes(settings: RunSettings = ONE_BUCKET, num_cores: int = 8, **changed: Any) -> tuple[Cause, ...]:
    """Return the causes for such ranks."""
    return causes_of(found(**changed), settings, num_cores)


def test_a_healthy_run_has_no_cause() -> None:
    """A run in which no part takes a tenth of a step has no cause."""
    assert causes() == ()


def test_loading() -> None:
    """If loading is too slow, the fix is the smallest number of workers that keeps up, with the predicted step."""
    slow = causes(waiting=0.15)[0]
    assert slow.code == "slow_loader"
    assert slow.cost == pytest.approx(0.15)
    assert slow.settings is not None
    assert slow.settings.num_workers == 2
    assert slow.predicted_step == pytest.approx(COMPUTE + UPDATE + 0.01, abs=1e-5)

    few = causes(RunSettings(bucket_bytes=1000, num_workers=1), waiting=0.05, load_seconds=0.3)[0]
    assert few.code == "too_few_workers"
    assert few.settings is not None
    assert few.settings.num_workers == 3


def test_loading_that_the_cores_cannot_do() -> None:
    """If loading keeps a core busy and none is free, the report says that more workers gain nothing."""
    evidence = found(waiting=0.15, load_processor_seconds=0.15)
    assert step_with_workers(evidence, 4, num_cores=2) == pytest.approx(COMPUTE + UPDATE + 0.15)
    assert step_with_workers(evidence, 4, num_cores=16) == pytest.approx(COMPUTE + UPDATE + 0.01, abs=1e-5)
    assert "too few for ranks and more workers" in causes_of(evidence, ONE_BUCKET, 2)[0].change


def test_a_straggler() -> None:
    """A straggler is reported by its rank, with the predicted shorter step."""
    evidence = evidence_of([rank_times(0, slowest=0.2), rank_times(1, compute=0.2)])
    first = causes_of(evidence, ONE_BUCKET, 8)[0]
    assert first.code == "straggler"
    assert "rank 1 takes 32% longer" in first.what
    assert first.predicted_step == pytest.approx(evidence.parts.step - 0.05)


def test_buckets() -> None:
    """If another bucket size is surely faster, the predicted gain is the measured difference."""
    messages = ((4, 0.001), (1000, 0.08))
    giant = causes(reduction=0.08, four_buckets=0.01, messages=messages)[0]
    assert giant.code == "giant_buckets"
    assert giant.cost == pytest.approx(0.07)
    assert giant.settings is not None
    assert giant.settings.bucket_bytes == 100

    cuts = (BucketCut(1, (5000,)), BucketCut(4, (1000,)))
    tiny = causes(reduction=0.08, four_buckets=0.01, messages=messages, cuts=cuts)[0]
    assert tiny.code == "tiny_buckets"
    assert tiny.settings is not None
    assert tiny.settings.bucket_bytes == 5000


def test_the_link() -> None:
    """A slow reduction at the best bucket size is due to latency or bandwidth, as separate messages show."""
    slow = causes(reduction=0.07, four_buckets=0.07, messages=((4, 0.001), (1000, 0.08)), compressed=0.03)
    assert [cause.code for cause in slow] == ["slow_link"]
    assert slow[0].settings is not None
    assert (slow[0].settings.strategy, slow[0].settings.compression) == ("ddp", "bf16")
    assert slow[0].predicted_step == pytest.approx(COMPUTE + UPDATE + 0.03, abs=1e-4)

    late = causes(reduction=0.07, four_buckets=0.07, messages=((4, 0.02), (1000, 0.021)))
    assert [cause.code for cause in late] == ["high_latency"]
    assert "larger effective batch" in late[0].change


def test_more_than_messages_take_is_not_the_link() -> None:
    """If steps are longer than messages can explain, the link is not reported as the cause."""
    named = causes(reduction=0.2, four_buckets=0.2, messages=((4, 0.0001), (1000, 0.0002)))
    assert not {"slow_link", "high_latency", "tiny_buckets", "giant_buckets"} & {cause.code for cause in named}


def test_small_micro_batches() -> None:
    """If compute is surely shorter in one micro-batch, the predicted gain is the difference."""
    first = causes(larger=0.06)[0]
    assert (first.code, first.settings and first.settings.micro_batch_size) == ("small_micro_batches", 16)
    assert first.cost == pytest.approx(0.04, abs=1e-5)


def test_the_largest_comes_first() -> None:
    """Of two causes, the one that takes more of a step comes first."""
    messages = ((4, 0.001), (1000, 0.08))
    both = causes(waiting=0.15, reduction=0.08, four_buckets=0.01, messages=messages)
    assert [cause.code for cause in both] == ["slow_loader", "giant_buckets"]
    both = causes(waiting=0.05, reduction=0.08, four_buckets=0.01, messages=messages)
    assert [cause.code for cause in both] == ["giant_buckets", "slow_loader"]
