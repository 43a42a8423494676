"""Run every cell of the composition table: exact cells equal plain torch, refused cells raise an error.

`make test-published` runs them, and CI a part of them for each commit.
"""

import traceback
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from torch._dynamo import config as dynamo_config

import anybatch as ab
from anybatch.core.compatibility import Feature, Verdict, cell, pairs
from tests.engine.combined_runs import Pair, combined_runs
from tests.engine.compatibility_cases import (
    Features,
    Found,
    run,
    runs_of,
)
from tests.ranks_fixture import Ranks, selected

RUNS_AT_ONCE = 50
"""Few enough for ranks to answer in time on a busy machine."""
Outcome = Found | str
Outcomes = Mapping[tuple[Pair, Features], Sequence[Outcome]]
"""The results of the run that covers a cell in place of its separate run, rank by rank."""


def run_all(runs: Sequence[Features]) -> list[Outcome]:
    """Run on every rank: return the result or the traceback of each run."""
    connected = ab.World.from_environment()
    found: list[Outcome] = []
    # By default, torch stops compiling after eight networks and runs the others uncompiled.
    compiling = dynamo_config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True)
    with torch.random.fork_rng(), compiling:
        for features in runs:
            world = ab.World() if Feature.ALONE in features else connected
            try:
                found.append(run(features, world))
            except Exception:  # noqa: BLE001 (the test of the cell reports it)
                found.append(f"{sorted(f.name for f in features)}:\n{traceback.format_exc()}")
    torch.compiler.reset()
    return found


@pytest.fixture(scope="module")
def outcomes(one_rank: Ranks, two_ranks: Ranks, request: pytest.FixtureRequest) -> Outcomes:
    """Return the results of all cells. Many share a run; after an unexpected result, each cell runs separately."""

    def run_each(runs: Iterable[Features]) -> dict[Features, Sequence[Outcome]]:
        found: dict[Features, Sequence[Outcome]] = {}
        for pool, several in ((one_rank, False), (two_ranks, True)):
            own = [features for features in runs if (Feature.SEVERAL_RANKS in features) is several]
            for start in range(0, len(own), RUNS_AT_ONCE):
                some = own[start : start + RUNS_AT_ONCE]
                found |= dict(zip(some, zip(*pool.run(run_all, some), strict=True), strict=True))
        return found

    shown_by = combined_runs(selected(request, "pair"))
    together = run_each(dict.fromkeys(shown_by.values()))
    wrong = {item: run for item, run in shown_by.items() if is_wrong(item[0], together[run])}
    alone = run_each(dict.fromkeys(own for _, own in wrong))
    # If no separate run fails, all cells keep the result of the shared run.
    explained = {run for item, run in wrong.items() if is_wrong(item[0], alone[item[1]])}
    return {(pair, own): alone[own] if run in explained else together[run] for (pair, own), run in shown_by.items()}


def is_wrong(pair: Pair, found: Sequence[Outcome]) -> bool:
    """Whether a run contradicts the verdict of a cell: it failed, was refused, or is inexact."""
    verdict = cell(*pair).verdict
    exact = verdict in {Verdict.EXACT, Verdict.SAME_SPLIT}
    return verdict is not Verdict.REFUSED and any(
        isinstance(one, str) or bool(one.refusal) or (exact and not one.error <= 1.0) for one in found
    )


def pairs_with(*verdicts: Verdict) -> pytest.MarkDecorator:
    """Parametrize a test over the cells with these verdicts."""
    chosen = [
        pytest.param(pair, id="-".join(feature.name.lower() for feature in pair))
        for pair in pairs(Feature)
        if cell(*pair).verdict in verdicts
    ]
    return pytest.mark.parametrize("pair", chosen)


def found_for(pair: Pair, outcomes: Outcomes) -> list[Found]:
    """Return the results of all runs of a cell on all ranks; fail after a failed run, or without any."""
    found = [outcome for features in runs_of(*pair) for outcome in outcomes[pair, features]]
    failed = [outcome for outcome in found if isinstance(outcome, str)]
    assert not failed, "\n".join(failed)
    assert found, "no run shows this cell"
    return [outcome for outcome in found if isinstance(outcome, Found)]


@pairs_with(Verdict.EXACT, Verdict.SAME_SPLIT)
def test_exact(pair: Pair, outcomes: Outcomes) -> None:
    """An exact cell equals plain torch in the gradient, the optimizer's input and the update."""
    for found in found_for(pair, outcomes):
        assert not found.refusal
        assert found.error <= 1.0


@pairs_with(Verdict.DIFFERS)
def test_differs(pair: Pair, outcomes: Outcomes) -> None:
    """A cell marked as different runs everywhere, and somewhere its gradient differs from the unsplit batch.

    One cell differs on accelerators only: on a CPU, "auto" takes one micro-batch per rank, and then sync is exact.
    """
    found = found_for(pair, outcomes)
    assert not any(one.refusal for one in found)
    largest = max(one.error for one in found)
    assert largest <= 1.0 if pair == (Feature.AUTO_SIZE, Feature.NORMS_SYNC) else largest > 3.0


@pairs_with(Verdict.REFUSED)
def test_refused(pair: Pair, outcomes: Outcomes) -> None:
    """A refused cell raises CompositionError with its reason and remedy, and changes no parameter, gradient or hook."""
    for found in found_for(pair, outcomes):
        assert cell(*pair).reason in found.refusal
        assert cell(*pair).remedy in found.refusal
        assert not found.changed
