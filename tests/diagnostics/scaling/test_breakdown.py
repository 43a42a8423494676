"""The parts of a step: how each is computed, and that they add up."""

import dataclasses
import math

import pytest

from anybatch.diagnostics.scaling_evidence import difference, evidence_of
from anybatch.diagnostics.scaling_ranks import CURRENT, UNREDUCED
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
