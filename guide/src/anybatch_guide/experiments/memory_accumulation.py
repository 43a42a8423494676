"""The memory of a step over one effective batch at each micro-batch size, in bytes."""

import itertools
from typing import Any

from anybatch.memory.trace import ORDER
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.memory.accumulated import AccumulationConfig, MeasuredStep, all_configs, measure_accumulated
from anybatch_guide.memory.small import ACCUMULATED
from anybatch_guide.memory.timelines import downsampled, peak_of

EFFECTIVE = 64
MICRO_SIZES = (64, 32, 16, 8, 4, 2, 1)
"""Micro-batch sizes; each divides the effective batch size."""
LARGE_SIZES = (128, 64)
"""Micro-batch sizes that are also measured with two micro-batches per step, for larger effective batches."""
ALONE_SIZES = (256, 128, *MICRO_SIZES)
"""Batch sizes that are measured in one pass."""
NUM_STEPS = len(MICRO_SIZES) + len(LARGE_SIZES) + len(ALONE_SIZES)
"""Number of measured steps of a configuration."""
TIMELINE_SIZES = (64, 16, 4)
"""Micro-batch sizes with a timeline: the first configuration is in this recording, all are in `memory_courses`."""
NUM_BUCKETS = 90
"""Number of equal parts of a timeline; the highest and the lowest moment of each part are recorded."""


def measure_peaks(emit: Emit) -> Data:
    """Measure every configuration at every micro-batch size, with accumulation and without."""
    results = [_measured(config, emit, number=number) for number, config in enumerate(all_configs())]
    model = ACCUMULATED.make()
    return {
        "categories": list(ORDER),
        "effective": EFFECTIVE,
        "micro_sizes": list(MICRO_SIZES),
        "alone_sizes": list(ALONE_SIZES),
        "model": ACCUMULATED.description,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ways": results,
    }


def _measured(config: AccumulationConfig, emit: Emit, *, number: int) -> dict[str, Any]:
    done = itertools.count(number * NUM_STEPS)
    what = f"{config.optimizer}, {config.precision}{', checkpointing' if config.checkpointing else ''}"

    def measured(effective: int, size: int) -> MeasuredStep:
        emit_progress(emit, next(done), len(all_configs()) * NUM_STEPS, f"{what}, {size} x {effective // size}")
        return measure_accumulated(ACCUMULATED, config, effective_batch_size=effective, micro_batch_size=size)

    cuts = {size: measured(EFFECTIVE, size) for size in MICRO_SIZES}
    return {
        "optimizer": config.optimizer,
        "precision": config.precision,
        "checkpointing": config.checkpointing,
        "gradient_bytes": cuts[EFFECTIVE].gradient_bytes,
        "operations": [step.num_operations for step in cuts.values()],
        "cuts": [peak_of(step.timeline) for step in cuts.values()],
        "twice": {size: peak_of(measured(2 * size, size).timeline) for size in LARGE_SIZES},
        "alone": [peak_of(measured(size, size).timeline) for size in ALONE_SIZES],
        "courses": {size: downsampled(cuts[size].timeline, NUM_BUCKETS) for size in TIMELINE_SIZES * (not number)},
    }


def measure_timelines(emit: Emit) -> Data:
    """Measure the timeline of each configuration at a few micro-batch sizes; the page switches between them."""
    timelines = []
    for done, config in enumerate(all_configs()):
        what = f"{config.optimizer}, {config.precision}"
        emit_progress(emit, done, len(all_configs()), what)
        measured = {
            str(size): measure_accumulated(ACCUMULATED, config, effective_batch_size=EFFECTIVE, micro_batch_size=size)
            for size in TIMELINE_SIZES
        }
        timelines.append({size: downsampled(step.timeline, NUM_BUCKETS) for size, step in measured.items()})
    return {"drawn": list(TIMELINE_SIZES), "ways": timelines}


PEAKS = Experiment(
    name="memory_accumulation",
    question="How much memory does a step of 64 samples need, in one pass and in micro-batches?",
    run=measure_peaks,
    seconds=90,
)
TIMELINES = Experiment(
    name="memory_courses",
    question="How does memory change during a step, with checkpointing, bf16, or another optimizer?",
    run=measure_timelines,
    seconds=30,
)
