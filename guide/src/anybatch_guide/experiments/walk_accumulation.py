"""The full loop: the executed lines of the usual loop, with gradient and weights after each."""

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.listings import listing
from anybatch_guide.tracing import trace_program


def run(emit: Emit) -> Data:
    """Return the trace of the program, with all weights of its small network."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "lines"})
    return trace_program([listing("accumulation.py")], repeats=100, vectors=True)


EXPERIMENT = Experiment(
    name="walk_accumulation",
    question="How does each line of the usual loop change the gradient and the weights?",
    run=run,
    seconds=10,
    tolerance=1e-6,
)
