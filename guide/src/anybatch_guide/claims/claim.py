"""`Claim`: a sentence that is often said, what is measured to judge it, and the rule that gives the verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from anybatch_guide.experiment import Data, Emit, Experiment

Verdict = Literal["true", "only_if", "false"]
Side = Literal["advantage", "limitation", "recipe", "devices", "batch_size"]
Numbers = Mapping[str, float]
EXACT, WRONG = 1e-4, 1e-2
"""A relative error below the one is rounding in float32; one above the other is another gradient."""


@dataclass(frozen=True, slots=True)
class Number:
    """How a number of a claim is shown.

    Attributes:
        label: what it is, for the card's table.
        unit: "" for a plain number, "x" for a ratio, "bytes", "%", "lines" or "findings".
        noisy: whether it is a time, or an error that is nothing but rounding.
    """

    label: str
    unit: str = ""
    noisy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that is said of gradient accumulation, of training on several devices, or of the size of the batch.

    Attributes:
        name: its name in links and recordings.
        side: on which side of the trade-off of accumulation it is said; or that it is a recipe, about devices, or about
            the size of the batch.
        title: what it is about, in a few words.
        said: the claim, in our words.
        how: what was measured, in a sentence or two.
        measure: function (emit) -> numbers.
        numbers: name of a number to how it is shown, in the order in which they are shown.
        rule: function (numbers) -> verdict.
        rule_in_words: the rule, for readers.
        texts: what is to be said with each verdict; `{name}` stands for a number.
        seconds: about how long it takes on two cores.
        tolerance: largest relative difference between two recordings: sums come in other orders on other processors.
        runs_here: whether the page may measure it; what takes ranks is only recorded.
    """

    name: str
    side: Side
    title: str
    said: str
    how: str
    measure: Callable[[Emit], Numbers]
    numbers: Mapping[str, Number]
    rule: Callable[[Numbers], Verdict]
    rule_in_words: str
    texts: Mapping[Verdict, str]
    seconds: float
    tolerance: float = 1e-3
    runs_here: bool = True


def judged(claim: Claim, found: Numbers) -> Data:
    """Return what a card shows: the claim, its numbers, the verdict that the rule gives, and its text.

    Raises:
        ValueError: other numbers were measured than the claim shows.
    """
    # A number that is measured and not shown, or the other way round, is a mistake in the catalogue.
    if found.keys() != claim.numbers.keys():
        message = f"{claim.name} measured {sorted(found)}, and shows {sorted(claim.numbers)}."
        raise ValueError(message)
    verdict = claim.rule(found)
    return {
        "claim": claim.name,
        "side": claim.side,
        "title": claim.title,
        "said": claim.said,
        "how": claim.how,
        "rule": claim.rule_in_words,
        "verdict": verdict,
        "text": claim.texts[verdict],
        "numbers": {
            name: {"label": shown.label, "unit": shown.unit, "value": found[name]}
            for name, shown in claim.numbers.items()
        },
    }


def experiment_of(claim: Claim) -> Experiment:
    """Return the experiment behind a claim."""

    def run(emit: Emit) -> Data:
        return judged(claim, claim.measure(emit))

    return Experiment(
        name=f"claims_{claim.name}",
        question=f"Is it so? {claim.said}",
        run=run,
        seconds=claim.seconds,
        runs_here=claim.runs_here,
        tolerance=claim.tolerance,
        noisy=tuple(name for name, shown in claim.numbers.items() if shown.noisy),
    )
