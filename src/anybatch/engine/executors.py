"""Which way an effective batch is run: chosen once, when an engine is built, so that no loop asks again."""

from collections.abc import Callable
from typing import Protocol

from torch import nn

from anybatch.engine.accumulation.accumulate import Machine
from anybatch.engine.accumulation.planned_batch import Workload
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.accumulation.two_pass import (
    Meeting,
    accumulate_joint,
    first_rank_with_samples,
    gather_outputs,
    give_up_gathering,
)
from anybatch.engine.batch_norm.runner import Normalisation
from anybatch.engine.telemetry.notifier import Watch
from anybatch.parallel.world import World


class Executor(Protocol):
    """Adds up the gradient of one effective batch, and knows how to leave in the middle of it."""

    def __call__(self, workload: Workload) -> Sums:
        """Run all micro-batches of this rank."""
        ...

    def give_up(self) -> None:
        """Leave: serve the collectives that the other ranks wait in, and tell them; see `Prepared.give_up`."""
        ...


def choose_executor(machine: Machine, modules: nn.Module, world: World, watch: Watch, norms: Normalisation) -> Executor:
    """Return what runs the steps of a loss: one pass, or two for a loss across samples."""
    give_up = _nobody_is_told
    if machine.prepared.give_up is not None:
        give_up = machine.prepared.give_up(Sums().totals(machine.loss, world.device))
    if machine.loss.encode is None:
        return _OnePass(machine, watch, norms, give_up)
    return _TwoPasses(machine, modules, world, watch, norms, give_up=give_up)


class _OnePass:
    def __init__(self, machine: Machine, watch: Watch, norms: Normalisation, give_up: Callable[[], None]) -> None:
        self._machine = machine
        self._watch = watch
        self._norms = norms
        self.give_up = give_up

    def __call__(self, workload: Workload) -> Sums:
        """Run forward and backward of one micro-batch after the other."""
        return self._norms.accumulate(self._machine, self._watch.work(workload))


class _TwoPasses:
    """For a loss across samples. Until the ranks have met, the meeting is what the others wait in."""

    def __init__(
        self,
        machine: Machine,
        modules: nn.Module,
        world: World,
        watch: Watch,
        norms: Normalisation,
        *,
        give_up: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._modules = modules
        self._world = world
        self._watch = watch
        self._norms = norms
        self._give_up = give_up
        self._have_met = False

    def __call__(self, workload: Workload) -> Sums:
        """Encode everything, bring the outputs together, encode again with the gradient of the loss."""
        plan, self._have_met = workload.opened.plan, False
        meeting = Meeting(
            meet=lambda outputs: gather_outputs(outputs, plan, self._world, self._watch.gathering, self._note_met),
            num_samples=plan.num_samples,
            tells=first_rank_with_samples(plan) == self._world.rank,
            seed=workload.seed,
        )
        work = self._watch.work(workload)
        with self._norms.two_passes() as record:
            return accumulate_joint(self._machine, self._modules, work, workload.replay, meeting, record=record)

    def give_up(self) -> None:
        """Leave before the ranks have met, or behind that."""
        if self._have_met:
            self._give_up()
        else:
            give_up_gathering(self._world)

    def _note_met(self) -> None:
        self._have_met = True


def _nobody_is_told() -> None:
    """The strategy has no way to tell: the engine does not ask it."""
