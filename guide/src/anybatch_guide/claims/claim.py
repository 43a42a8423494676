"""`Claim`: a common statement, the measurement that tests it, and the rule for its verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from anybatch_guide.experiment import Data, Emit, Experiment

Verdict = Literal["true", "only_if", "false"]
Side = Literal["advantage", "limitation", "recipe", "devices", "batch_size"]
Numbers = Mapping[str, float]
OTHER_VERDICT = "This machine gives another verdict than the recorded run; the numbers are below."
EXACT, WRONG = 1e-4, 1e-2
"""Relative errors below the first number count as float32 rounding, and above the second as a different gradient."""


@dataclass(frozen=True, slots=True)
class Number:
    """Display options of a number of a claim."""

    label: str  # its label in the card's table
    # "" for a plain number, "x" for a ratio, "error" for a relative error, "bytes", "%", "lines" or "findings"
    unit: str = ""
    noisy: bool = False  # whether it varies between runs, as times and rounding errors do


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about gradient accumulation, training on several devices, or batch size."""

    name: str  # its name in links and recordings
    # its group on the page: an advantage or a limitation of accumulation, a recipe, several devices, or batch size
    side: Side
    title: str  # its topic, in a few words
    statement: str  # the claim, in our words
    how: str  # the measurement, in a sentence or two
    measure: Callable[[Emit], Numbers]  # function (emit) -> numbers
    numbers: Mapping[str, Number]  # name of a number to its display options, in display order
    rule: Callable[[Numbers], Verdict]  # function (numbers) -> verdict
    rule_in_words: str  # description of the rule
    # text for the recorded verdict, and for others that times may give; `{name}` is replaced by a number
    texts: Mapping[Verdict, str]
    seconds: float  # approximate duration on two cores
    # largest relative difference between two recordings, because processors sum in different orders
    tolerance: float = 1e-3
    is_forecast: bool = False  # whether a model forecasts the numbers, without a measurement
    runs_here: bool = True  # whether the page may measure it; claims that need ranks are only recorded


def card_data(claim: Claim, numbers: Numbers) -> Data:
    """Return the data of a card: the claim, its numbers, the verdict of the rule, and its text."""
    # The measurement and the card must have the same numbers.
    if numbers.keys() != claim.numbers.keys():
        message = f"{claim.name} measured {sorted(numbers)}, but its card shows {sorted(claim.numbers)}."
        raise ValueError(message)
    verdict = claim.rule(numbers)
    return {
        "claim": claim.name,
        "side": claim.side,
        "title": claim.title,
        "said": claim.statement,
        "how": claim.how,
        "rule": claim.rule_in_words,
        "verdict": verdict,
        "text": claim.texts.get(verdict, OTHER_VERDICT),
        "numbers": {
            name: {"label": shown.label, "unit": shown.unit, "value": numbers[name]}
            for name, shown in claim.numbers.items()
        },
        **({"forecast": True} if claim.is_forecast else {}),
    }


def experiment_of(claim: Claim) -> Experiment:
    """Return the experiment for a claim."""

    def run(emit: Emit) -> Data:
        return card_data(claim, claim.measure(emit))

    return Experiment(
        name=f"claims_{claim.name}",
        question=f"True or false? {claim.statement}",
        run=run,
        seconds=claim.seconds,
        runs_here=claim.runs_here,
        tolerance=claim.tolerance,
        noisy=tuple(name for name, shown in claim.numbers.items() if shown.noisy),
    )
