"""Made-up step times of ranks."""

from typing import Any

from anybatch.diagnostics.scaling_ranks import ALONE, CURRENT, UNREDUCED, BucketCut, RankTimes
from anybatch.diagnostics.step_times import RankSeconds

ROUNDS = 8
CUTS = (BucketCut(4, (100,)), BucketCut(1, (1000, 5000)))
COMPUTE, UPDATE, MESSAGES = 0.1, 0.004, 0.01


def steps(whole: float, **parts: Any) -> tuple[RankSeconds, ...]:
    """Return one step per round; they differ by about a microsecond."""
    return tuple(
        RankSeconds(whole=whole + number * 1e-6, num_messages=1, message_bytes=1000, **parts)
        for number in range(ROUNDS)
    )


def rank_times(rank: int, **changed: Any) -> RankTimes:
    """Return the times of a healthy rank of two, with 0.01 s of exposed reduction and one bucket.

    Args:
        rank: its number.
        changed: `compute`, `waiting`, `reduction`, `four_buckets` in seconds; other fields of `RankTimes`.
    """
    compute, waiting = changed.pop("compute", COMPUTE), changed.pop("waiting", 0.0)
    slowest = changed.pop("slowest", compute)
    reduction, four = changed.pop("reduction", MESSAGES), changed.pop("four_buckets", MESSAGES)
    own = {"compute": compute, "update": UPDATE}
    kinds = {
        CURRENT: steps(slowest + UPDATE + reduction, **own),
        UNREDUCED: steps(compute + UPDATE, **own),
        "buckets 0": steps(slowest + UPDATE + four, **own),
    }
    alone: tuple[RankSeconds, ...] = ()
    if rank == 0:
        kinds[ALONE] = steps(2 * COMPUTE + UPDATE, compute=2 * COMPUTE, update=UPDATE)
        alone = steps(2 * COMPUTE + UPDATE + 2 * waiting, load=2 * waiting)
    values: dict[str, Any] = {
        "steps": kinds,
        "loading": steps(slowest + UPDATE + reduction + waiting, load=waiting),
        "loading_alone": alone,
        "load_seconds": waiting,
        "load_processor_seconds": 0.0,
        "messages": ((4, 0.001), (1000, 0.008)),
        "cuts": CUTS,
        "micro_batch_size": 4,
        "num_samples": 32,
        "gradient_bytes": 1000,
        "device": "cpu",
    }
    return RankTimes(**values | changed)
