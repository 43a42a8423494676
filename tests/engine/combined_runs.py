"""Few runs that show many cells of the composition table, each with as many features as may meet.

A cell that was found exact, or to differ, together with other features has been run. Where such a run does not come out
as wanted, the run that each of its cells has for itself says whose fault it is.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from anybatch.core.compatibility import Feature, Verdict, cell, meetings
from tests.engine.compatibility_cases import Features, checkpointed_and_compiled, complete, runs_of

Pair = tuple[Feature, Feature]
Standing = tuple[frozenset[Pair], frozenset[Pair], Features | None]
ROUNDING = frozenset(
    {Feature.BF16, Feature.FP16, Feature.LOW_PARAMETERS, Feature.MASTER_WEIGHTS, Feature.CAST, Feature.COMPRESSED}
    | {Feature.SPLIT_WEIGHTS, Feature.ROUNDED_WEIGHTS}
)
STATISTICS = frozenset(feature for feature in Feature if feature.axis.name == "norms")
BAD = frozenset({Verdict.REFUSED, Verdict.EXCLUSIVE})


def combined_runs(pairs: Iterable[Pair]) -> Mapping[tuple[Pair, Features], Features]:
    """Return, for every own run of a cell, the run that shows it: one with the cell's features, on the same ranks.

    It rounds where the own run does and differs, if at all, for the same reason. Greedy: a run is begun for the first
    cell that is left, and takes up every other one that may be in it.
    """
    shown: dict[tuple[Pair, Features], Features] = {}
    alike: dict[tuple[Features, Standing], list[tuple[Pair, Features]]] = {}
    for item in [(pair, run) for pair in pairs for run in runs_of(*pair)]:
        pair, run = item
        if _may_be_combined(pair, run):
            alike.setdefault((_ranks(run), _standing(run)), []).append(item)
        else:
            shown[item] = run
    for (_, standing), items in alike.items():
        while left := [item for item in items if item not in shown]:
            asked: Features = frozenset()
            for pair, run in left:
                more = asked | _asked(pair, run)
                if more != asked and _may_meet(more) and _standing(complete(more)) == standing:
                    asked = more
            whole = complete(asked)
            # Compared as a whole, since defaults that nobody has asked for show their cells, too.
            shown |= {item: whole for item in left if _asked(*item) <= whole}
    return shown


def _ranks(run: Features) -> Features:
    return frozenset(feature for feature in run if feature.axis.name in ("strategy", "ranks"))


def _asked(pair: Pair, run: Features) -> Features:
    """Return what has to be in a run that shows the cell where its own run does: its features, strategy and ranks."""
    return frozenset(pair) | _ranks(run)


def _may_be_combined(pair: Pair, run: Features) -> bool:
    """Whether others may be in its run: what is refused is refused alone, and "auto" may cure what differs."""
    verdict = cell(*pair).verdict
    cured = verdict is Verdict.DIFFERS and Feature.AUTO_SIZE in pair
    return verdict not in BAD and not cured and not checkpointed_and_compiled(run)


def _may_meet(features: Features) -> bool:
    """Whether no two of them are values of one axis, and one backend can compile them all."""
    axes = [feature.axis for feature in features if feature.axis.exclusive]
    return len(axes) == len(set(axes)) and not checkpointed_and_compiled(features)


@cache
def _standing(run: Features) -> Standing:
    """Return what keeps a run from being exact, whether it is refused, and what rounds its numbers.

    Each of the latter has a tolerance that its own roundings need, and no more; statistics of rounded numbers need most
    of it for themselves.
    """
    met = [(pair, cell(*pair).verdict) for pair in meetings(run)]
    differs = frozenset(pair for pair, verdict in met if verdict is Verdict.DIFFERS)
    refused = frozenset(pair for pair, verdict in met if verdict in BAD)
    return differs, refused, run & (ROUNDING | STATISTICS) if run & ROUNDING else None
