"""Short runs under every strategy reproduce recorded numbers."""

import json

import pytest

from tests.engine.run_numbers import RECORDED, STRATEGIES, numbers_of_rank
from tests.ranks_fixture import Ranks

TOLERANCES = {"bf16": 3e-2, "float32": 1e-4}
"""Relative tolerance by the first word of a run's name; float64 runs are equal up to rounding."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_match_the_recorded_ones(one_rank: Ranks, two_ranks: Ranks, strategy: str) -> None:
    """Losses, gradient norms and parameters after five steps equal the recorded ones."""
    ranks = one_rank if strategy == "single" else two_ranks
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))

    found = ranks.run(numbers_of_rank, (strategy,))[0]

    assert {name: recorded[f"{ranks.world_size} ranks, {name}"] == [] for name in found} == {
        name: numbers == [] for name, (_, numbers) in found.items()
    }
    for name, (_, numbers) in found.items():
        tolerance = TOLERANCES.get(name.split(", ")[1].split()[0], 1e-9)
        assert numbers == pytest.approx(recorded[f"{ranks.world_size} ranks, {name}"], rel=tolerance, abs=tolerance), (
            name
        )
