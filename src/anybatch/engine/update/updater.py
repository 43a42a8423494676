"""From a summed gradient to new parameters: unscale, measure, clip, update, clear; once per effective batch."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.records import PhaseName
from anybatch.engine.notifier import Notifier
from anybatch.engine.step_state import StepState
from anybatch.engine.update.clipping import ClipByNorm, ClipPolicy, clip_gradients
from anybatch.engine.update.optimizer_state import OptimizerStateMemory
from anybatch.engine.update.precision import LossScaler, Target
from anybatch.engine.update.resident_tensors import ResidentMemory
from anybatch.engine.update.schedule import Scheduler, SchedulerFunction, StepCounter, at_rate, scheduler_of
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.errors import DoesNotFitError, HalfUpdatedError, NonFiniteError, UpdateFailedError
from anybatch.parallel.strategy import ParameterLayout, UpdateSharding

_MAX_NAMES = 4
_Seen = tuple[Float[Tensor, ""], Float[Tensor, ""] | None]


class FiniteCheck:
    """Checks that loss and gradient norm are finite: on a CPU before the update, on an accelerator one step later.

    On an accelerator, reading a number makes the loop wait for the device. So it is copied to the host in the
    background and read before the *next* update, when the copy has finished; the update in between has been made.

    Args:
        device: device of the numbers.
        state: function () -> names of weights and buffers that were not finite before the step.
    """

    def __init__(self, device: torch.device, state: Callable[[], Sequence[str]] = tuple) -> None:
        self._device, self._is_cpu = device, device.type == "cpu"
        self._state = state
        self._pending: tuple[int, torch.Tensor, torch.Event, _Seen] | None = None

    def check(self, contributions: Float[Tensor, " terms"], norm: Float[Tensor, ""] | None, step: int) -> None:
        """Raise a `NonFiniteError` if this step, or on an accelerator the previous one, is not finite.

        Args:
            contributions: contribution of each term to the loss.
            norm: the gradient norm, if measured.
            step: number of the step.
        """
        if self._is_cpu:  # nothing to wait for, and Python numbers are faster than torch here
            numbers = sum(contributions.tolist()) + (0.0 if norm is None else norm.item())
            if not math.isfinite(numbers):
                raise self._error(step, (contributions.sum(), norm), late=False)
            return
        self.settle()
        loss = contributions.sum()
        copy = (loss if norm is None else loss + norm).detach().to("cpu", non_blocking=True)
        event = torch.Event(self._device)
        event.record()  # the copy is complete once this event is
        self._pending = (step, copy, event, (loss.detach(), norm))

    def settle(self) -> None:
        """Check pending numbers: before the next update, a checkpoint or the end of the run."""
        if self._pending is None:
            return
        step, copy, event, seen = self._pending
        # Dropped before the check, so that a number raises only once.
        self._pending = None
        event.synchronize()
        if not torch.isfinite(copy):
            raise self._error(step, seen, late=True)

    def _error(self, step: int, seen: _Seen, *, late: bool) -> NonFiniteError:
        loss, norm = (None if number is None else number.item() for number in seen)
        measured = "" if norm is None else f" and the gradient norm is {norm:.4g}"
        happened = (
            "This was detected in the next step, after the update: go back to a checkpoint"
            if late
            else "The update was skipped: parameters and optimizer are unchanged"
        )
        names = () if late else self._state()
        cause = (
            f"Already not finite before the step: {', '.join(map(repr, names[:_MAX_NAMES]))}"
            f"{f' and {len(names) - _MAX_NAMES} more' if len(names) > _MAX_NAMES else ''}."
            if names
            else "Check for a learning rate that is too high, samples with NaN or infinity, or a loss that divides by "
            "zero; clip=1.0 helps against spikes."
        )
        message = f"step {step} (counted from 0) is not finite: the loss is {loss:.4g}{measured}. {happened}. {cause}"
        return NonFiniteError(message, step=step, updated=late)


_NOTHING = nullcontext()
_INTERRUPTED = "interrupted before the step was counted"
Gradients = Sequence[torch.Tensor | None]
"""The summed gradient of each trainable parameter; None for a parameter that no rank used."""


class Hooks(Protocol):
    """The user's hooks on parameters.

    Attributes:
        may_run: whether this rank has hooks, or another rank may have some.
    """

    may_run: bool

    def run_hooks(self, gradients: Gradients) -> None:
        """Run the hooks on the summed gradients, in place."""
        ...


class Updated(NamedTuple):
    """The result of an update.

    Attributes:
        gradient_norm: norm before clipping, on the device; None if not measured.
        learning_rates: learning rate of each parameter group in this update.
        skipped: whether the update was skipped, because fp16 gradients overflowed or a spike watch skipped a step that
            is not finite; then parameters, buffers and optimizer are unchanged.
    """

    gradient_norm: Float[Tensor, ""] | None
    learning_rates: tuple[float, ...]
    skipped: bool


class Updater:
    """Updates parameters from summed gradients.

    Args:
        target: the optimizer and the tensors it updates.
        scaler: the gradient scaler under fp16, otherwise a no-op.
        clip: the clipping policy; None clips nothing.
        measures_norm: measure the gradient norm even if clipping does not need it.
        layout: distribution of gradients over ranks.
        state: buffers and generators from before the step, restored unless the update succeeds.
        finite: checks that loss and gradient are finite.
        average: averaged weights; None for none.
        scheduler: stepped once per update; None for none.
        optimizer_memory: allocates the optimizer's state before the first step.
        after_update: called after each update, for running statistics of layers and other buffers.
        hooks: the user's hooks on parameters, run on the summed gradients.
        clear: clears gradients.
        sharding: distribution of the optimizer's step over ranks; None if every rank updates everything.
        resident: the memory that a step always needs, for errors.
        notifier: reports phases.

    Attributes:
        broken_off: why the last update failed midway; empty if it did not.
        rate_factor: factor on every learning rate in addition to the schedule; a spike watch lowers it.
        skips_non_finite: skip the update instead of raising if loss or gradient are not finite.
    """

    def __init__(
        self,
        *,
        target: Target,
        scaler: LossScaler,
        clip: ClipPolicy | None,
        measures_norm: bool,
        layout: ParameterLayout,
        state: StepState,
        finite: FiniteCheck,
        average: WeightAverage | None,
        scheduler: Scheduler | None,
        optimizer_memory: OptimizerStateMemory,
        sharding: UpdateSharding | None,
        after_update: tuple[Callable[[], None], ...],
        hooks: Hooks,
        clear: Callable[[], None],
        resident: ResidentMemory,
        notifier: Notifier,
    ) -> None:
        self.target = target
        self.scaler = scaler
        self.average = average
        self.scheduler = scheduler
        self.scheduled = StepCounter()
        self.finite = finite
        self.state = state
        self._clip = clip
        self._measures_norm = measures_norm or isinstance(clip, ClipByNorm)
        self._layout = layout
        self.optimizer_memory = optimizer_memory
        self._has_masters = target.update == "master_weights"
        self._casts = target.update == "cast"
        self.sharding = sharding
        self._after_update = after_update
        self._hooks = hooks
        self._clear = clear
        self.resident = resident
        self._notifier = notifier
        self.broken_off = ""
        self._step = 0
        self.rate_factor = 1.0
        self.skips_non_finite = False

    def allocate(self) -> None:
        """Allocate the optimizer's state and temporary memory once, before the first micro-batch.

        Raises:
            DoesNotFitError: on a rank without enough memory; nothing has changed.
            RankFailedError: on the other ranks.
        """
        self.optimizer_memory.allocate()

    def update(self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int) -> Updated:
        """Make one update and clear the gradients.

        Args:
            gradients: summed over micro-batches and ranks, and divided.
            contributions: contribution of each term to the loss, on the device; their sum is checked for NaN.
            step: number of the step.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite.
            DoesNotFitError: memory ran out before the update; parameters are unchanged.
            HalfUpdatedError: memory ran out inside the update.

        Other errors of the optimizer propagate; see `refuse_broken_off`.
        """
        # The rates of a skipped step are reported as well.
        rates = tuple([group["lr"] for group in self.target.optimizer.param_groups])
        if self.rate_factor != 1.0:
            rates = tuple(rate * self.rate_factor for rate in rates)
        try:
            with self._notifier.phase("clip") if self._notifier.observers else _NOTHING:
                norm = self._clipped(gradients, contributions, step)
        except NonFiniteError:
            if not self.skips_non_finite:
                raise
            self._clear_gradients()
            self.state.skip()
            return Updated(contributions.new_tensor(math.inf), rates, skipped=True)
        except torch.OutOfMemoryError as error:
            what = f"{_out_of_memory('clip', step, error)} Parameters and optimizer are as before the step."
            message = f"{what} {self.resident.remedy()}"
            raise DoesNotFitError(message, step=step, phase="clip") from error
        self._step = step
        self.broken_off = _INTERRUPTED
        try:
            with self._notifier.phase("update") if self._notifier.observers else _NOTHING:
                with _NOTHING if self.rate_factor == 1.0 else at_rate(self.target.optimizer, self.rate_factor):
                    stepped = self._stepped(gradients)
                if stepped:
                    for update in self._after_update:
                        update()
                    self.state.release()
                else:
                    self.state.skip()
        except NonFiniteError:  # gradients overflowed, and nothing was updated
            self.broken_off = ""
            raise
        except torch.OutOfMemoryError as error:
            message = (
                f"{_out_of_memory('update', step, error)} The update had started, so parameters and optimizer may be "
                "half updated. Go back to the last checkpoint (engine.load). "
                f"{self.resident.remedy(in_update=True)}"
            )
            self.broken_off = _first_line(error)
            raise HalfUpdatedError(message, step=step, phase="update") from error
        except BaseException as error:
            self.broken_off = _first_line(error)
            error.add_note(
                f"anybatch: the update of step {step} had started, so parameters and optimizer may be half updated. "
                "The engine refuses further steps until engine.load."
            )
            raise
        return Updated(norm, rates, skipped=not stepped)

    def advance_schedule(self, updated: Updated) -> None:
        """Step the scheduler after the update is counted, so that an error leaves no partial state."""
        if self.scheduler is None or updated.skipped:
            return
        try:
            warning = self.scheduled.step(self.scheduler)
        except Exception as error:
            error.add_note(
                f"anybatch: in {type(self.scheduler).__name__}.step, after the update of step {self._step} (counted "
                "from 0), which is complete. Is the schedule shorter than the run? engine.reschedule continues with "
                "another one."
            )
            raise
        if warning:
            self._notifier.warn("scheduler_stepped_twice", warning)

    def refuse_broken_off(self) -> None:
        """Raise an `UpdateFailedError` if the last update failed midway."""
        if self.broken_off:
            message = (
                f"the update of step {self._step} (counted from 0) failed midway ({self.broken_off}). Parameters and "
                "optimizer may be half updated. Go back to the last checkpoint: call engine.load on every rank."
            )
            raise UpdateFailedError(message, step=self._step)

    def confirm(self) -> None:
        """Allow further steps, after the update was counted, or all state was loaded or received from another rank."""
        self.broken_off = ""

    def reschedule(self, scheduler: SchedulerFunction) -> None:
        """Continue with another schedule; see `Engine.reschedule`."""
        self.scheduler = scheduler_of(scheduler, self.target.optimizer)
        self.scheduled.forget()

    def undo(self) -> None:
        """Restore the state from before an unfinished step: gradients, loss scaling, buffers, generators.

        Drop optimizer state that no update has used yet. After a finished step, only clear gradients.
        """
        self._clear_gradients()
        self.scaler.forget_gradients()
        self.optimizer_memory.undo()
        self.state.restore()
        self.state.release()

    def _clear_gradients(self) -> None:
        self._clear()
        if self._has_masters:
            self.target.detach()

    def _clipped(
        self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int
    ) -> Float[Tensor, ""] | None:
        """Unscale, measure, check and clip; return the norm before clipping."""
        if self._has_masters:
            self.target.attach(gradients)
        # Before the norm is measured: limits apply to the gradient without fp16's scale.
        if self.scaler.enabled:
            self.scaler.unscale()
        if self._hooks.may_run:
            self._hooks.run_hooks(gradients)
        present = [gradient for gradient in gradients if gradient is not None] if self._measures_norm else []
        norm = self._layout.norm(present) if present else None
        if not self.scaler.enabled:  # overflow is common under fp16: the scaler skips the step
            self.finite.check(contributions, norm, step)
        if self._clip is not None:
            clip_gradients(gradients, norm, self._clip, self.target.in_groups, self._layout)
        # After clipping, so that the gradient is rounded once.
        if self._casts:
            self.target.cast(gradients)
        return norm

    def _stepped(self, gradients: Gradients) -> bool:
        """Step optimizer and average, unless fp16 gradients overflowed; return whether they stepped."""
        # The optimizer creates no state for parameters without a gradient, so drop the state created in advance.
        if self.optimizer_memory.made:
            self.optimizer_memory.drop_unused(gradients)
        if self.target.windows is not None:
            self.target.windows.step(self.target.optimizer, gradients, self._step)
            stepped = True
        elif self.sharding is None:
            stepped = self.scaler.step()
        else:
            with self.sharding.alone():
                stepped = self.scaler.step()
            self.sharding.exchange()
        if stepped:
            if self._has_masters:
                self.target.copy_back()
            if self.average is not None:
                self.average.update()
        self._clear()
        if self._has_masters:
            self.target.detach()
        return stepped


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _out_of_memory(phase: PhaseName, step: int, error: torch.OutOfMemoryError) -> str:
    first_line = str(error).partition("\n")[0]
    return f"out of memory in phase {phase!r} of step {step} (counted from 0): {first_line}"
