"""The parts of a step add up, and each cause of poor scaling is reported first with its fix."""

import dataclasses
import random
from typing import Any

import pytest

from anybatch.diagnostics.scale import ScaleReport
from anybatch.diagnostics.scaling_evidence import (
    Cause,
    ScalingEvidence,
    causes_of,
    difference,
    evidence_of,
    step_with_workers,
)
from anybatch.diagnostics.scaling_ranks import ALONE, CURRENT, UNREDUCED, BucketCut, RankTimes, RunSettings
from anybatch.diagnostics.step_times import RankSeconds
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
    assert sum(found.parts.by_name.values()) + found.parts.other == pytest.approx(found.parts.step)
    assert found.parts.other == pytest.approx(0.0, abs=1e-5)
    assert found.ideal == pytest.approx((2 * COMPUTE + UPDATE) / 2, abs=1e-4)


def test_waiting_is_measured_on_live_steps() -> None:
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
    assert four_buckets.longer.value == pytest.approx(0.01)


def disturbed(seed: int, **changed: Any) -> list[RankTimes]:
    """Return the times of two ranks on a busy machine: random delays of each step, most of them waits for a core."""
    draw = random.Random(seed)

    def late(step: RankSeconds) -> RankSeconds:
        delay = draw.expovariate(4.0) * draw.choice((0.0, 1.0, 5.0)) * step.whole
        queued = delay * draw.random()
        return dataclasses.replace(
            step, whole=step.whole + delay, compute=step.compute + delay * draw.random(), queued=queued
        )

    return [
        dataclasses.replace(one, steps={kind: tuple(map(late, steps)) for kind, steps in one.steps.items()})
        for one in (rank_times(rank, **changed) for rank in range(2))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_gives_possible_numbers_and_no_wrong_cause(seed: int) -> None:
    """Parts are not negative and add up, no cause takes or saves more than a step, and other programs are named."""
    evidence = evidence_of(disturbed(seed, messages=((4, 0.06), (1000, 0.2))))
    parts = [*evidence.parts.by_name.values(), evidence.parts.other]
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(evidence.parts.step)
    assert all(trial.longer.value >= 0.0 for trial in evidence.buckets)
    named = causes_of(evidence, ONE_BUCKET, 8)
    for cause in named:
        assert cause.cost <= evidence.parts.step
        assert 0.0 <= cause.predicted_step <= evidence.parts.step
    assert {cause.code for cause in named} <= {"shared_cores"}


def test_other_programs_are_the_only_cause() -> None:
    """If ranks wait although each could have a core, or one alone waits, neither link nor loader is blamed."""
    all_causes = {"shared_cores", "slow_link", "slow_loader"}
    for kind, num_cores, expected in (
        (UNREDUCED, 1, all_causes),
        (UNREDUCED, 8, {"shared_cores"}),
        (ALONE, 8, set[str]()),
    ):
        ranks = []
        for rank in range(2):
            one = rank_times(rank, **LINK, messages=((4, 0.001), (1000, 0.08)), waiting=0.1)
            queued = tuple(dataclasses.replace(step, queued=0.04) for step in one.steps.get(kind, ()))
            steps = {**one.steps, **({kind: queued} if queued else {})}
            ranks.append(dataclasses.replace(one, steps=steps))
        evidence = evidence_of(ranks)
        assert {cause.code for cause in causes_of(evidence, ONE_BUCKET, num_cores)} == expected
        assert evidence.is_busy == (kind == ALONE)


def test_noise_hides_a_part() -> None:
    """If reduction may take nothing or half of a step, the report has no bottleneck and names the unclear part."""
    ranks = []
    for rank in range(2):
        one = rank_times(rank)
        whole = (0.05, 0.3, 0.06, 0.3, 0.07, 0.3, 0.06, 0.3)
        current = tuple(
            dataclasses.replace(step, whole=seconds) for step, seconds in zip(one.steps[CURRENT], whole, strict=True)
        )
        ranks.append(dataclasses.replace(one, steps={**one.steps, CURRENT: current}))
    evidence = evidence_of(ranks)
    assert causes_of(evidence, ONE_BUCKET, 8) == ()
    assert list(evidence.unclear) == ["exposed communication"]
    report = ScaleReport(measured=evidence, causes=(), settings=ONE_BUCKET, num_cores=8)
    assert "no bottleneck" not in str(report)


def test_the_link_is_latency_and_rate() -> None:
    """The latency is the time of the smallest message; the bandwidth follows from the largest."""
    link = evidence_of([rank_times(0), rank_times(1)]).link

    assert link is not None
    assert link.latency_seconds == 0.001
    assert link.bytes_per_second == pytest.approx(996 / 0.007)


def test_differences_within_noise_are_not_sure() -> None:
    """A difference within the noise of rounds is not sure; one present in every round is, despite the noise."""
    base = [1.0] * 8
    assert difference([1.1] * 8, base).is_sure
    assert not difference([1.1, 0.9, 1.2, 0.8, 1.1, 0.9, 1.3, 1.2], base).is_sure
    assert difference([1.2, 1.9, 1.3, 2.8, 1.2, 1.9, 1.4, 1.3], base).is_sure
    assert not difference([2.0], [1.0]).is_sure


def test_the_bucket_size_in_use_stays_unless_another_is_surely_faster() -> None:
    """The best bucket size is the smallest of the fastest, or the one in use if none is surely faster."""
    same = evidence_of([rank_times(0), rank_times(1)])
    assert same.best_bucket is same.current_bucket is same.buckets[1]

    faster = evidence_of([rank_times(rank, four_buckets=0.002) for rank in range(2)])
    assert faster.best_bucket is faster.buckets[0]
    assert faster.current_bucket is faster.buckets[1]
    assert faster.current_bucket.longer.value == pytest.approx(MESSAGES - 0.002)


ONE_BUCKET = RunSettings(bucket_bytes=1000)


def found(**changed: Any) -> ScalingEvidence:
    """Return the evidence of two ranks that differ from healthy ones."""
    return evidence_of([rank_times(rank, **changed) for rank in range(2)])


def causes(settings: RunSettings = ONE_BUCKET, num_cores: int = 8, **changed: Any) -> tuple[Cause, ...]:
    """Return the causes for such ranks."""
    return causes_of(found(**changed), settings, num_cores)


LONG = {"reduction": 0.08, "four_buckets": 0.01, "messages": ((4, 0.001), (1000, 0.08))}
TINY = (BucketCut(1, (5000,)), BucketCut(4, (1000,)))
LINK = {"reduction": 0.07, "four_buckets": 0.07}
CAUSES: dict[str, tuple[dict[str, Any], str, float]] = {
    "slow_loader": ({"waiting": 0.15}, "num_workers=2 instead of 0", 0.01),
    "too_few_workers": ({"waiting": 0.05, "load_seconds": 0.3, "num_workers": 1}, "num_workers=3 instead of 1", 0.01),
    "giant_buckets": (LONG, "bucket_bytes=100 ", 0.01),
    "tiny_buckets": (LONG | {"cuts": TINY}, "bucket_bytes=5000 ", 0.01),
    "slow_link": (LINK | {"messages": ((4, 0.001), (1000, 0.08))}, 'DDP(compression="bf16")', 0.035),
    "high_latency": (LINK | {"messages": ((4, 0.02), (1000, 0.021))}, "a larger effective batch", 0.035),
}


@pytest.mark.parametrize("code", CAUSES)
def test_causes(code: str) -> None:
    """Each cause of a slow step is found alone, with its fix and the step after it."""
    changed, change, predicted = CAUSES[code]
    changed = dict(changed)
    settings = RunSettings(bucket_bytes=1000, num_workers=changed.pop("num_workers", 0))
    (cause,) = causes(settings, **changed)
    assert cause.code == code
    assert cause.change.startswith(change)
    assert cause.predicted_step == pytest.approx(COMPUTE + UPDATE + predicted, abs=1e-4)


def test_parts_that_are_not_a_cause() -> None:
    """A part below a tenth of a step is not a cause; a step longer than its messages is not the link's fault."""
    assert causes() == ()
    named = causes(reduction=0.2, four_buckets=0.2, messages=((4, 0.0001), (1000, 0.0002)))
    assert not {"slow_link", "high_latency", "tiny_buckets", "giant_buckets"} & {cause.code for cause in named}


def test_loading_without_a_free_core() -> None:
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
