"""Runs an effective batch: plan and run, in smaller micro-batches once memory has run out, until it fits."""

import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.dtypes import accumulation_dtype, widest_dtype
from anybatch.core.loss import without_graph
from anybatch.core.records import PhaseName
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.accumulation.masked_parameters import MaskedParameters
from anybatch.engine.accumulation.planned_batch import CountedBatch, PlannedBatch
from anybatch.engine.accumulation.step_guard import StepGuard
from anybatch.engine.accumulation.sums import LateDivision, Sums
from anybatch.engine.compatibility import refused_in_backward
from anybatch.engine.data_progress import DataProgress
from anybatch.engine.executors import Executor
from anybatch.engine.forward_state.buffer_updates import BufferUpdates
from anybatch.engine.forward_state.state_watch import StateWatch
from anybatch.engine.gradient_noise import NoiseMeter, NoiseOfStep
from anybatch.engine.meaning import StepMeaning
from anybatch.engine.micro_batch_size.oom_halving import release_frames
from anybatch.engine.micro_batch_size.oom_retry import InputVersions, OomRetry, OutOfMemory
from anybatch.engine.step_planner import StepPlanner
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.errors import AnyBatchError, WorldError
from anybatch.parallel.step_agreement import StepAbortedError, StepFailedError, StepsDifferError
from anybatch.parallel.world import World


class SummedBatch(NamedTuple):
    """An effective batch that has been run: its gradient, summed over micro-batches and ranks, and divided.

    Attributes:
        planned: the batch and the plan it was run by.
        gradients: of each trainable parameter; None for one that no rank used.
        contributions: of each loss term to the loss, on the device.
        counts: of each loss term, on the device or the CPU.
        too_large: sizes of micro-batches that did not fit, in the order they were tried.
        noise: what the step says about the noise of its gradient; None where it was not measured.
    """

    planned: PlannedBatch
    gradients: Sequence[torch.Tensor | None]
    contributions: Float[Tensor, " terms"]
    counts: Float[Tensor, " terms"]
    too_large: tuple[int, ...]
    noise: NoiseOfStep | None


class StepRunner:
    """Plans and runs effective batches until they fit.

    Args:
        planner: cuts a batch with the sizes of the moment.
        executor: runs the micro-batches of a plan.
        context: what the loop uses.
        guard: keeps gradients apart from those of others.
        buffers: updates what the user has chosen once per effective batch.
        watch: sees what else a forward updates.
        world: the ranks.
        retry: makes a step ready to be run again.
        notifier: reports phases.
        meaning: what this rank means by a step, for the other ranks to compare.
        noise: measures the gradient's noise; None for nothing.
        masked: looks for parameters that only micro-batches without a count reach.
        can_leave: whether a rank can leave in the middle of a step, and tell the others.

    Attributes:
        is_running: whether micro-batches run.
    """

    def __init__(
        self,
        planner: StepPlanner,
        executor: Executor,
        context: LoopContext,
        guard: StepGuard,
        *,
        buffers: BufferUpdates,
        watch: StateWatch,
        world: World,
        retry: OomRetry,
        notifier: Notifier,
        meaning: StepMeaning,
        noise: NoiseMeter | None,
        masked: MaskedParameters,
        can_leave: bool,
    ) -> None:
        self._planner = planner
        self._execute = executor
        self._context = context
        self._guard = guard
        self._buffers = buffers
        self._watch = watch
        self._retry = retry
        self._world = world
        self._notifier = notifier
        self._meaning = meaning
        self._noise = noise
        self._masked = masked
        self._can_leave = can_leave and world.roll_call is not None
        self._owes_step = False
        self.is_running = False

    def run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        """Return the gradient of an effective batch, run in the first cut that fits on every rank.

        Args:
            batch: what `Engine.step` takes.
            step: its number.
            progress: in its data set.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            ParameterError: other parameters are trainable than before.
            MemoryExhaustedError: no cut fits, or the ranks cannot repeat this step.
            RankFailedError: another rank failed first; all ranks have left the step.
            RanksDifferError: ranks do not mean the same step.
            ReplicaError: weights have come to differ between ranks.
        """
        roll_call = self._world.roll_call
        num_told = 0 if roll_call is None else roll_call.num_told
        self._execute.begin_step()
        self.is_running = True
        try:
            with self._guard.begin_step():
                summed = self._run(batch, step, progress)
            self._guard.end_step()
        except StepFailedError:
            raise self._world.error_of_failed_rank() from None
        except StepsDifferError as error:
            self._meaning.refuse(error.differing)
        except BaseException as error:
            # Neither what all ranks know already, nor behind the last message, for which nobody waits any more.
            is_known = isinstance(error, WorldError) or (roll_call is not None and roll_call.num_told != num_told)
            if self._owes_step and roll_call is not None and not is_known and not roll_call.has_agreed:
                self._leave(error, step)
            raise
        finally:
            self.is_running = False
        return summed

    def _run(self, batch: Any, step: int, progress: DataProgress) -> SummedBatch:  # noqa: ANN401 (any nested batch)
        # What only the first batches send, nobody else can send for a rank that has failed.
        self._owes_step = self._can_leave and self._planner.is_steady(step, progress)
        self._planner.settle_sizes(batch, progress.position)
        # Buffers as they are now are what every further try has to begin from.
        self._retry.begin_step(step)
        inputs = InputVersions(batch)
        too_large: tuple[int, ...] = ()
        while True:
            counted = self._plan(batch, step, progress, check_loss=not too_large)
            self._owes_step = self._can_leave
            self._meaning.note(counted.planned, step)
            outcome = self._attempt(counted, step, too_large)
            if isinstance(outcome, SummedBatch):
                self._buffers.pool()
                self._planner.after_step(counted.planned.plan)
                return outcome
            plan = counted.planned.plan
            del counted  # with all that it has loaded
            too_large += (self._retry.retry_smaller_or_raise(outcome, plan, step, too_large),)
            # Behind the abort: only now does no rank wait for another one any more.
            inputs.refuse_changed(step, self._world)

    def _plan(self, batch: Any, step: int, progress: DataProgress, *, check_loss: bool) -> CountedBatch:  # noqa: ANN401
        """Plan a step; what is loaded for that may be too much already."""
        try:
            return self._planner.plan(batch, step, progress, check_loss=check_loss)
        except torch.OutOfMemoryError as error:
            notes = [note.removeprefix("anybatch: ").rstrip(".") for note in getattr(error, "__notes__", ())]
            said = f"{error}{_place_of(error)}{''.join(f' ({note})' for note in notes)}"
            release_frames(error)
            raise self._retry.too_large_to_plan(said, step) from None

    def _leave(self, error: BaseException, step: int) -> None:
        """Serve what the other ranks wait in, so that all of them leave this step, and the next one begins together."""
        # First, since they ask for it as soon as they have been told.
        self._world.publish_failure(refused_in_backward(error) or error, step)
        # Where it is too late for that, they find it when they look around.
        with suppress(AnyBatchError, RuntimeError):
            self._execute.abort(failed=True)

    def _attempt(self, counted: CountedBatch, step: int, too_large: tuple[int, ...]) -> SummedBatch | OutOfMemory:
        """Add gradients up over micro-batches and ranks, and divide; all that may run out of memory is in here."""
        phase: PhaseName = "forward_backward"
        loss, device = self._context.loss, self._world.device
        try:
            self._notifier.begin_step(step, counted)
            with self._context.randomness:
                self._context.strategy.place_gradients()
                counts = _as_tensor(counted.divisors, widest_dtype(device))
                late = self._late_division(counted.divisors[0]) if loss.kind.brings_count else None
                plan = counted.planned.plan
                watched, pooled = self._watch.effective_batch(plan), self._buffers.effective_batch()
                measured = nullcontext() if self._noise is None else self._noise.effective_batch(step, plan)
                with watched, pooled, measured, self._notifier.phase(phase):
                    sums = self._execute(counted)
            phase = "reduce"
            with self._world.collective(), self._notifier.phase(phase):
                gradients, totals = self._context.strategy.finish_gradients(self._numbers(sums))
                self._notifier.reduced()
        # Another rank ran out of memory and has told all of them through the last message of the step.
        except StepAbortedError as error:
            release_frames(error)
            return OutOfMemory()
        except torch.OutOfMemoryError as error:
            failed = OutOfMemory(phase, f"{error}{_place_of(error)}")
            release_frames(error)
            return failed  # outside of this function the failed frames, and all their tensors, are freed
        if self._world.roll_call is None and all(gradient is None for gradient in gradients):
            raise without_graph()  # every micro-batch has returned a constant zero
        if self._masked.looks_left and counted.left_out is not None:
            self._masked.look(counted.left_out, gradients)
        totals, further = (totals, None) if self._noise is None else totals.tensor_split([-self._noise.num_numbers])
        # The count was known only once all losses had been computed: gradients were divided by a guess so far.
        if late is not None:
            totals, counts = late.divide([gradient for gradient in gradients if gradient is not None], totals)
        noise = None
        if self._noise is not None and further is not None:
            guess = counted.divisors[0] if loss.kind.brings_count else None
            noise = self._noise.finish(gradients, further, counts, plan, guess=guess)
        return SummedBatch(
            planned=counted.planned,
            gradients=gradients,
            contributions=totals,
            counts=counts,
            too_large=too_large,
            noise=noise,
        )

    def _numbers(self, sums: Sums) -> Float[Tensor, " numbers"]:
        """Return what ranks have to sum beside the gradients."""
        loss = self._context.loss
        totals = sums.totals(loss, self._world.device)
        if self._noise is None:
            return totals
        return torch.cat([totals, self._noise.numbers(sums, is_late=loss.kind.brings_count)])

    def _late_division(self, guess: float) -> LateDivision:
        parameter = next(iter(self._context.prepared.parameters.values()))
        dtype = accumulation_dtype(parameter)
        # Real, so that it also divides real gradients next to complex ones.
        return LateDivision(guess, self._world.device, dtype.to_real())


def _as_tensor(numbers: tuple[float, ...], dtype: torch.dtype) -> Float[Tensor, " terms"]:
    if len(numbers) == 1:  # asks torch for a fifth of the time of a tensor of any numbers
        return torch.full((1,), numbers[0], dtype=dtype)
    return torch.tensor(numbers, dtype=dtype)


def _place_of(error: BaseException) -> str:
    """Return where in the user's code an error was raised, ` (in model.py, line 12, in forward)`; empty if nowhere.

    The frames themselves cannot be kept: their tensors are what has to be freed.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("anybatch", "torch"):
            place = f" (in {frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"
    return place
