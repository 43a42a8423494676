"""The parts of a step: what each is the difference of, and that they add up."""

import dataclasses
import math

import pytest

from anybatch.diagnostics.scaling.breakdown import difference, evidence_of
from anybatch.diagnostics.scaling.measure import CURRENT, UNREDUCED
from tests.diagnostics.scaling.made_times import COMPUTE, MESSAGES, UPDATE, rank_times
from tests.faults import sees


@sees(
    "a straggler is counted as communication",
    "src/anybatch/diagnostics/scaling/breakdown.py",
    "bare = _slowest([one.steps[CURRENT] for one in ranks]), _slowest([one.steps[key] for one in ranks])",
    "bare = _slowest([one.steps[CURRENT] for one in ranks]), _slowest([one.steps[key] for one in ranks[:1]])",
)
def test_parts() -> None:
    """Communication is the slowest step with reduction minus the slowest without; a straggler is not in it."""
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
    """Waiting for data is what live steps wait longer than those whose samples are there, on the worst rank."""
    found = evidence_of([rank_times(0, waiting=0.02), rank_times(1, waiting=0.03)])

    assert found.parts.waiting == pytest.approx(0.03)
    assert found.parts.step == pytest.approx(COMPUTE + UPDATE + MESSAGES + 0.03, abs=1e-5)
    assert found.alone is not None
    assert found.alone.waiting == pytest.approx(0.04)


def test_waiting_for_a_core_is_not_compute() -> None:
    """Seconds in the queue for a core are a part of their own, and make no straggler."""
    one = rank_times(0)
    queued = tuple(dataclasses.replace(step, compute=step.compute + 0.04, queued=0.04) for step in one.steps[UNREDUCED])
    found = evidence_of([dataclasses.replace(one, steps={**one.steps, UNREDUCED: queued}), rank_times(1)])

    assert found.parts.queued == pytest.approx(0.02)
    assert found.parts.compute == pytest.approx(COMPUTE)
    assert found.parts.stragglers == pytest.approx(0.0, abs=1e-5)


@sees(
    "bucket sizes are compared by medians of different moments",
    "src/anybatch/diagnostics/scaling/breakdown.py",
    "BucketTrial(cut, fastest + longer.seconds, longer)",
    "BucketTrial(cut, statistics.median(taken), longer)",
)
def test_bucket_sizes_on_a_machine_that_changes_its_speed() -> None:
    """A step in other buckets takes what the fastest does and what rounds say of the two, whenever those were."""
    current = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    four = (1.01, 1.01, 1.01, 1.01, 2.01, 2.01, 2.01, 2.01)  # a slow moment comes between the two of one round
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
    """Latency is that of the smallest message, and the rate that of what the largest takes longer."""
    link = evidence_of([rank_times(0), rank_times(1)]).link

    assert link is not None
    assert link.latency == 0.001
    assert link.bytes_per_second == pytest.approx(996 / 0.007)
    assert link.seconds(3, 996) == pytest.approx(0.003 + 0.007)


@sees(
    "any difference is sure",
    "src/anybatch/diagnostics/scaling/breakdown.py",
    "return self.seconds > (1.0 if self.always else _SURE) * self.uncertainty",
    "return self.seconds > 0.0",
)
def test_what_is_sure() -> None:
    """A difference within what rounds scatter is not sure; one in every of many rounds is, though they scatter."""
    base = [1.0] * 8
    assert difference([1.1] * 8, base).is_sure
    assert not difference([1.1, 0.9, 1.2, 0.8, 1.1, 0.9, 1.3, 1.2], base).is_sure
    assert difference([1.2, 1.9, 1.3, 2.8, 1.2, 1.9, 1.4, 1.3], base).is_sure
    assert not difference([2.0], [1.0]).is_sure
    assert math.isinf(difference([2.0], [1.0]).uncertainty)


def test_the_bucket_size_in_use_stays_unless_another_is_surely_faster() -> None:
    """The best is the smallest that is as fast as the fastest; the one in use where nothing is surely faster."""
    same = evidence_of([rank_times(0), rank_times(1)])
    assert same.best_bucket is same.current_bucket is same.buckets[1]

    faster = evidence_of([rank_times(rank, four_buckets=0.002) for rank in range(2)])
    assert faster.best_bucket is faster.buckets[0]
    assert faster.current_bucket is faster.buckets[1]
    assert faster.current_bucket.longer.seconds == pytest.approx(MESSAGES - 0.002)
