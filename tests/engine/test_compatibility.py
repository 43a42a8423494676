"""Run every cell of the composition table: exact cells equal plain torch, refused cells raise an error.

`make test` runs all refused cells, all cells with a sharding strategy, and a quarter of the others;
`make test-published` runs the rest.
"""

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config

import anybatch as ab
from anybatch.core.compatibility import TABLE, Feature, Verdict, cell, pairs
from anybatch.core.loss import declared
from anybatch.engine.arguments import TrainSpec, features_of, features_of_ranks
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.user_code import collect_modules
from anybatch.errors import CompositionError, UserError
from anybatch.norms import policy_of
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.data_parallel import DataParallel
from anybatch.parallel.ddp import DDP
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.single import Single
from anybatch.parallel.strategy import Capabilities, Strategy, choose_strategy
from anybatch.parallel.zero1 import Zero1
from anybatch.testing import relative_error
from tests.engine.combined_runs import Pair, combined_runs
from tests.engine.compatibility_cases import (
    IN_FLOAT32,
    NUM_SAMPLES,
    Features,
    Found,
    Keeping,
    Sentences,
    arguments,
    build,
    changes,
    compiled,
    complete,
    plain_gradients,
    run,
    runs_of,
    tolerance,
)
from tests.ranks_fixture import Ranks, selected

SHARDING = frozenset({Feature.ZERO1, Feature.FSDP})
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
    exact = verdict in {Verdict.EXACT, Verdict.SAME_CUT}
    return verdict is not Verdict.REFUSED and any(
        isinstance(one, str) or bool(one.refusal) or (exact and not one.error <= 1.0) for one in found
    )


def pairs_with(*verdicts: Verdict) -> pytest.MarkDecorator:
    """Parametrize a test over the cells with these verdicts."""
    chosen = [
        pytest.param(
            pair,
            id="-".join(feature.name.lower() for feature in pair),
            marks=() if number % 4 == 0 or is_in_every_run(pair) else pytest.mark.published,
        )
        for number, pair in enumerate(pairs(Feature))
        if cell(*pair).verdict in verdicts
    ]
    return pytest.mark.parametrize("pair", chosen)


def is_in_every_run(pair: Pair) -> bool:
    """Whether `make test` always runs a cell."""
    return cell(*pair).verdict is Verdict.REFUSED or not SHARDING.isdisjoint(pair)


def found_for(pair: Pair, outcomes: Outcomes) -> list[Found]:
    """Return the results of all runs of a cell on all ranks; fail after a failed run, or without any."""
    found = [outcome for features in runs_of(*pair) for outcome in outcomes[pair, features]]
    failed = [outcome for outcome in found if isinstance(outcome, str)]
    assert not failed, "\n".join(failed)
    assert found, "no run shows this cell"
    return [outcome for outcome in found if isinstance(outcome, Found)]


@pairs_with(Verdict.EXACT, Verdict.SAME_CUT)
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


def test_exclusive() -> None:
    """No run combines two exclusive features."""
    exclusive = [frozenset(pair) for pair in pairs(Feature) if cell(*pair).verdict is Verdict.EXCLUSIVE]
    runs = {run for pair in pairs(Feature) for run in runs_of(*pair)}
    assert exclusive
    assert not [(pair, run) for pair in exclusive for run in runs if pair <= run]


@pytest.mark.parametrize("feature", [Feature.FP32, Feature.BF16, Feature.FP16, Feature.LOW_PARAMETERS])
def test_one_lost_sample_would_be_seen(feature: Feature) -> None:
    """The tolerances are tight: a gradient that lacks one sample exceeds them, in every precision."""
    features, ids = complete({feature}), range(NUM_SAMPLES)
    whole = plain_gradients(features, ids, [])
    for lost in ids:
        rest = plain_gradients(features, [sample for sample in ids if sample != lost], [])
        assert relative_error(rest, whole) > 3 * tolerance(features)


IN_ENTRIES = {feature for combinations in TABLE for features in combinations for feature in features}
NOT_IN_ARGUMENTS = ("strategy", "ranks", "messages", "batch", "checkpointing")
IN_ARGUMENTS = {feature for feature in IN_ENTRIES if feature.axis not in NOT_IN_ARGUMENTS}


@pytest.mark.parametrize("feature", [f for f in Feature if f in IN_ARGUMENTS], ids=lambda feature: feature.name.lower())
@pytest.mark.slow
def test_features_are_recognised(feature: Feature) -> None:
    """The features of the table's entries that the engine finds in its arguments are those it was built from."""
    features = complete({feature})
    given = arguments(features)
    network, objective = build(features)
    loss = declared(objective.declared())
    modules = collect_modules(compiled(network, features) if Feature.COMPILED in features else network, loss)
    optimizer = Keeping if features & IN_FLOAT32 else Keeping(network.parameters())
    sizes = RunSizes(
        ab.World(),
        effective_batch_size=None,
        micro_batch_size=given.get("micro_batch_size"),
        accumulation_steps=given.get("accumulation_steps"),
        deal="balanced",
    ).sizes
    seen = features_of(
        TrainSpec(
            model=network,
            optimizer=optimizer,
            loss=loss,
            precision=given.get("precision", "fp32"),
            rng=given.get("rng", "micro_batch"),
            bf16_weights=given.get("bf16_weights", "copied"),
        ),
        modules,
        loss,
        sizes=sizes,
        deal=given.get("deal", "balanced"),
        policy=policy_of(given.get("norms", "keep")),
    )

    assert set(seen) & IN_ENTRIES == features & IN_ARGUMENTS


def test_ranks_are_recognised(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Strategy and ranks are recognised; a strategy that is not in the table has no features."""
    alone = features_of_ranks(Single.capabilities, ab.World())
    assert set(alone) == {Feature.SINGLE, Feature.ALONE}
    assert one_rank.run(names_of_ranks, "all_reduce") == [["all_reduce", "one_rank"]]
    assert two_ranks.run(names_of_ranks, "ddp") == [["ddp", "several_ranks"]] * 2
    assert features_of_ranks(Capabilities(name="mine"), ab.World()) == {}


def names_of_ranks(strategy: str) -> list[str]:
    """Run on every rank: return the names of the features of a strategy on these ranks."""
    found = features_of_ranks(choose_strategy(strategy, ab.World()).capabilities, ab.World.from_environment())
    return [feature.name.lower() for feature in found]


@pytest.mark.parametrize(
    "strategy",
    [Single(), AllReduce(), DDP(), Zero1(), FSDP(), DataParallel()],
    ids=lambda strategy: strategy.capabilities.name,
)
def test_table_says_what_strategies_say(strategy: Strategy) -> None:
    """The table refuses low-precision parameters and sparse gradients exactly where a strategy's capabilities do."""
    own = Feature[strategy.capabilities.name.upper()]

    refused = {f: cell(own, f).verdict is Verdict.REFUSED for f in (Feature.LOW_PARAMETERS, Feature.SPARSE)}
    assert refused[Feature.LOW_PARAMETERS] is not strategy.capabilities.float32_accumulation
    assert refused[Feature.SPARSE] is not strategy.capabilities.sparse_gradients


@pytest.mark.parametrize(
    ("capabilities", "feature", "expected"),
    [
        (
            Capabilities(name="mine"),
            Feature.SPARSE,
            "does not support sparse gradients (module 'words' has sparse=True)",
        ),
        (Capabilities(name="mine", float32_accumulation=False), Feature.CAST, "'words.weight' is torch.bfloat16"),
        (
            Capabilities(name="mine", replaces_parameters=True),
            Feature.DIRECT,
            "lambda named: torch.optim.Keeping(named",
        ),
    ],
)
def test_other_strategies_answer_for_themselves(capabilities: Capabilities, feature: Feature, expected: str) -> None:
    """A custom strategy is refused what its capabilities exclude, without side effects."""
    network, objective = build(complete({feature}))

    with pytest.raises(CompositionError, match=re.escape(expected)):
        ab.Engine(network, Keeping(network.parameters()), objective.declared(), strategy=Mine(capabilities))
    parameters = dict(network.named_parameters())
    assert not changes(parameters, {name: p.detach().clone() for name, p in parameters.items()}, network, built=False)


class Mine(Single):
    """One rank, with another name and other capabilities."""

    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__()
        self.capabilities = capabilities


def test_a_strategy_of_ones_own_is_not_refused_what_others_are() -> None:
    """The table's refusals do not apply to a custom strategy whose capabilities allow the feature."""
    features = complete({Feature.SPARSE})
    network, objective = build(features)
    mine = Mine(Capabilities(name="mine", sparse_gradients=True))

    with ab.Engine(network, Keeping(network.parameters()), objective.declared(), strategy=mine) as engine:
        assert engine.step(Sentences().of(range(NUM_SAMPLES))).update == "direct"


def test_engine_says_what_keeps_it_from_equality() -> None:
    """An engine with BatchNorm reports the inexactness and its remedy in `decisions`; others report nothing."""
    said: dict[Feature, str] = {}
    for feature in (Feature.BATCH_NORM, Feature.FP32):
        network, objective = build(complete({feature}))
        with ab.Engine(network, Keeping(network.parameters()), objective.declared()) as engine:
            said[feature] = engine.decisions.get("equality", "")

    assert not said[Feature.FP32]
    assert cell(Feature.BATCH_NORM, Feature.BATCH_NORM).remedy in said[Feature.BATCH_NORM]


@pytest.mark.parametrize(("name", "value"), [("deal", "even"), ("rng", "per_rank")])
def test_unknown_values_are_refused(name: str, value: str) -> None:
    """An unknown value of an option raises an error."""
    network, objective = build(complete(()))
    given: dict[str, Any] = {name: value}

    with pytest.raises(UserError, match=f"{name}='{value}' must be"):
        ab.Engine(network, Keeping(network.parameters()), objective.declared(), **given)
