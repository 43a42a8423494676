"""Compare two runs by their settings, and by the losses of common steps."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from anybatch_guide.watch.curve import Curve

ROUNDING: Final[Mapping[str, float]] = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}
"""Largest relative difference of two losses that counts as rounding, by the number format of the forward."""
_FORMATS: Final[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16"}
_DEFINING: Final = {"effective_batch_size": "effective batch size", "seed": "seed", "num_parameters": "parameters"}

_HARMLESS: Final = frozenset(
    ("ranks", "strategy", "micro_batch_size", "accumulation_steps", "micro_batch_tokens", "max_seconds", "num_workers")
)
"""Settings that change losses only by rounding."""

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


def different_settings(settings: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings that differ and may change losses, as texts.

    If `anybatch train` made both runs, a missing setting has its default; otherwise the value is unknown.
    """
    names = [name for name in {**settings, **other} if name not in _HARMLESS]
    if "recipe" not in settings or "recipe" not in other:
        names = [name for name in names if name in settings and name in other]
    return tuple(
        f"{name.replace('_', ' ')}: {settings.get(name, 'default')} there, {other.get(name, 'default')} here"
        for name in names
        if settings.get(name) != other.get(name)
    )


def compare(
    facts: Mapping[str, Any],
    curve: Curve,
    other_facts: Mapping[str, Any],
    other: Curve,
    differences: tuple[str, ...] = (),
) -> Verdict:
    """Compare a run (`other`) with the reference run.

    "another": batch size, seed, number of parameters or the first common loss differs; or another setting
    (`differences`) and any loss differ. "drifted": settings and the first loss are equal, but a later loss differs.
    "same": no loss differs.
    """
    reasons = tuple(
        f"{name}: {facts[key]} there, {other_facts[key]} here"
        for key, name in _DEFINING.items()
        if facts.get(key) is not None and other_facts.get(key) is not None and facts[key] != other_facts[key]
    )
    tolerance = max(_rounding(facts), _rounding(other_facts))
    comparison = _compare_losses(curve, other, tolerance)
    word: Word = "same"
    if comparison.step is not None:
        named = {reason.partition(":")[0] for reason in reasons}
        reasons += tuple(text for text in differences if text.partition(":")[0] not in named)
    if comparison.is_first and not reasons:
        reasons = (f"the loss already differs in step {(comparison.step or 0) + 1}",)
    if reasons:
        word = "another"
    elif not comparison.num_steps:
        word = "unknown"
    elif comparison.step is not None:
        word = "drifted"
    return Verdict(
        word=word,
        step=comparison.step,
        num_steps=comparison.num_steps,
        difference=comparison.largest,
        tolerance=tolerance,
        reasons=reasons,
    )


@dataclass(frozen=True, slots=True)
class _LossComparison:
    """The losses of two runs in common steps; `step` is the first step whose losses differ by more than rounding."""

    num_steps: int
    largest: float | None
    step: int | None = None
    is_first: bool = False


def _compare_losses(one: Curve, other: Curve, tolerance: float) -> _LossComparison:
    if one.steps == other.steps and one.losses == other.losses:
        return _LossComparison(len(one.steps), 0.0 if one.steps else None)
    largest, num_steps = 0.0, 0
    beyond: int | None = None
    first: int | None = None
    for step, loss, value in _common(one, other):
        num_steps += 1
        first = step if first is None else first
        if loss == value or (loss != loss and value != value):  # noqa: PLR0124 (NaN, in the inner loop)
            continue
        difference = abs(loss - value) / max(abs(loss), abs(value))
        difference = difference if math.isfinite(difference) else math.inf
        largest = max(largest, difference)
        if beyond is None and difference > tolerance:
            beyond = step
    return _LossComparison(num_steps, largest if num_steps else None, beyond, beyond is not None and beyond == first)


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
