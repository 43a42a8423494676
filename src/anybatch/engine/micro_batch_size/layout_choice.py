"""Padded or packed: which one a collate function that can do both is told, by the time of the same step in both."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.core.splitting import Cut, even_parts
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.loss_check.by_cuts import CutRun, RealCuts, difference_of_cuts
from anybatch.engine.loss_check.recorded_model import UndecidedError
from anybatch.engine.micro_batch_size.token_costs import Runs, tokens_of

_TIMES = 2  # the shorter one counts: the first may have to warm up
_MOST_TIMED = 8
_NUM_COMPARED = 4

Load = Callable[[Sequence[int]], Batch]
"""From positions in the effective batch to these samples, collated."""


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A micro-batch to time in place of several.

    Attributes:
        positions: of its samples in the effective batch.
        factor: by how much more all of them cost than this one.
    """

    positions: Sequence[int]
    factor: float


def sampled_units(lengths: SampleLengths, budget: TokenBudget) -> list[SampledUnit]:
    """Return micro-batches that stand for all of an effective batch on one rank: every one where these are few.

    Args:
        lengths: of its samples, in one layout.
        budget: how they are cut in that layout, and what tokens cost.
    """
    plan = plan_by_length(lengths, 1, Cut(), budget)
    laid_out = lengths.laid_out
    fixed = budget.fixed_tokens or 0.0
    weighed = []
    for unit in plan.units:
        positions = plan.positions(unit)
        costs = [budget.cost(laid_out[place]) for place in positions]
        weighed.append((fixed + tokens_of(costs, lengths), positions))
    weighed.sort(key=lambda one: one[0])
    ends = itertools.accumulate(even_parts(len(weighed), min(_MOST_TIMED, len(weighed))), initial=0)
    found = []
    for start, stop in itertools.pairwise(ends):
        weight, positions = weighed[(start + stop) // 2]
        of_all = sum(one for one, _ in weighed[start:stop])
        found.append(SampledUnit(positions, of_all / weight if weight else float(stop - start)))
    return found


def seconds_of_steps(
    runs: Runs, loads: Mapping[bool, Load], units: Mapping[bool, Sequence[SampledUnit]]
) -> tuple[dict[bool, float], dict[bool, str]]:
    """Time the micro-batches of a step in both layouts, in turns, so that a machine that slows down slows both.

    Args:
        runs: function (pieces, number of samples) -> what runs them.
        loads: loads samples padded (False), and packed (True).
        units: the micro-batches that stand for a step in each layout.

    Returns:
        Seconds of all micro-batches of a step, by layout; and why one could not be timed, a clause.
    """
    loaded = {packed: [loads[packed](unit.positions) for unit in chosen] for packed, chosen in units.items()}
    shortest = {packed: [float("inf")] * len(chosen) for packed, chosen in units.items()}
    failed: dict[bool, str] = {}
    for _, packed in itertools.product(range(_TIMES), units):
        for place, unit in enumerate(units[packed]):
            if packed in failed:
                continue
            batch = loaded[packed][place]
            trial = runs(lambda _size, _most, batch=batch: [copied(batch)], len(unit.positions))  # type: ignore[misc]  # bound now
            result = trial.run(len(unit.positions), 1)
            if result.outcome != "ran":
                failed[packed] = result.error or "it runs out of memory"
            elif result.seconds:  # a micro-batch that counts nothing is not run
                shortest[packed][place] = min(shortest[packed][place], result.seconds[0])
    seconds = {
        packed: sum(
            unit.factor * time for unit, time in zip(chosen, shortest[packed], strict=True) if time < float("inf")
        )
        for packed, chosen in units.items()
        if packed not in failed
    }
    return seconds, failed


def why_not_packed(run: CutRun, loads: Mapping[bool, Load], lengths: SampleLengths) -> str:
    """Return why packed samples do not have the gradient that they have by themselves; nothing if they have.

    Args:
        run: runs the loss.
        loads: loads samples padded (False), and packed (True).
        lengths: of the samples of the effective batch.
    """
    by_length = sorted(range(len(lengths.tokens)), key=lengths.tokens.__getitem__)
    middle = max(0, (len(by_length) - _NUM_COMPARED) // 2)
    chosen = by_length[middle : middle + _NUM_COMPARED]
    if len(chosen) < 2:  # noqa: PLR2004 (one sample sees no other)
        return "there is only one sample"
    cuts = RealCuts(
        pieces=tuple(loads[False]([place]) for place in chosen),
        sizes=(1,) * len(chosen),
        whole=loads[True](chosen),
        are_real=False,
    )
    try:
        with _all_in_evaluation_mode(run.modules):
            difference = difference_of_cuts(run, cuts)
    except UndecidedError as error:
        return f"whether the model keeps packed samples apart cannot be told: {error}"
    except torch.OutOfMemoryError:
        return "a few packed samples run out of memory"
    except Exception as error:  # noqa: BLE001 (what runs padded need not run packed)
        return f"the model does not take packed samples ({type(error).__name__}: {error})"
    if difference > run.rounding:
        return (
            f"the model lets packed samples see each other: their gradient is {difference:.1e} from that by themselves"
        )
    return ""


@contextmanager
def _all_in_evaluation_mode(modules: nn.Module) -> Iterator[None]:
    """Put all of a model into evaluation mode meanwhile: attention may draw dropout of its own."""
    training = [one for one in modules.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True
