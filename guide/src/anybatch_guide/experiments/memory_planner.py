"""Steps of published models, traced without data: what the page's planner computes with."""

from anybatch.core.headroom import HEADROOM
from anybatch.planner.budget import COMMUNICATOR_BYTES, CONTEXT_BYTES, WORKSPACE_BYTES
from anybatch.planner.cost.devices import DEVICES
from anybatch_guide.experiment import Data, Experiment, Tell
from anybatch_guide.memory.planning import OFFERED, as_recorded, trace


def run(tell: Tell) -> Data:
    """Trace every variant of every model, and write down the device table beside them."""
    variants = [variant for one in OFFERED for variant in one.variants()]
    steps = []
    for done, variant in enumerate(variants):
        tell({"kind": "guide.progress", "done": done, "of": len(variants), "what": variant.model})
        steps.append(trace(variant))
    return {
        "models": [
            {
                "name": one.name,
                "sequence_lengths": list(one.sequence_lengths),
                "precisions": list(one.precisions),
                "ranks": one.ranks,
            }
            for one in OFFERED
        ],
        "devices": [{"name": one.name, "memory_bytes": one.memory_bytes} for one in DEVICES],
        "headroom": HEADROOM,
        "context_bytes": CONTEXT_BYTES,
        "communicator_bytes": COMMUNICATOR_BYTES,
        "workspace_bytes": WORKSPACE_BYTES,
        **as_recorded(steps),
    }


EXPERIMENT = Experiment(
    name="memory_planner",
    question="What does a step of a published model hold at every micro-batch size, piece by piece?",
    run=run,
    seconds=480,
    runs_here=False,
)
