"""Learning rates for an effective batch size: scaling rules, warm-up and schedules; and batch sizes that grow."""

from collections.abc import Iterable

from anybatch.core.learning_rate import ScaledRate, scale_optimizer, scale_rate, scaled_weight_decay
from anybatch.core.schedules import (
    BatchRamp,
    Cosine,
    Stage,
    WarmUp,
    attach_schedule,
    join_schedules,
    seesaw,
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
    "ramp_from_noise",
    "scale_optimizer",
    "scale_rate",
    "scaled_weight_decay",
    "seesaw",
    "steps_of_epochs",
    "steps_of_samples",
]


def ramp_from_noise(measured: Iterable[tuple[int, float]], *, smallest: int, largest: int) -> BatchRamp:
    """Return a ramp that doubles the batch where the measured noise scale reaches the doubled size.

    Args:
        measured: pairs of samples of the run so far and noise scale, such as the lower end of `report.noise.interval`.
        smallest: the first effective batch size.
        largest: limit of the size. The critical batch size starts near 0, grows and levels off (Merrill et al. 2025,
            arXiv 2505.23971, who measure it by branched training; the noise scale only estimates it).
    """
    stages, begin, size = list[Stage](), 0, smallest
    for num_samples, scale in measured:
        grown = size
        while 2 * grown <= min(scale, largest):
            grown *= 2
        if grown > size and num_samples - begin >= size:
            stages.append((size, num_samples - begin))
            begin, size = num_samples, grown
    return BatchRamp(*stages, (size, None))
