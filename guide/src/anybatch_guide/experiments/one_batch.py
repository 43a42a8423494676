"""One batch split in four ways: the losses of each way, without and with one mistake."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from anybatch.testing import RankPool
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import rounded, significant
from anybatch_guide.listings import one_batch, one_mistake

DTYPES = {"float32": torch.float32, "float64": torch.float64}
WAYS: Mapping[str, tuple[int, int]] = {"64x1": (64, 1), "16x4": (16, 1), "4x16": (4, 1), "2x8x4": (8, 2)}
"""Micro-batch size and number of ranks of each way to split the batch."""
RAGGED: Mapping[str, int] = {"64x1": 64, "16x4": 21, "4x16": 9, "2x8x4": 31}
"""Micro-batch sizes with which the last micro-batch of a rank has a single sample."""
Train = Callable[..., list[float]]


def run(emit: Emit) -> Data:
    """Return the losses of 60 steps: each way in the engine, and each mistake in a hand-written loop."""
    with RankPool(2) as ranks:

        def trained(train: Train, num_ranks: int, *args: Any) -> list[float]:  # noqa: ANN401 (arguments of `train`)
            emit_progress(emit, 0, 1, f"{train.__name__}{args}")
            return train(*args) if num_ranks == 1 else list(ranks.run(train, *args)[0])

        losses = {
            name: {way: trained(one_batch.train, k, size, dtype) for way, (size, k) in WAYS.items()}
            for name, dtype in DTYPES.items()
        }
        mistakes = {
            mistake: {way: trained(one_mistake.train, k, sizes[way], mistake) for way, (_, k) in WAYS.items()}
            for mistake, sizes in mistake_sizes().items()
        }
        clipped = {
            way: trained(one_batch.train, k, size, torch.float64, one_mistake.CLIP) for way, (size, k) in WAYS.items()
        }
    references = {name: clipped if name == "clip_each" else losses["float64"] for name in mistakes}
    return {
        "ways": [{"name": way, "num_ranks": k, "sizes": cut(size, k)} for way, (size, k) in WAYS.items()],
        "losses": rounded(losses["float64"]["64x1"], 6),
        "gaps": {name: gaps(ways) for name, ways in losses.items()},
        "largest_gap": {name: largest_gap(gaps(ways)) for name, ways in losses.items()},
        "mistakes": [as_data(name, ways, references[name]) for name, ways in mistakes.items()],
    }


def mistake_sizes() -> dict[str, dict[str, int]]:
    """Return micro-batch sizes for each mistake and split: unequal if equal sizes would hide the mistake."""
    even = {way: size for way, (size, _) in WAYS.items()}
    return {"no_division": even, "clip_each": even, "mean_of_means": dict(RAGGED)}


def as_data(name: str, ways: Mapping[str, Sequence[float]], correct: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the losses of each split with one mistake, and the correct losses."""
    sizes, reference = mistake_sizes()[name], correct["64x1"]
    distances = {way: max(distances_of(values, reference)) for way, values in ways.items()}
    return {
        "name": name,
        "sizes": {way: cut(sizes[way], num_ranks) for way, (_, num_ranks) in WAYS.items()},
        "reference": rounded(reference, 6),
        "reference_gap": {way: max(values) for way, values in gaps(correct).items()},
        "losses": {way: rounded(values, 6) for way, values in ways.items()},
        "largest_gap": {way: significant(largest, 3) for way, largest in distances.items()},
    }


def cut(size: int, num_ranks: int) -> list[int]:
    """Return the sizes of the micro-batches of one rank's share of 64 samples."""
    return [len(rows) for rows in torch.arange(64 // num_ranks).split(size)]


def gaps(ways: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the distance of each way's losses from the unsplit batch."""
    unsplit = ways["64x1"]
    return {way: rounded(distances_of(values, unsplit), 2) for way, values in ways.items() if way != "64x1"}


def distances_of(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the distance of each loss from the reference."""
    return [abs(a - b) for a, b in zip(values, reference, strict=True)]


def largest_gap(gaps: Mapping[str, Sequence[float]]) -> float:
    """Return the largest gap."""
    return max(max(values) for values in gaps.values())


EXPERIMENT = Experiment(
    name="one_batch",
    question="Does it matter how a batch of 64 is split?",
    run=run,
    seconds=30,
    runs_here=False,
    tolerance=1e-3,
    noisy=("gaps", "largest_gap", "reference_gap"),
)
