"""Six loops with a bug each, and the findings of the checker."""

from anybatch_guide.exercises.exercise import EXERCISES, described
from anybatch_guide.experiment import Data, Emit, Experiment


def run(emit: Emit) -> Data:
    """Run `anybatch check --loop` on each of them."""
    found = []
    for done, exercise in enumerate(EXERCISES):
        emit({"kind": "guide.progress", "done": done, "of": len(EXERCISES), "what": exercise.module})
        found.append(described(exercise))
    return {"loops": found}


EXPERIMENT = Experiment(
    name="exercises_loops",
    question="What is wrong with these six loops?",
    run=run,
    seconds=15,
    runs_here=False,
)
