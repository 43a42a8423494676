"""Learning rates for an effective batch size: scaling rules, warm-up and schedules; and batch sizes that grow."""

from anybatch.core.learning_rate import ScaledRate, scale_optimizer, scale_rate
from anybatch.core.schedules import (
    BatchRamp,
    Cosine,
    WarmUp,
    attach_schedule,
    join_schedules,
    steps_of_epochs,
    steps_of_samples,
)

__all__ = [
    "BatchRamp",
    "Cosine",
    "ScaledRate",
    "WarmUp",
    "attach_schedule",
    "join_schedules",
    "scale_optimizer",
    "scale_rate",
    "steps_of_epochs",
    "steps_of_samples",
]
