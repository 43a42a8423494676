"""Six loops with a bug each, and the findings of the checker."""

from anybatch_guide.exercises.exercise import EXERCISES, described
from anybatch_guide.experiment import Data, Emit, Experiment


def run(emit: Emit) -> Data:
    """Run `anybatch check --loop` on each of them."""
    loops = []
    for done, exercise in enumerate(EXERCISES):
        emit({"kind": "guide.progress", "done": done, "of": len(EXERCISES), "what": exercise.module})
        loops.append(described(exercise))
    return {"loops": loops}


EXPERIMENT = Experiment(
    name="exercises_loops",
    question="Which bug does each of these six loops have?",
    run=run,
    seconds=15,
    runs_here=False,
)
