"""anybatch: name the effective batch size; any hardware trains it, exactly."""

from anybatch.core.loss import (
    LossSum,
    counted,
    joint,
    mean_over,
    mean_over_samples,
    mean_over_tokens,
    samples,
    sum_of,
    tokens,
)
from anybatch.core.reports import StepReport
from anybatch.core.splitting import BatchPlan
from anybatch.data import Shards, batches
from anybatch.engine.engine import Engine
from anybatch.engine.shares import shares
from anybatch.events.jsonl import JsonlLog
from anybatch.parallel.world import World
from anybatch.recipes.job import Defaults, Evaluation, Job

__all__ = [
    "BatchPlan",
    "Defaults",
    "Engine",
    "Evaluation",
    "Job",
    "JsonlLog",
    "LossSum",
    "Shards",
    "StepReport",
    "World",
    "batches",
    "counted",
    "joint",
    "mean_over",
    "mean_over_samples",
    "mean_over_tokens",
    "samples",
    "shares",
    "sum_of",
    "tokens",
]
