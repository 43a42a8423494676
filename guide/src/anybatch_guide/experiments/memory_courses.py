"""Memory over the course of a step, in every way of computing it: what the page draws once a setting is changed."""

from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.experiments.memory_accumulation import DRAWN, EFFECTIVE, NUM_BUCKETS
from anybatch_guide.memory.accumulated import all_ways, measure_accumulated
from anybatch_guide.memory.courses import drawn
from anybatch_guide.memory.small import ACCUMULATED


def run(tell: Tell) -> Data:
    """Measure each way with a few of the cuts."""
    courses = []
    for done, way in enumerate(all_ways()):
        tell(
            {"kind": "guide.progress", "done": done, "of": len(all_ways()), "what": f"{way.optimizer}, {way.precision}"}
        )
        measured = {
            str(size): measure_accumulated(ACCUMULATED, way, effective_batch_size=EFFECTIVE, micro_batch_size=size)
            for size in DRAWN
        }
        courses.append({size: drawn(one.course, NUM_BUCKETS) for size, one in measured.items()})
    return {"drawn": list(DRAWN), "ways": courses}


EXPERIMENT = Experiment(
    name="memory_courses",
    question="What does a step hold from moment to moment, with checkpointing, bf16, or another optimizer?",
    run=run,
    seconds=30,
)
