"""The exercises: six loops with a bug each, and eight samples in one pass or in eight micro-batches of one."""

import torch

from anybatch_guide.claims.equality import error_of
from anybatch_guide.claims.measuring import step_memory
from anybatch_guide.exercises.exercise import EXERCISES, described
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.tasks.task import load


def check_loops(emit: Emit) -> Data:
    """Run `anybatch check --loop` on each loop with a bug."""
    loops = []
    for done, exercise in enumerate(EXERCISES):
        emit_progress(emit, done, len(EXERCISES), exercise.module)
        loops.append(described(exercise))
    return {"loops": loops}


def compare_eight(emit: Emit) -> Data:
    """Compare gradient and memory of eight digits in one pass, and one by one."""
    task = load("digits")
    emit_progress(emit, 0, 2, "gradients")
    errors = {"fp32": error_of(task, [1] * 8), "fp64": error_of(task, [1] * 8, dtype=torch.float64)}
    emit_progress(emit, 1, 2, "memory")
    at_once = step_memory(task, micro_batch_size=8, effective_batch_size=8)
    one_by_one = step_memory(task, micro_batch_size=1, effective_batch_size=8)
    return {
        "gradient_error": errors,
        "at_once": {"peak": at_once["peak"], "forward": at_once["forward"]},
        "one_by_one": {"peak": one_by_one["peak"], "forward": one_by_one["forward"]},
    }


LOOPS = Experiment(
    name="exercises_loops",
    question="Which bug does each of these six loops have?",
    run=check_loops,
    seconds=15,
    runs_here=False,
)
EIGHT = Experiment(
    name="exercises_eight",
    question="Eight samples in one pass, or one by one: is the gradient the same, and how much memory does each need?",
    run=compare_eight,
    seconds=2,
    noisy=("gradient_error",),
)
