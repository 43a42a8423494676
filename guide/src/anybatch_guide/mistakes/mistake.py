"""The mistakes by name: effect, fix, wrong lines, and loop."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from anybatch.errors import UserError

RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake in a loop."""

    effect: str  # its effect
    cure: str  # the fix
    finding: str  # code of the finding of `anybatch check --loop`


MISTAKES: Mapping[str, Mistake] = MappingProxyType(
    {
        "no_division": Mistake(
            effect="The means of N micro-batches are added but not divided, so the gradient is N times too large.",
            cure="Weight each micro-batch's mean by its share of the items in the window.",
            finding="not_divided",
        ),
        "zero_each": Mistake(
            effect="The optimizer step uses only the gradient of the last micro-batch; the other gradients are lost.",
            cure="Zero once per window, before its first micro-batch.",
            finding="zero_grad_inside_window",
        ),
        "clip_each": Mistake(
            effect="Every micro-batch clips the sum so far, so early micro-batches count less.",
            cure="Clip once, when the sum is complete.",
            finding="clips_every_micro_batch",
        ),
        "schedule_each": Mistake(
            effect="The learning rate falls N times too fast.",
            cure="Step the scheduler after the optimizer, once per window.",
            finding="schedules_every_micro_batch",
        ),
        "drop_tail": Mistake(
            effect="An incomplete window at the end of an epoch is skipped, so its samples are never used.",
            cure="Also step after an incomplete window, and divide by its number of items.",
            finding="samples_missing",
        ),
        "mean_of_means": Mistake(
            effect="Every micro-batch has the same weight, so items of a small micro-batch count more.",
            cure="Weight each micro-batch by its number of items, not by 1/N.",
            finding="mean_of_means",
        ),
    }
)


def loop_of(name: str) -> Callable[..., None]:
    """Return the loop with a mistake, or the correct one."""
    if name != RIGHT and name not in MISTAKES:
        message = f"{name=} must be {RIGHT!r} or one of {', '.join(map(repr, MISTAKES))}."
        raise UserError(message)
    loop: Callable[..., None] = importlib.import_module(f"anybatch_guide.mistakes.{name}").train
    return loop


def source_of(name: str) -> str:
    """Return the source of a loop."""
    return inspect.getsource(loop_of(name))


def wrong_lines(name: str) -> list[int]:
    """Return the numbers, from 1, of the lines that differ from the correct loop."""
    right, wrong = source_of(RIGHT).splitlines(), source_of(name).splitlines()
    changes = difflib.SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes()
    return [line + 1 for tag, _, _, start, stop in changes if tag != "equal" for line in range(start, stop)]
