"""A batch that grows until memory runs out: peaks by batch size, and torch's errors with enforced budgets."""

from collections.abc import Callable
from functools import cache
from typing import Any

from anybatch.memory.trace import ORDER, MemoryTimeline, fit, timeline
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.memory.plain_step import OutOfMemory, trace_plain_step, try_plain_step
from anybatch_guide.memory.small import SMALL_MODELS, SmallModel
from anybatch_guide.memory.timelines import in_order, peak_of

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Measured batch sizes."""
BUDGETS_MIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Enforced budgets, in MiB."""
PREDICTED_FROM = (2, 3)
"""The two sizes from which all other peaks are predicted, as in `anybatch plan`."""
MEBIBYTE = 2**20


def run(emit: Emit) -> Data:
    """Measure every model at every size, and record the out-of-memory error of each size that exceeds a budget."""
    models = []
    for done, model in enumerate(SMALL_MODELS.values()):
        emit_progress(emit, done, len(SMALL_MODELS), model.title)
        models.append(_measured(model, emit))
    return {
        "categories": list(ORDER),
        "sizes": list(SIZES),
        "budgets_mib": list(BUDGETS_MIB),
        "predicted_from": list(PREDICTED_FROM),
        "models": models,
    }


def _measured(model: SmallModel, emit: Emit) -> dict[str, Any]:
    @cache
    def timeline_of(size: int) -> MemoryTimeline:
        emit_progress(emit, size, max(SIZES), f"{model.title}, batch of {size}")
        return timeline(trace_plain_step(model, size))

    low, high = PREDICTED_FROM
    envelope = fit(trace_plain_step(model, low), low, trace_plain_step(model, high), high)
    return {
        "name": model.name,
        "title": model.title,
        "words": model.description,
        "num_parameters": sum(parameter.numel() for parameter in model.make().parameters()),
        "peaks": [peak_of(timeline_of(size)) for size in SIZES],
        "predicted": [envelope.peak_bytes(size) for size in SIZES],
        "budgets": [_within_budget(model, timeline_of, budget * MEBIBYTE) for budget in BUDGETS_MIB],
    }


def _within_budget(model: SmallModel, timeline_of: Callable[[int], MemoryTimeline], budget: int) -> dict[str, Any]:
    """Return the largest size that fits into a budget, and the failure of each larger measured size."""
    largest = _largest(lambda size: timeline_of(size).peak_bytes <= budget)
    if largest < max(SIZES):
        assert largest == 0 or try_plain_step(model, largest, budget) is None, "its peak is within the budget"
    shortages = {size: try_plain_step(model, size, budget) for size in (*SIZES, largest + 1) if size > largest}
    return {
        "largest": largest,
        "one_more": None if largest >= max(SIZES) else _shortage_data(shortages[largest + 1]),
        "shortages": [None if size <= largest else _shortage_data(shortages[size]) for size in SIZES],
    }


def _shortage_data(shortage: OutOfMemory | None) -> dict[str, Any]:
    assert shortage is not None, "its peak exceeds the budget"
    return {"phase": shortage.phase, "held": in_order(shortage.category_bytes), "message": shortage.message}


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest size of the measured range that fits; 0 if none fits."""
    low, high = 0, max(SIZES) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


EXPERIMENT = Experiment(
    name="memory_limit",
    question="How much memory does a step need at each batch size, and what happens if less is available?",
    run=run,
    seconds=60,
)
