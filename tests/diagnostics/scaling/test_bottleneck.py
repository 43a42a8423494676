"""Each cause of poor scaling is reported first with its fix, and a healthy run has no cause."""

from typing import Any

import pytest

from anybatch.diagnostics.scaling_evidence import Cause, ScalingEvidence, causes_of, evidence_of, step_with_workers
from anybatch.diagnostics.scaling_ranks import BucketCut, RunSettings
from tests.diagnostics.scaling.made_times import COMPUTE, UPDATE, rank_times

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
