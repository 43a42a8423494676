"""A batch that grows until memory ends: peaks as counted, and what torch says at the end of an enforced budget."""

from collections.abc import Callable
from functools import cache
from typing import Any

from anybatch.memory.timeline import ORDER, MemoryTimeline, timeline
from anybatch.memory.trace import fit
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.memory.courses import in_order, peak_of
from anybatch_guide.memory.native import OutOfMemory, trace_native, try_native
from anybatch_guide.memory.small import SMALL_MODELS, SmallModel

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that are measured."""
BUDGETS_MIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Budgets that are enforced, in MiB."""
PREDICTED_FROM = (2, 3)
"""Sizes whose two steps foretell all the others, as a plan does."""
MEBIBYTE = 2**20


def run(tell: Tell) -> Data:
    """Measure every model at every size, and let each size that is too large for a budget run out of it."""
    models = []
    for done, model in enumerate(SMALL_MODELS.values()):
        tell({"kind": "guide.progress", "done": done, "of": len(SMALL_MODELS), "what": model.title})
        models.append(_measured(model, tell))
    return {
        "categories": list(ORDER),
        "sizes": list(SIZES),
        "budgets_mib": list(BUDGETS_MIB),
        "predicted_from": list(PREDICTED_FROM),
        "models": models,
    }


def _measured(model: SmallModel, tell: Tell) -> dict[str, Any]:
    @cache
    def course(size: int) -> MemoryTimeline:
        tell({"kind": "guide.progress", "done": size, "of": max(SIZES), "what": f"{model.title}, {size} at once"})
        return timeline(trace_native(model, size))

    low, high = PREDICTED_FROM
    envelope = fit(trace_native(model, low), low, trace_native(model, high), high)
    return {
        "name": model.name,
        "title": model.title,
        "words": model.words,
        "num_parameters": sum(parameter.numel() for parameter in model.make().parameters()),
        "peaks": [peak_of(course(size)) for size in SIZES],
        "predicted": [envelope.peak_bytes(size) for size in SIZES],
        "budgets": [_tried(model, course, budget * MEBIBYTE) for budget in BUDGETS_MIB],
    }


def _tried(model: SmallModel, course: Callable[[int], MemoryTimeline], budget: int) -> dict[str, Any]:
    """Return the largest size that ran, and how each larger one of those that are measured failed."""
    largest = _largest(lambda size: course(size).peak_bytes <= budget)
    if largest < max(SIZES):
        assert largest == 0 or try_native(model, largest, budget) is None, "it was counted to fit"
    shortages = {size: try_native(model, size, budget) for size in (*SIZES, largest + 1) if size > largest}
    return {
        "largest": largest,
        "one_more": None if largest >= max(SIZES) else _told(shortages[largest + 1]),
        "shortages": [None if size <= largest else _told(shortages[size]) for size in SIZES],
    }


def _told(shortage: OutOfMemory | None) -> dict[str, Any]:
    assert shortage is not None, "more was counted than the budget has"
    return {"phase": shortage.phase, "held": in_order(shortage.held), "message": shortage.message}


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest of the measured range that fits; 0 if none does."""
    low, high = 0, max(SIZES) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


EXPERIMENT = Experiment(
    name="memory_limit",
    question="How much memory does a step hold at each batch size, and what happens when there is less?",
    run=run,
    seconds=60,
)
