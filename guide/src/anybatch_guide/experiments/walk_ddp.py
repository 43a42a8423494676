"""The code walk-through, DDP: the executed lines, in order."""

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.listings import listing
from anybatch_guide.tracing import trace_rank


def run(emit: Emit) -> Data:
    """Return the trace of the program."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "lines"})
    return trace_rank(listing("with_ddp.py"), "train", repeats=100)


EXPERIMENT = Experiment(
    name="walk_ddp",
    question="Which line runs when, on one of two ranks under DDP?",
    run=run,
    seconds=10,
    runs_here=False,
)
