"""One effective batch in ever smaller micro-batches: what each way of cutting it holds, byte for byte."""

from typing import Any

from anybatch.memory.timeline import ORDER
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.memory.accumulated import AccumulationWay, all_ways, measure_accumulated
from anybatch_guide.memory.courses import drawn, peak_of
from anybatch_guide.memory.small import ACCUMULATED

EFFECTIVE = 64
MICRO_SIZES = (64, 32, 16, 8, 4, 2, 1)
"""Sizes of a micro-batch; each divides the effective batch."""
DRAWN = (64, 16, 4)
"""Of these the course of the step is kept, too: here of the plainest way, in `memory_courses` of all."""
NUM_BUCKETS = 90
"""Stretches of a course; of each, the highest and the lowest moment are kept."""


def run(tell: Tell) -> Data:
    """Measure every way with every cut, and beside each the same micro-batch alone, without accumulation."""
    ways = []
    for done, way in enumerate(all_ways()):
        what = f"{way.optimizer}, {way.precision}{', checkpointing' if way.checkpointing else ''}"
        tell({"kind": "guide.progress", "done": done, "of": len(all_ways()), "what": what})
        ways.append(_measured(way, tell, is_drawn=not done))
    model = ACCUMULATED.make()
    return {
        "categories": list(ORDER),
        "effective": EFFECTIVE,
        "micro_sizes": list(MICRO_SIZES),
        "model": ACCUMULATED.words,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ways": ways,
    }


def _measured(way: AccumulationWay, tell: Tell, *, is_drawn: bool) -> dict[str, Any]:
    cuts, alone, courses, copies = [], [], {}, set()
    for size in MICRO_SIZES:
        tell({"kind": "guide.progress", "done": size, "of": EFFECTIVE, "what": f"{size} x {EFFECTIVE // size}"})
        one = measure_accumulated(ACCUMULATED, way, effective_batch_size=EFFECTIVE, micro_batch_size=size)
        cuts.append(peak_of(one.course))
        copies.add(one.gradient_bytes)
        if is_drawn and size in DRAWN:
            courses[str(size)] = drawn(one.course, NUM_BUCKETS)
        single = measure_accumulated(ACCUMULATED, way, effective_batch_size=size, micro_batch_size=size)
        alone.append(peak_of(single.course))
    (gradient_bytes,) = copies
    return {
        "optimizer": way.optimizer,
        "precision": way.precision,
        "checkpointing": way.checkpointing,
        "gradient_bytes": gradient_bytes,
        "cuts": cuts,
        "alone": alone,
        "courses": courses,
    }


EXPERIMENT = Experiment(
    name="memory_accumulation",
    question="What does a step of 64 samples hold, at once and in micro-batches, and what is accumulation's price?",
    run=run,
    seconds=90,
)
