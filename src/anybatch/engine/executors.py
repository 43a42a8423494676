"""How an effective batch is run, in one pass or two: chosen once, when an engine is built."""

from typing import Protocol

import torch
from torch import nn

from anybatch.engine.accumulation.accumulate import LoopContext, accumulate
from anybatch.engine.accumulation.planned_batch import CountedBatch
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.accumulation.two_pass import (
    OutputExchange,
    abort_exchange,
    accumulate_in_two_passes,
    first_rank_with_samples,
    gather_outputs,
)
from anybatch.engine.batch_norm.runner import BatchNormRunner, Execute
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.parallel.strategy import Abort
from anybatch.parallel.world import World


class Executor(Protocol):
    """Adds up the gradient of one effective batch, and can leave in the middle of it."""

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run all micro-batches of this rank."""
        ...

    def begin_step(self) -> None:
        """Forget how far the last effective batch had come."""
        ...

    def abort(self, *, failed: bool) -> None:
        """Serve the collectives that the other ranks wait in, and tell them; see `Prepared.abort`."""
        ...


def choose_executor(
    context: LoopContext,
    modules: nn.Module,
    world: World,
    notifier: Notifier,
    batch_norm: BatchNormRunner,
    *,
    num_further: int = 0,
) -> Executor:
    """Return what runs the steps of a loss: one pass, or two for a loss across samples.

    Args:
        context: what the loop uses.
        modules: the model.
        world: the ranks.
        notifier: reports micro-batches.
        batch_norm: runs micro-batches under the policy about BatchNorm.
        num_further: numbers that ranks sum beside those of the loss.
    """
    abort: Abort = _no_abort
    if context.prepared.abort is not None:
        # Made beforehand: a rank that has run out of memory can allocate nothing for its last message.
        abort = context.prepared.abort(
            torch.cat([totals := Sums().totals(context.loss, world.device), totals.new_zeros(num_further)])
        )
    if context.loss.kind.encode is None:
        execute = accumulate if batch_norm.is_idle else batch_norm.accumulate
        return _OnePass(context, notifier, execute, abort)
    return _TwoPasses(context, modules, world, notifier, batch_norm, abort=abort)


class _OnePass:
    def __init__(self, context: LoopContext, notifier: Notifier, execute: Execute, abort: Abort) -> None:
        self._context = context
        self._notifier = notifier
        self._execute = execute
        self.abort = abort

    def begin_step(self) -> None:
        """Nothing is kept."""

    def __call__(self, counted: CountedBatch) -> Sums:
        """Run forward and backward of one micro-batch after the other."""
        return self._execute(self._context, self._notifier.with_load_events(counted))


class _TwoPasses:
    """For a loss across samples. Until the ranks have exchanged outputs, that exchange is what the others wait in."""

    def __init__(
        self,
        context: LoopContext,
        modules: nn.Module,
        world: World,
        notifier: Notifier,
        batch_norm: BatchNormRunner,
        *,
        abort: Abort,
    ) -> None:
        self._context = context
        self._modules = modules
        self._world = world
        self._notifier = notifier
        self._batch_norm = batch_norm
        self._abort = abort
        self._have_exchanged = False

    def begin_step(self) -> None:
        """Outputs have not been exchanged."""
        self._have_exchanged = False

    def __call__(self, counted: CountedBatch) -> Sums:
        """Encode everything, bring the outputs together, encode again with the gradient of the loss."""
        # Set back in each try: it decides in which collective a rank that aborts meets the others.
        plan, self._have_exchanged = counted.planned.plan, False
        exchange = OutputExchange(
            gather=lambda outputs: gather_outputs(
                outputs, plan, self._world, self._notifier.gathering, self._note_exchange
            ),
            plan=plan,
            # Every rank computes the whole loss, and ranks are summed: one alone may tell it.
            reports_loss=first_rank_with_samples(plan) == self._world.rank,
            seed=counted.seed,
        )
        micro_batches = self._notifier.with_load_events(counted)
        with self._batch_norm.two_passes() as record:
            return accumulate_in_two_passes(
                self._context, self._modules, micro_batches, counted.replay, exchange, record=record
            )

    def abort(self, *, failed: bool) -> None:
        """Leave before the ranks have exchanged outputs, or behind that."""
        if self._have_exchanged:
            self._abort(failed=failed)
        else:
            abort_exchange(self._world, failed=failed)

    def _note_exchange(self) -> None:
        self._have_exchanged = True


def _no_abort(*, failed: bool) -> None:
    """The strategy cannot abort: the engine does not ask it to."""
