"""The code walk-through, anybatch: the executed lines, in order."""

from pathlib import Path

from anybatch.engine import accumulate
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.listings import listing
from anybatch_guide.tracing import TracedFile, trace_program


def run(emit: Emit) -> Data:
    """Return the trace of the program."""
    emit({"kind": "guide.progress", "done": 0, "of": 1, "what": "lines"})
    hot_loop = TracedFile(Path(accumulate.__file__), "src/anybatch/engine/accumulate.py")
    return trace_program([listing("with_anybatch.py"), hot_loop], repeats=100)


EXPERIMENT = Experiment(
    name="walk_anybatch",
    question="Which line of the engine's hot loop runs when?",
    run=run,
    seconds=10,
)
