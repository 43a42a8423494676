"""anybatch: name the effective batch size; any hardware trains it, exactly."""

from anybatch.core.batch import Position
from anybatch.core.loss import (
    Loss,
    LossSum,
    counted,
    mean_over,
    mean_over_samples,
    mean_over_tokens,
    samples,
    sum_of,
    tokens,
)
from anybatch.core.records import Observer
from anybatch.core.reports import StepReport
from anybatch.core.splitting import BatchPlan
from anybatch.data import batches
from anybatch.engine.engine import Engine
from anybatch.engine.shares import shares
from anybatch.events.jsonl import JsonlLog
from anybatch.parallel.world import World

__all__ = [
    "BatchPlan",
    "Engine",
    "JsonlLog",
    "Loss",
    "LossSum",
    "Observer",
    "Position",
    "StepReport",
    "World",
    "batches",
    "counted",
    "mean_over",
    "mean_over_samples",
    "mean_over_tokens",
    "samples",
    "shares",
    "sum_of",
    "tokens",
]
