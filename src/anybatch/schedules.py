"""Learning rates that fit the effective batch size: scaling, warm-up, schedules, and batches that grow."""

from anybatch.core.learning_rate import AdaScale, ScaledRate, scale_optimizer, scale_rate
from anybatch.core.schedules import (
    BatchRamp,
    Constant,
    Cosine,
    LinearDecay,
    WarmUp,
    attach_schedule,
    join_schedules,
    steps_of_epochs,
    steps_of_samples,
)

__all__ = [
    "AdaScale",
    "BatchRamp",
    "Constant",
    "Cosine",
    "LinearDecay",
    "ScaledRate",
    "WarmUp",
    "attach_schedule",
    "join_schedules",
    "scale_optimizer",
    "scale_rate",
    "steps_of_epochs",
    "steps_of_samples",
]
