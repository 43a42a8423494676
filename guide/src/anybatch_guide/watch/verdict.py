"""Compare two runs by their settings, and by the losses of common steps."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from anybatch_guide.watch.curve import Curve

ROUNDING: Final[Mapping[str, float]] = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}
"""Relative difference of two losses that counts as rounding, by the number format of the forward."""
_FORMATS: Final[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16"}
_DEFINING: Final = {"effective_batch_size": "effective batch size", "seed": "seed", "num_parameters": "parameters"}

Word = Literal["reference", "same", "drifted", "another", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of a run with the reference."""

    word: Word  # the result
    step: int | None = None  # the first step whose loss differs by more than rounding, or None
    num_steps: int = 0  # number of common steps
    difference: float | None = None  # largest relative difference of a loss; None without common steps
    tolerance: float = 0.0  # largest difference that counts as rounding
    reasons: tuple[str, ...] = ()  # reasons for "another"


def compare(facts: Mapping[str, Any], curve: Curve, other_facts: Mapping[str, Any], other: Curve) -> Verdict:
    """Compare a run with the reference, the first argument.

    "another": a defining setting differs, or the first common loss differs by more than
    rounding. "drifted": it starts equal, and a later loss differs. "same": no loss differs.
    """
    reasons = tuple(
        f"{name}: {facts[key]} there, {other_facts[key]} here"
        for key, name in _DEFINING.items()
        if facts.get(key) is not None and other_facts.get(key) is not None and facts[key] != other_facts[key]
    )
    tolerance = max(_rounding(facts), _rounding(other_facts))
    apart = _losses_apart(curve, other, tolerance)
    word: Word = "same"
    if apart.is_first and not reasons:
        reasons = (f"the loss already differs in step {apart.step}",)
    if reasons:
        word = "another"
    elif not apart.num_steps:
        word = "unknown"
    elif apart.step is not None:
        word = "drifted"
    return Verdict(
        word=word,
        step=apart.step,
        num_steps=apart.num_steps,
        difference=apart.largest,
        tolerance=tolerance,
        reasons=reasons,
    )


@dataclass(frozen=True, slots=True)
class _Apart:
    """Two runs' losses: common steps, largest relative difference, the step beyond rounding, if it is the first."""

    num_steps: int
    largest: float | None
    step: int | None = None
    is_first: bool = False


def _losses_apart(one: Curve, other: Curve, tolerance: float) -> _Apart:
    if one.steps == other.steps and one.losses == other.losses:
        return _Apart(len(one.steps), 0.0 if one.steps else None)
    largest, num_steps = 0.0, 0
    beyond: int | None = None
    first: int | None = None
    for step, loss, value in _common(one, other):
        num_steps += 1
        first = step if first is None else first
        if loss == value or (loss != loss and value != value):  # noqa: PLR0124 (NaN, in the inner loop)
            continue
        apart = abs(loss - value) / max(abs(loss), abs(value))
        apart = apart if math.isfinite(apart) else math.inf
        largest = max(largest, apart)
        if beyond is None and apart > tolerance:
            beyond = step
    return _Apart(num_steps, largest if num_steps else None, beyond, beyond is not None and beyond == first)


def _common(one: Curve, other: Curve) -> Iterator[tuple[int, float, float]]:
    """Yield the common steps, with both losses."""
    num_steps = min(len(one.steps), len(other.steps))
    if one.steps[:num_steps] == other.steps[:num_steps]:
        yield from zip(one.steps[:num_steps], one.losses, other.losses, strict=False)
        return
    losses = dict(zip(other.steps, other.losses, strict=True))
    for step, loss in zip(one.steps, one.losses, strict=True):
        if step in losses:
            yield step, loss, losses[step]


def _rounding(facts: Mapping[str, Any]) -> float:
    number_format = _FORMATS.get(str(facts.get("precision")), str(facts.get("dtype")))
    return ROUNDING.get(number_format, ROUNDING["float32"])
