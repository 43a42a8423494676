"""From a summed gradient to new parameters: unscale, measure, clip, update, clear; once per effective batch."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.records import PhaseName
from anybatch.engine.checkpoint_state import Scheduler
from anybatch.engine.step_state import StepState
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.engine.update.clipping import ClipByNorm, ClipPolicy, clip_gradients
from anybatch.engine.update.finite_check import FiniteCheck
from anybatch.engine.update.optimizer_state import OptimizerStateMemory
from anybatch.engine.update.precision import LossScaler, Target
from anybatch.engine.update.resident_tensors import ResidentMemory
from anybatch.engine.update.schedule import SchedulerFunction, StepCounter, at_rate, scheduler_of
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.errors import DoesNotFitError, HalfUpdatedError, NonFiniteError, UpdateFailedError
from anybatch.parallel.strategy import ParameterLayout, UpdateSharding

_NOTHING = nullcontext()
_INTERRUPTED = "interrupted before the step was counted"
Gradients = Sequence[torch.Tensor | None]
"""The summed gradient of each trainable parameter; None for one that no rank used."""


class Updated(NamedTuple):
    """One update.

    Attributes:
        gradient_norm: from before clipping, on the device; None where it was not measured.
        learning_rates: of each parameter group, as the update used them.
        skipped: whether fp16 gradients had overflowed, or a spike watch left out what was not finite: parameters,
            buffers and optimizer have not changed.
    """

    gradient_norm: Float[Tensor, ""] | None
    learning_rates: tuple[float, ...]
    skipped: bool


class Updater:
    """Updates parameters from summed gradients.

    Args:
        target: the optimizer, what it updates, and how gradients get there.
        scaler: fp16's gradient scaler, or nothing.
        clip: the clipping policy; None clips nothing.
        measures_norm: measure the gradient's norm also where nothing is clipped by it.
        layout: how gradients lie on the ranks.
        state: buffers and generators from before the step, restored unless the update is made.
        finite: looks for a loss or gradient that is not finite.
        average: averaged weights; None for none.
        scheduler: stepped once per update; None for none.
        optimizer_memory: the optimizer's state, which is made before the first step.
        update_statistics: called after each update, for running statistics of layers.
        run_hooks: runs the user's hooks on parameters on the summed gradients, in place.
        clear: clears gradients.
        sharding: how the optimizer's step is shared out over ranks; None if every rank makes all of it.
        resident: what stays in memory from step to step, for errors.
        notifier: reports phases.

    Attributes:
        rate_factor: what every learning rate is multiplied by, on top of the schedule; a spike watch lowers it.
        skips_non_finite: leave an update out whose loss or gradient is not finite, instead of raising.
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
        update_statistics: Callable[[], None],
        run_hooks: Callable[[Gradients], None],
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
        self._optimizer_memory = optimizer_memory
        self.sharding = sharding
        self._update_statistics = update_statistics
        self._run_hooks = run_hooks
        self._clear = clear
        self.resident = resident
        self._notifier = notifier
        self._broken_off = ""
        self._step = 0
        self.rate_factor = 1.0
        self.skips_non_finite = False

    def allocate(self) -> None:
        """Make the optimizer's state and room for its step, once, before the first micro-batch.

        Raises:
            DoesNotFitError: on a rank without room; nothing has been changed.
            RankFailedError: on the others.
        """
        self._optimizer_memory.allocate()

    def update(self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int) -> Updated:
        """Make one update and clear the gradients.

        Args:
            gradients: summed over micro-batches and ranks, and divided.
            contributions: of each term to the loss, on the device; their sum is looked at for NaN.
            step: its number.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite.
            DoesNotFitError: memory ran out before the update; parameters are as before.
            HalfUpdatedError: memory ran out inside the update.

        Whatever else the optimizer raises goes through; see `refuse_broken_off`.
        """
        # Those of a step that is left out are reported as well.
        rates = tuple([group["lr"] for group in self.target.optimizer.param_groups])
        if self.rate_factor != 1.0:
            rates = tuple(rate * self.rate_factor for rate in rates)
        try:
            with self._notifier.phase("clip"):
                norm = self._clipped(gradients, contributions, step)
        except NonFiniteError:
            if not self.skips_non_finite:
                raise
            self._clear_gradients()
            self.state.skip()
            return Updated(contributions.new_tensor(math.inf), rates, skipped=True)
        except torch.OutOfMemoryError as error:
            said = f"{_out_of_memory('clip', step, error)} Parameters and optimizer are as before the step."
            message = f"{said} {self.resident.remedy()}"
            raise DoesNotFitError(message, step=step, phase="clip") from error
        self._step = step
        self._broken_off = _INTERRUPTED
        try:
            with self._notifier.phase("update"):
                with _NOTHING if self.rate_factor == 1.0 else at_rate(self.target.optimizer, self.rate_factor):
                    stepped = self._stepped(gradients)
                if stepped:
                    self._update_statistics()
                    self.state.release()
                else:
                    self.state.skip()
        except NonFiniteError:  # gradients have overflowed, and nothing was updated
            self._broken_off = ""
            raise
        except torch.OutOfMemoryError as error:
            message = (
                f"{_out_of_memory('update', step, error)} The update was under way, so parameters and optimizer may be "
                "half updated, and running on would train on with them. Go back to the last checkpoint (engine.load). "
                f"{self.resident.remedy(in_update=True)}"
            )
            self._broken_off = _first_line(error)
            raise HalfUpdatedError(message, step=step, phase="update") from error
        except BaseException as error:
            self._broken_off = _first_line(error)
            error.add_note(
                f"anybatch: the update of step {step} was under way, so parameters and optimizer may be half updated. "
                "The engine makes no further step before engine.load."
            )
            raise
        return Updated(norm, rates, skipped=not stepped)

    def advance_schedule(self, updated: Updated) -> None:
        """Step the scheduler behind an update that is counted already: what it raises leaves nothing half-done."""
        if self.scheduler is None or updated.skipped:
            return
        try:
            warning = self.scheduled.step(self.scheduler)
        except Exception as error:
            error.add_note(
                f"anybatch: in {type(self.scheduler).__name__}.step, behind the update of step {self._step} (counted "
                "from 0), which stands and is counted. Is the schedule shorter than the run? engine.reschedule "
                "continues with another one."
            )
            raise
        if warning:
            self._notifier.warn("scheduler_stepped_twice", warning)

    def refuse_broken_off(self) -> None:
        """Refuse to go on behind an update that broke off.

        Raises:
            UpdateFailedError: with what broke it off.
        """
        if self._broken_off:
            message = (
                f"the update of step {self._step} (counted from 0) broke off ({self._broken_off}), so parameters and "
                "optimizer may be half updated, and going on would train on with them. Go back to the last checkpoint: "
                "engine.load, on every rank."
            )
            raise UpdateFailedError(message, step=self._step)

    def confirm(self) -> None:
        """Allow further steps: the last update is counted, or all state comes from a checkpoint or another rank."""
        self._broken_off = ""

    def reschedule(self, scheduler: SchedulerFunction) -> None:
        """Continue with another schedule; see `Engine.reschedule`."""
        self.scheduler = scheduler_of(scheduler, self.target.optimizer)
        self.scheduled.forget()

    def undo(self) -> None:
        """Restore the state from before an unfinished step: gradients, loss scaling, buffers, generators.

        Optimizer state that no update has used yet is dropped. After a finished step only gradients are cleared.
        """
        self._clear_gradients()
        self.scaler.forget_gradients()
        self._optimizer_memory.undo()
        self.state.restore()
        self.state.release()

    def _clear_gradients(self) -> None:
        self._clear()
        self.target.detach()

    def _clipped(
        self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int
    ) -> Float[Tensor, ""] | None:
        """Unscale, measure, look and clip; return the norm from before clipping."""
        self.target.attach(gradients)
        # Before the norm is measured: limits are meant for the gradient without fp16's scale.
        self.scaler.unscale()
        self._run_hooks(gradients)
        norm = self._norm(gradients) if self._measures_norm else None
        if not self.scaler.enabled:  # overflow is common under fp16: the scaler skips the step
            self.finite.check(contributions, norm, step)
        if self._clip is not None:
            clip_gradients(gradients, norm, self._clip, self.target.in_groups, self._layout)
        # After clipping, so that the gradient is rounded once.
        self.target.cast(gradients)
        return norm

    def _norm(self, gradients: Gradients) -> Float[Tensor, ""] | None:
        present = [gradient for gradient in gradients if gradient is not None]
        return self._layout.norm(present) if present else None

    def _stepped(self, gradients: Gradients) -> bool:
        """Step optimizer and average, unless fp16 has overflowed; return whether they stepped."""
        # The optimizer makes no state for a parameter without a gradient; what was made ahead for it goes.
        self._optimizer_memory.drop_unused(gradients)
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
            self.target.copy_back()
            if self.average is not None:
                self.average.update()
        self._clear_gradients()
        return stepped


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _out_of_memory(phase: PhaseName, step: int, error: torch.OutOfMemoryError) -> str:
    first_line = str(error).partition("\n")[0]
    return f"out of memory in phase {phase!r} of step {step} (counted from 0): {first_line}"
