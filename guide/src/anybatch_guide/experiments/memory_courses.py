"""Memory timelines of a step in every configuration, which the page draws after a change of settings."""

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.experiments.memory_accumulation import EFFECTIVE, NUM_BUCKETS, TIMELINE_SIZES
from anybatch_guide.memory.accumulated import all_configs, measure_accumulated
from anybatch_guide.memory.small import ACCUMULATED
from anybatch_guide.memory.timelines import downsampled


def run(emit: Emit) -> Data:
    """Measure each configuration at a few micro-batch sizes."""
    timelines = []
    for done, config in enumerate(all_configs()):
        what = f"{config.optimizer}, {config.precision}"
        emit({"kind": "guide.progress", "done": done, "of": len(all_configs()), "what": what})
        measured = {
            str(size): measure_accumulated(ACCUMULATED, config, effective_batch_size=EFFECTIVE, micro_batch_size=size)
            for size in TIMELINE_SIZES
        }
        timelines.append({size: downsampled(step.timeline, NUM_BUCKETS) for size, step in measured.items()})
    return {"drawn": list(TIMELINE_SIZES), "ways": timelines}


EXPERIMENT = Experiment(
    name="memory_courses",
    question="How does memory change during a step, with checkpointing, bf16, or another optimizer?",
    run=run,
    seconds=30,
)
