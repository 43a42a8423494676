"""Update parameters from a summed gradient, once per effective batch: unscale, measure, clip, step, clear."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.geometry import require
from anybatch.core.records import PhaseName
from anybatch.core.torch_internals import BufferKeeper, change_each, dense_values
from anybatch.engine.notifier import Notifier
from anybatch.engine.optimizer_memory import OptimizerStateMemory, ResidentMemory
from anybatch.engine.precision import LossScaler, UpdateTarget
from anybatch.engine.schedule import Scheduler, SchedulerFunction, StepCounter, WeightAverage, scale_rates, scheduler_of
from anybatch.engine.step_guard import StepGuard
from anybatch.errors import DoesNotFitError, HalfUpdatedError, NonFiniteError, UpdateFailedError
from anybatch.parallel.strategy import ParameterLayout, UpdateSharding


class StepState:
    """A copy of buffers and generators from before the current step.

    They are restored whenever a step does not finish: after an out-of-memory error, an exception, a loss that is not
    finite, another rank's failure, Ctrl-C. Gradients are cleared elsewhere; parameters and optimizer do not change
    before the update. Python objects that the loss changes are not restored, since other threads may use them.
    """

    def __init__(self, buffers: BufferKeeper, generators: Sequence[torch.Generator]) -> None:
        self._buffers = buffers
        self._generators = generators
        self._states: list[torch.Tensor] = []
        self._is_kept = False

    def keep(self) -> None:
        """Copy the state at the beginning of a step, into the memory of the last copy."""
        self._is_kept = False  # until the copy is complete
        self._buffers.keep()
        self._states = [generator.get_state() for generator in self._generators]
        self._is_kept = True

    def restore(self) -> None:
        """Restore the copy (any number of times); a no-op if the step has ended or not begun."""
        if self._is_kept:
            self._buffers.restore()
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)

    def restore_buffers(self) -> None:
        """Restore only the copy of the buffers."""
        if self._is_kept:
            self._buffers.restore()

    def skip(self) -> None:
        """End the step without an update: restore buffers, but not generators, since its samples count as used."""
        if self._is_kept:
            self._buffers.restore()
            self._is_kept = False

    def release(self) -> None:
        """End the step and discard the copy."""
        self._is_kept = False


def check_clip(clip: object) -> None:
    """Raise a `UserError` unless `clip` is a maximum gradient norm, or None."""
    # Infinity is valid: it clips nothing, and measures the norm.
    is_valid = isinstance(clip, (int, float)) and not isinstance(clip, bool) and clip > 0
    require(clip is None or is_valid, "clip", clip, "the maximum gradient norm, a number above 0, or None")


_MAX_NAMES = 4
_LossAndNorm = tuple[Float[Tensor, ""], Float[Tensor, ""] | None]


class HostCopy:
    """Numbers of an accelerator that are copied to the host in the background."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copy = numbers.detach().to("cpu", non_blocking=True)
        self._event = torch.Event(numbers.device)
        self._event.record()  # once this event has completed, so has the copy

    def read(self) -> torch.Tensor:
        """Return the numbers; wait for the copy, but not for later work of the device."""
        self._event.synchronize()
        return self._copy


class FiniteCheck:
    """Checks that loss and gradient norm are finite: on a CPU before the update, on an accelerator one step later.

    On an accelerator, reading a number makes the loop wait for the device. So the number is copied to the host in the
    background, and read before the *next* update; by then, the update of its own step has already run.
    """

    def __init__(self, device: torch.device, state: Callable[[], Sequence[str]] = tuple) -> None:
        self._is_cpu = device.type == "cpu"
        self._state = state
        self._pending: tuple[int, HostCopy, _LossAndNorm] | None = None

    def check(self, contributions: Float[Tensor, " terms"], norm: Float[Tensor, ""] | None, step: int) -> None:
        """Raise a `NonFiniteError` if this step, or on an accelerator the previous one, is not finite."""
        if self._is_cpu:  # nothing to wait for, and Python numbers are faster than torch here
            numbers = sum(contributions.tolist()) + (0.0 if norm is None else norm.item())
            if not math.isfinite(numbers):
                raise self._error(step, (contributions.sum(), norm), late=False)
            return
        self.settle()
        loss = contributions.sum()
        self._pending = (step, HostCopy(loss if norm is None else loss + norm), (loss.detach(), norm))

    def settle(self) -> None:
        """Check the previous step; called before the next update, before a checkpoint, and at the end of the run."""
        if self._pending is None:
            return
        step, copy, numbers = self._pending
        # Dropped before the check, so that the numbers of a step raise only one error.
        self._pending = None
        if not torch.isfinite(copy.read()):
            raise self._error(step, numbers, late=True)

    def _error(self, step: int, numbers: _LossAndNorm, *, late: bool) -> NonFiniteError:
        loss, norm = (None if number is None else number.item() for number in numbers)
        measured = "" if norm is None else f" and the gradient norm is {norm:.4g}"
        consequence = (
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
        message = (
            f"step {step} (counted from 0) is not finite: the loss is {loss:.4g}{measured}. {consequence}. {cause}"
        )
        return NonFiniteError(message, step=step, updated=late)


_NOTHING = nullcontext()
_INTERRUPTED = "interrupted before the step was counted"
Gradients = Sequence[torch.Tensor | None]
"""The summed gradient of each trainable parameter; None for a parameter that no rank used."""


class Updated(NamedTuple):
    """The result of an update."""

    gradient_norm: Float[Tensor, ""] | None
    learning_rates: tuple[float, ...]
    skipped: bool


@dataclass(kw_only=True, eq=False)
class Updater:
    """Updates parameters from summed gradients."""

    target: UpdateTarget
    scaler: LossScaler
    clip: float | None
    measures_norm: bool
    layout: ParameterLayout
    state: StepState
    finite: FiniteCheck
    average: WeightAverage | None
    scheduler: Scheduler | None
    optimizer_memory: OptimizerStateMemory
    sharding: UpdateSharding | None
    after_update: tuple[Callable[[], None], ...]
    hooks: StepGuard
    clear: Callable[[], None]
    resident: ResidentMemory
    notifier: Notifier
    scheduled: StepCounter = field(default_factory=StepCounter, init=False)
    interrupted_by: str = field(default="", init=False)  # the error that interrupted the last update; "" for none
    rate_factor: float = field(default=1.0, init=False)  # factor of all learning rates, in addition to the schedule
    skips_non_finite: bool = field(default=False, init=False)  # skip an update with NaN or infinity, without an error
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.measures_norm = self.measures_norm or self.clip is not None
        self._has_masters = self.target.update == "master_weights"
        self._casts = self.target.update == "cast"

    def update(self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int) -> Updated:
        """Update the parameters once and clear the gradients; after an error of the optimizer, refuse more updates."""
        # Before the update, since the rates of a skipped step are reported as well.
        rates = tuple([group["lr"] for group in self.target.optimizer.param_groups])
        if self.rate_factor != 1.0:
            rates = tuple(rate * self.rate_factor for rate in rates)
        try:
            with self.notifier.phase("clip") if self.notifier.observers else _NOTHING:
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
        self.interrupted_by = _INTERRUPTED
        try:
            with self.notifier.phase("update") if self.notifier.observers else _NOTHING:
                with _NOTHING if self.rate_factor == 1.0 else scale_rates(self.target.optimizer, self.rate_factor):
                    stepped = self._stepped(gradients)
                if stepped:
                    for update in self.after_update:
                        update()
                    self.state.release()
                else:
                    self.state.skip()
        except NonFiniteError:  # gradients overflowed, and nothing was updated
            self.interrupted_by = ""
            raise
        except torch.OutOfMemoryError as error:
            message = (
                f"{_out_of_memory('update', step, error)} The update had started, so parameters and optimizer may be "
                "half updated. Go back to the last checkpoint (engine.load). "
                f"{self.resident.remedy(in_update=True)}"
            )
            self.interrupted_by = _first_line(error)
            raise HalfUpdatedError(message, step=step, phase="update") from error
        except BaseException as error:
            self.interrupted_by = _first_line(error)
            error.add_note(
                f"anybatch: the update of step {step} had started, so parameters and optimizer may be half updated. "
                "The engine refuses further steps until engine.load."
            )
            raise
        return Updated(norm, rates, skipped=not stepped)

    def advance_schedule(self, updated: Updated) -> None:
        """Step the scheduler. Call this after the update has been counted, so that an error leaves no partial state."""
        if self.scheduler is None or updated.skipped:
            return
        try:
            warning = self.scheduled.step(self.scheduler)
        except Exception as error:
            error.add_note(
                f"anybatch: in {type(self.scheduler).__name__}.step, after the update of step {self._step} (counted "
                "from 0), which is complete. Is the schedule shorter than the run? engine.reschedule continues with "
                "another schedule."
            )
            raise
        if warning:
            self.notifier.warn("scheduler_stepped_twice", warning)

    def check_not_interrupted(self) -> None:
        """Raise an `UpdateFailedError` if the last update failed midway."""
        if self.interrupted_by:
            message = (
                f"the update of step {self._step} (counted from 0) failed midway ({self.interrupted_by}). Parameters "
                "and optimizer may be half updated. Go back to the last checkpoint: call engine.load on every rank."
            )
            raise UpdateFailedError(message, step=self._step)

    def reschedule(self, scheduler: SchedulerFunction) -> None:
        """Continue with another schedule; see `Engine.reschedule`."""
        self.scheduler = scheduler_of(scheduler, self.target.optimizer)
        self.scheduled.forget()

    def undo(self) -> None:
        """Restore the state from before an unfinished step: gradients, loss scaling, buffers, generators.

        Also drop optimizer state that no update has used yet. After a finished step, only clear gradients.
        """
        self._clear_gradients()
        self.scaler.forget_gradients()
        self.optimizer_memory.undo()
        self.state.restore()
        self.state.release()

    def _clear_gradients(self) -> None:
        self.clear()
        if self._has_masters:
            self.target.detach()

    def _clipped(
        self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int
    ) -> Float[Tensor, ""] | None:
        """Unscale, measure, check and clip; return the norm before clipping."""
        if self._has_masters:
            self.target.attach(gradients)
        # Unscale before measuring the norm, because `clip` applies to gradients without fp16's loss scale.
        if self.scaler.enabled:
            self.scaler.unscale()
        if self.hooks.may_have_hooks:
            self.hooks.run_hooks(gradients)
        present = [gradient for gradient in gradients if gradient is not None] if self.measures_norm else []
        norm = self.layout.norm(present) if present else None
        if not self.scaler.enabled:  # overflow is common under fp16: the scaler skips the step
            self.finite.check(contributions, norm, step)
        if self.clip is not None and norm is not None:
            self._clip(present, norm, self.clip)
        # After clipping, so that the gradient is rounded once.
        if self._casts:
            self.target.cast(gradients)
        return norm

    @torch.no_grad()
    def _clip(self, gradients: Sequence[torch.Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
        """Scale all gradients down together, in place, so that their 2-norm is at most `max_norm`.

        Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.
        """
        # Like torch.nn.utils.clip_grad_norm_, including 1e-6. Small gradients are multiplied by 1, so that the host
        # need not wait for the norm.
        values = [dense_values(self.layout.local(gradient)) for gradient in gradients]
        change_each("mul", values, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _stepped(self, gradients: Gradients) -> bool:
        """Step optimizer and average, unless fp16 gradients overflowed; return whether they stepped."""
        # Drop state created in advance for parameters without a gradient, for which the optimizer creates none.
        if self.optimizer_memory.unused:
            self.optimizer_memory.drop_unused(gradients)
        stepped = True
        with _NOTHING if self.sharding is None else self.sharding.only_own_parameters():
            if self.target.windows is not None:
                self.target.windows.step(self.target.optimizer, gradients, self._step)
            elif self.scaler.enabled:
                stepped = self.scaler.step()
            else:
                self.target.optimizer.step()
        if self.sharding is not None:
            self.sharding.exchange()
        if stepped:
            if self._has_masters:
                self.target.copy_back()
            if self.average is not None:
                self.average.update()
        self.clear()
        if self._has_masters:
            self.target.detach()
        return stepped


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _out_of_memory(phase: PhaseName, step: int, error: torch.OutOfMemoryError) -> str:
    first_line = str(error).partition("\n")[0]
    return f"out of memory in phase {phase!r} of step {step} (counted from 0): {first_line}"
