"""A few runs that cover many cells of the composition table by combining features wherever possible.

A cell counts as run if it was exact, differed, or was refused in the backward, together with other features. If an
exact or different run gives an unexpected result, the separate run of each of its cells shows which one is wrong.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from anybatch.core.compatibility import COMBINABLE, Feature, Verdict, cell, stated_pairs
from tests.engine.compatibility_cases import Features, checkpointed_and_compiled, complete, runs_of

Pair = tuple[Feature, Feature]
Standing = tuple[frozenset[Pair], frozenset[Pair], Features | None]
ROUNDING = frozenset(
    {Feature.BF16, Feature.FP16, Feature.LOW_PARAMETERS, Feature.MASTER_WEIGHTS, Feature.CAST, Feature.COMPRESSED}
    | {Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS}
)
STATISTICS = frozenset(feature for feature in Feature if feature.axis == "norms")
BAD = frozenset({Verdict.REFUSED, Verdict.EXCLUSIVE})


def combined_runs(pairs: Iterable[Pair]) -> Mapping[tuple[Pair, Features], Features]:
    """Return, for every separate run of a cell, the run that covers it: with the cell's features, on the same ranks.

    It rounds where the separate run does and differs, if at all, for the same reason. Greedy: each run starts with the
    first cell not yet covered and adds every other one that fits.
    """
    shown: dict[tuple[Pair, Features], Features] = {}
    alike: dict[tuple[Features, Standing, bool], list[tuple[Pair, Features]]] = {}
    for item in [(pair, run) for pair in pairs for run in runs_of(*pair)]:
        pair, run = item
        if _may_be_combined(pair, run):
            # Compiled runs take ten times as long, so other cells do not share them.
            alike.setdefault((_ranks(run), _standing(run), Feature.COMPILED in run), []).append(item)
        else:
            shown[item] = run
    for (_, standing, _), items in alike.items():
        while left := [item for item in items if item not in shown]:
            asked: Features = frozenset()
            for pair, run in left:
                more = asked | _asked(pair, run)
                if more != asked and _may_meet(more) and _standing(complete(more)) == standing:
                    asked = more
            whole = complete(asked)
            # Compare the completed run, because its defaults cover cells, too.
            shown |= {item: whole for item in left if _asked(*item) <= whole}
    return shown


def _ranks(run: Features) -> Features:
    return frozenset(feature for feature in run if feature.axis in ("strategy", "ranks"))


def _asked(pair: Pair, run: Features) -> Features:
    """Return the required parts of a run that covers the cell: its features, strategy and ranks."""
    return frozenset(pair) | _ranks(run)


def _may_be_combined(pair: Pair, run: Features) -> bool:
    """Whether a cell can share its run.

    "auto" may remove a difference, and an engine that refuses to be built shows no other feature. A refusal in the
    backward comes after the others.
    """
    found = cell(*pair)
    cured = found.verdict is Verdict.DIFFERS and Feature.AUTO_SIZE in pair
    runs = found.verdict not in BAD or found is cell(Feature.REENTRANT, Feature.REENTRANT)
    return runs and not cured and not checkpointed_and_compiled(run)


def _may_meet(features: Features) -> bool:
    """Whether no two features are values of one axis, and one backend can compile them all."""
    axes = [feature.axis for feature in features if feature.axis not in COMBINABLE]
    return len(axes) == len(set(axes)) and not checkpointed_and_compiled(features)


@cache
def _standing(run: Features) -> Standing:
    """Return the sources of inexactness in a run, its refused cells, and its sources of rounding.

    Each source of rounding has the smallest tolerance that it needs; statistics of rounded numbers need most.
    """
    met = [(pair, cell(*pair).verdict) for pair in stated_pairs(run)]
    differs = frozenset(pair for pair, verdict in met if verdict is Verdict.DIFFERS)
    refused = frozenset(pair for pair, verdict in met if verdict in BAD)
    return differs, refused, run & (ROUNDING | STATISTICS) if run & ROUNDING else None
