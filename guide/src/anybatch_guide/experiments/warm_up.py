"""Warm-up: the factors of anybatch's schedule, and the held-out loss with and without it, at a high learning rate."""

import statistics
from typing import Final

from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.study import BETAS, StudyRun, held_out_loss, num_steps_of, schedule_of

SHARES: Final = (0.0, 0.1, 0.2, 0.3)
"""Shares of the steps in which the learning rate rises."""
SEEDS: Final = (0, 1, 2, 3, 4)


def run(emit: Emit) -> Data:
    """Return the schedule of each share, and the mean held-out loss over seeds."""
    ways = []
    for done, share in enumerate(SHARES):
        losses = []
        for number, seed in enumerate(SEEDS):
            emit_progress(emit, done * len(SEEDS) + number, len(SHARES) * len(SEEDS), f"warm-up over {share:.0%}")
            losses.append(held_out_loss(_run(share, seed)))
        steps = num_steps_of(_run(share, 0))
        ways.append(
            {
                "share": share,
                "factors": [round(schedule_of(_run(share, 0))(step), 4) for step in range(steps)],
                "held_out": statistics.fmean(losses),
                "least": min(losses),
                "most": max(losses),
            }
        )
    first = _run(0.0, 0)
    return {"batch_size": first.batch_size, "learning_rate": first.learning_rate, "seeds": len(SEEDS), "ways": ways}


def _run(share: float, seed: int) -> StudyRun:
    """Return a run of the digits at twice the best learning rate."""
    return StudyRun(
        task="digits",
        optimizer="SGD",
        batch_size=64,
        learning_rate=0.64,
        epochs=6,
        betas=BETAS["SGD"],
        warm_up=share,
        seed=seed,
    )


EXPERIMENT = Experiment(
    name="warm_up",
    question="What is a warm-up of the learning rate, and what does it change?",
    run=run,
    seconds=15,
    tolerance=0.1,
)
