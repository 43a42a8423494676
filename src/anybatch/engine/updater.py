"""From a summed gradient to new parameters: unscale, measure, clip, update, clear; once per effective batch."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from anybatch.core.geometry import refuse_unless
from anybatch.core.records import PhaseName
from anybatch.core.tensors import BufferKeeper
from anybatch.core.torch_internals import clamp_each, dense_values, multiply_each
from anybatch.engine.notifier import Notifier
from anybatch.engine.optimizer_memory import OptimizerStateMemory, ResidentMemory
from anybatch.engine.precision import LossScaler, Target
from anybatch.engine.schedule import Scheduler, SchedulerFunction, StepCounter, WeightAverage, at_rate, scheduler_of
from anybatch.engine.step_guard import StepGuard
from anybatch.errors import DoesNotFitError, HalfUpdatedError, NonFiniteError, UpdateFailedError, UserError
from anybatch.parallel.strategy import ParameterLayout, UpdateSharding


class StepState:
    """A copy of buffers and generators from before the current step.

    Every way of leaving an unfinished step restores them: a retry after out of memory, an exception, a loss that is not
    finite, another rank's failure, Ctrl-C. Gradients are cleared elsewhere; parameters and optimizer do not change
    before the update.

    Python state that the loss reaches is not restored: other threads may change it at any time.
    """

    def __init__(self, buffers: BufferKeeper, generators: Sequence[torch.Generator]) -> None:
        self._buffers = buffers
        self._generators = generators
        self._states: list[torch.Tensor] = []
        self._is_kept = False

    def keep(self) -> None:
        """Copy the state at the beginning of a step, into the memory of the last copy."""
        self._is_kept = False  # while the copy is incomplete
        self._buffers.keep()
        self._states = [generator.get_state() for generator in self._generators]
        self._is_kept = True

    def restore(self) -> None:
        """Restore the copy, as often as needed; do nothing if the step has ended or not begun."""
        if self._is_kept:
            self._buffers.restore()
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)

    def restore_buffers(self) -> None:
        """Restore the copy of the buffers alone."""
        if self._is_kept:
            self._buffers.restore()

    def skip(self) -> None:
        """End the step without an update: restore buffers. Its samples count, so generators continue."""
        if self._is_kept:
            self._buffers.restore()
            self._is_kept = False

    def release(self) -> None:
        """End the step and discard the copy."""
        self._is_kept = False


@dataclass(frozen=True, slots=True)
class ClipByNorm:
    """Scale all gradients down together so that their 2-norm is at most `max_norm`.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _check_positive("max_norm", self.max_norm)


@dataclass(frozen=True, slots=True)
class ClipByValue:
    """Limit every gradient element to plus or minus `max_value`."""

    max_value: float

    def __post_init__(self) -> None:
        _check_positive("max_value", self.max_value)


Clip = ClipByNorm | ClipByValue


@dataclass(frozen=True, slots=True)
class ClipByGroup:
    """Clip each parameter group of the optimizer separately: `policies[j]` is for `optimizer.param_groups[j]`."""

    policies: tuple[Clip | None, ...]


ClipPolicy = Clip | ClipByGroup
ClipArgument = Clip | float | Sequence[Clip | float | None] | None


def clip_policy(clip: ClipArgument) -> ClipPolicy | None:
    """Return the policy; a plain number is the maximum norm, a sequence has one policy per parameter group."""
    if isinstance(clip, Sequence):
        return ClipByGroup(tuple(_policy_of_group(policy) for policy in clip))
    return _policy_of_group(clip)


def refuse_groups(clip: ClipPolicy | None, optimizer: Optimizer) -> None:
    """Raise a `UserError` if the number of policies is not the number of parameter groups."""
    if isinstance(clip, ClipByGroup) and len(clip.policies) != len(optimizer.param_groups):
        message = (
            f"clip has {len(clip.policies)} policies, one per parameter group, but the optimizer has "
            f"{len(optimizer.param_groups)} groups. Give one for each; None clips nothing."
        )
        raise UserError(message, code="clip_groups")


def clip_gradients(
    gradients: Sequence[torch.Tensor | None],
    norm: Float[Tensor, ""] | None,
    clip: ClipPolicy,
    in_groups: Callable[[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor]]],
    layout: ParameterLayout,
) -> None:
    """Clip in place. The plain loop: `for policy, group in zip(clip, optimizer.param_groups): clip_grad_norm_(...)`."""
    # Each group needs its norm; the norm of all gradients is not enough.
    if isinstance(clip, ClipByGroup):
        for policy, group in zip(clip.policies, in_groups(gradients), strict=True):
            if policy is not None and group:
                _clip(group, layout.norm(group) if isinstance(policy, ClipByNorm) else None, policy, layout)
        return
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        _clip(present, norm, clip, layout)


@torch.no_grad()
def _clip(
    gradients: Sequence[torch.Tensor], norm: Float[Tensor, ""] | None, clip: Clip, layout: ParameterLayout
) -> None:
    values = [dense_values(layout.local(gradient)) for gradient in gradients]
    if isinstance(clip, ClipByNorm):
        assert norm is not None
        # Like torch.nn.utils.clip_grad_norm_, including the small term. Without clipping the factor is 1, so that the
        # host need not wait for the norm.
        multiply_each(values, (clip.max_norm / (norm + 1e-6)).clamp(max=1.0))
    else:
        clamp_each(values, clip.max_value)


def _policy_of_group(clip: Clip | float | None) -> Clip | None:
    if clip is None or isinstance(clip, ClipByNorm | ClipByValue):
        return clip
    _check_positive("clip", clip)
    return ClipByNorm(float(clip))


def _check_positive(name: str, value: float) -> None:
    refuse_unless(_is_positive(value), name, value, "a number above 0, or None to clip nothing")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0  # infinity clips nothing


_MAX_NAMES = 4
_Seen = tuple[Float[Tensor, ""], Float[Tensor, ""] | None]


class FiniteCheck:
    """Checks that loss and gradient norm are finite: on a CPU before the update, on an accelerator one step later.

    On an accelerator, reading a number makes the loop wait for the device. So it is copied to the host in the
    background and read before the *next* update, when the copy has finished; the update in between has been made.
    """

    def __init__(self, device: torch.device, state: Callable[[], Sequence[str]] = tuple) -> None:
        self._device, self._is_cpu = device, device.type == "cpu"
        self._state = state
        self._pending: tuple[int, torch.Tensor, torch.Event, _Seen] | None = None

    def check(self, contributions: Float[Tensor, " terms"], norm: Float[Tensor, ""] | None, step: int) -> None:
        """Raise a `NonFiniteError` if this step, or on an accelerator the previous one, is not finite."""
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


class Updated(NamedTuple):
    """The result of an update."""

    gradient_norm: Float[Tensor, ""] | None
    learning_rates: tuple[float, ...]
    skipped: bool


@dataclass(kw_only=True, eq=False)
class Updater:
    """Updates parameters from summed gradients."""

    target: Target
    scaler: LossScaler
    clip: ClipPolicy | None
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
    broken_off: str = field(default="", init=False)  # why the last update failed midway
    rate_factor: float = field(default=1.0, init=False)  # of all learning rates, in addition to the schedule
    skips_non_finite: bool = field(default=False, init=False)  # skips such updates instead of raising
    _step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.measures_norm = self.measures_norm or isinstance(self.clip, ClipByNorm)
        self._has_masters = self.target.update == "master_weights"
        self._casts = self.target.update == "cast"

    def update(self, gradients: Gradients, contributions: Float[Tensor, " terms"], step: int) -> Updated:
        """Make one update and clear the gradients.

        Other errors of the optimizer propagate; see `refuse_broken_off`.
        """
        # The rates of a skipped step are reported as well.
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
        self.broken_off = _INTERRUPTED
        try:
            with self.notifier.phase("update") if self.notifier.observers else _NOTHING:
                with _NOTHING if self.rate_factor == 1.0 else at_rate(self.target.optimizer, self.rate_factor):
                    stepped = self._stepped(gradients)
                if stepped:
                    for update in self.after_update:
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
            self.notifier.warn("scheduler_stepped_twice", warning)

    def refuse_broken_off(self) -> None:
        """Raise an `UpdateFailedError` if the last update failed midway."""
        if self.broken_off:
            message = (
                f"the update of step {self._step} (counted from 0) failed midway ({self.broken_off}). Parameters and "
                "optimizer may be half updated. Go back to the last checkpoint: call engine.load on every rank."
            )
            raise UpdateFailedError(message, step=self._step)

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
        self.clear()
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
        if self.hooks.may_run:
            self.hooks.run_hooks(gradients)
        present = [gradient for gradient in gradients if gradient is not None] if self.measures_norm else []
        norm = self.layout.norm(present) if present else None
        if not self.scaler.enabled:  # overflow is common under fp16: the scaler skips the step
            self.finite.check(contributions, norm, step)
        if self.clip is not None:
            clip_gradients(gradients, norm, self.clip, self.target.in_groups, self.layout)
        # After clipping, so that the gradient is rounded once.
        if self._casts:
            self.target.cast(gradients)
        return norm

    def _stepped(self, gradients: Gradients) -> bool:
        """Step optimizer and average, unless fp16 gradients overflowed; return whether they stepped."""
        # The optimizer creates no state for parameters without a gradient, so drop the state created in advance.
        if self.optimizer_memory.made:
            self.optimizer_memory.drop_unused(gradients)
        stepped = True
        with _NOTHING if self.sharding is None else self.sharding.alone():
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
