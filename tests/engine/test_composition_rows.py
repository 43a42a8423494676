"""Runs each row of the composition table alone, under the strategies that shard, on one rank and two."""

import traceback
from collections.abc import Sequence

import pytest
import torch
from torch._dynamo import config as dynamo_config

import anybatch as ab
from anybatch.core.compatibility import Cell, Feature, Verdict, cell
from tests.engine.compatibility_cases import Features, Found, run, runs_of
from tests.ranks_fixture import Ranks

ROWS = [
    pytest.param(strategy, row, id=f"{strategy.name.lower()}-{row.name.lower()}")
    for strategy in (Feature.ZERO1, Feature.FSDP)
    for row in Feature
    if cell(strategy, row).verdict is not Verdict.EXCLUSIVE
]


def outcomes(runs: Sequence[Features], alone: bool) -> list[Found | str]:
    """Run on every rank: return the outcome of each run, or the traceback of an error that is not a refusal."""
    connected = ab.World.from_environment()
    found: list[Found | str] = []
    with torch.random.fork_rng(), dynamo_config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        for features in runs:
            try:
                found.append(run(features, ab.World() if alone else connected))
            except Exception:  # noqa: BLE001 (the test reports it)
                found.append(traceback.format_exc())
    torch.compiler.reset()
    return found


def assert_as_documented(found: Sequence[Found | str], expected: Cell) -> None:
    """Assert that runs ended as documented in the table, and none in an error of torch."""
    raw = [one for one in found if isinstance(one, str)]
    assert not raw, "\n".join(raw)
    for one in found:
        assert isinstance(one, Found)
        if expected.verdict is Verdict.REFUSED:
            assert expected.reason in one.refusal
            assert expected.instead in one.refusal
            assert not one.changed
        else:
            assert not one.refusal
        if expected.verdict in {Verdict.EXACT, Verdict.SAME_CUT}:
            assert one.error <= 1.0


@pytest.mark.parametrize(("strategy", "row"), ROWS)
def test_row(strategy: Feature, row: Feature, one_rank: Ranks, two_ranks: Ranks) -> None:
    """Gradient and update equal plain torch, as under "single", or the documented error is raised."""
    runs = runs_of(strategy, row)
    assert runs, "no run shows this row"
    expected = cell(strategy, row)
    for features in runs:
        ranks = two_ranks if Feature.SEVERAL_RANKS in features else one_rank
        for found in ranks.run(outcomes, [features], Feature.ALONE in features):
            assert_as_documented(found, expected)
