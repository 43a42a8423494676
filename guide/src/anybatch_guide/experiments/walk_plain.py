"""The code walk-through, plain: the executed lines, in order."""

from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.listings import listing
from anybatch_guide.tracing import trace_program


def run(emit: Emit) -> Data:
    """Return the trace of the program."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "lines"})
    return trace_program([listing("plain.py")], repeats=100)


EXPERIMENT = Experiment(
    name="walk_plain",
    question="Which line of a plain loop runs when?",
    run=run,
    seconds=10,
)
