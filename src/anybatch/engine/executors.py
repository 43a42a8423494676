"""Which way an effective batch is run: chosen once, when an engine is built, so that no loop asks again."""

from collections.abc import Callable

from torch import nn

from anybatch.engine.accumulate import Machine
from anybatch.engine.feeding import Workload
from anybatch.engine.joint import Meeting, accumulate_joint, first_rank_with_samples, gather_outputs
from anybatch.engine.norms import Normalisation
from anybatch.engine.sums import Sums
from anybatch.engine.watch import Watch
from anybatch.parallel.world import World

Executor = Callable[[Workload], Sums]
"""Adds up the gradient of one effective batch."""


def choose_executor(machine: Machine, modules: nn.Module, world: World, watch: Watch, norms: Normalisation) -> Executor:
    """Return what runs the steps of a loss: one pass, or two for a loss across samples."""
    if machine.loss.encode is None:
        return lambda workload: norms.accumulate(machine, watch.work(workload))

    def run(workload: Workload) -> Sums:
        plan = workload.opened.plan
        meeting = Meeting(
            meet=lambda outputs: gather_outputs(outputs, plan, world, watch.gathering),
            num_samples=plan.num_samples,
            tells=first_rank_with_samples(plan) == world.rank,
            seed=workload.seed,
        )
        with norms.two_passes() as record:
            return accumulate_joint(machine, modules, watch.work(workload), workload.replay, meeting, record=record)

    return run
