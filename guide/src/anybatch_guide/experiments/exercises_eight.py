"""Eight samples in one pass, and eight micro-batches of one: gradient and memory."""

import torch

from anybatch_guide.claims.equality import error_of
from anybatch_guide.claims.measuring import emit_progress, step_memory
from anybatch_guide.experiment import Data, Emit, Experiment
from anybatch_guide.tasks.task import load


def run(emit: Emit) -> Data:
    """Compare both on digits."""
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


EXPERIMENT = Experiment(
    name="exercises_eight",
    question="Eight samples in one pass, or one by one: is the gradient the same, and how much memory does each need?",
    run=run,
    seconds=2,
    noisy=("gradient_error",),
)
