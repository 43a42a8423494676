"""Reactions to a spike: warn, lower the learning rate, or roll back and warm up again."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import checked_int
from anybatch.core.records import StepReport
from anybatch.core.spikes import Spike, SpikeDetector, SpikeRule
from anybatch.engine.notifier import Notifier
from anybatch.engine.precision import Target
from anybatch.engine.schedule import WeightAverage
from anybatch.engine.updater import Updater
from anybatch.errors import UserError

SCHEDULED = frozenset(
    {"params", "lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "max_momentum", "base_momentum"}
)
"""Entries of parameter groups that schedules set; a roll-back does not restore them."""


class KeptState:
    """A copy of weights, buffers, optimizer state and averaged weights after a step.

    Step count, schedule and data position are not copied.
    """

    def __init__(
        self,
        step: int,
        modules: nn.Module,
        target: Target,
        average: WeightAverage | None,
        *,
        keep_on: Literal["device", "cpu"],
    ) -> None:
        self.step = step
        self.num_restored = 0
        self._optimizer = target.optimizer
        self._on = None if keep_on == "device" else torch.device("cpu")
        self._tensors = [(tensor, self._copied(tensor)) for tensor in _tensors(modules, target, average)]
        self._states = {parameter: self._copied(state) for parameter, state in self._optimizer.state.items()}
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in SCHEDULED}
            for group in self._optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; this can be repeated."""
        self.num_restored += 1
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        _restore_state(self._optimizer, self._states)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(kept))

    def _copied(self, value: Any) -> Any:  # noqa: ANN401 (any optimizer state)
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self._on is None else value.detach().to(self._on, copy=True)
        if isinstance(value, dict):
            return {name: self._copied(item) for name, item in value.items()}
        return copy.deepcopy(value)


def _tensors(modules: nn.Module, target: Target, average: WeightAverage | None) -> Iterable[torch.Tensor]:
    """Return the tensors that an update or a forward changes in place; frozen parameters are excluded."""
    tensors = [
        *(parameter for parameter in modules.parameters() if parameter.requires_grad),
        *modules.buffers(),
        *target.beside.values(),
        *(average.weights.values() if average is not None else ()),
    ]
    return {id(tensor): tensor for tensor in tensors}.values()  # tensors may be shared


def _restore_state(optimizer: Optimizer, kept: dict[Any, Any]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in kept:  # its state is newer than the copy
            del optimizer.state[parameter]
    for parameter, values in kept.items():
        now = optimizer.state[parameter]
        for name in set(now) - set(values):
            del now[name]
        for name, value in values.items():
            old = now.get(name)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)  # in place: captured graphs and sharded updates reference these tensors
            else:
                now[name] = copy.deepcopy(value)


Arrived = tuple[int, float, float | None]
"""Step, loss and gradient norm."""


class LateNumbers:
    """Copies the numbers of each step to the host without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[int, torch.Tensor, bool, torch.Event] | None = None

    def exchange(self, report: StepReport) -> Arrived | None:
        """Start copying a step's numbers, and return them on a CPU, or the previous step's on an accelerator.

        The host has already launched the whole current step, so the previous step's numbers have been computed.
        """
        loss, norm = report.contributions.sum(), report.gradient_norm
        if self._device.type == "cpu":
            return report.step, float(loss), None if norm is None else float(norm)
        arrived = self._collect()
        both = torch.stack((loss, loss if norm is None else norm.to(loss.dtype)))
        copy = both.detach().to("cpu", non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._pending = report.step, copy, norm is not None, event
        return arrived

    def drop(self) -> None:
        """Discard the pending numbers, after their step was undone."""
        self._pending = None

    def _collect(self) -> Arrived | None:
        if self._pending is None:
            return None
        step, copy, has_norm, event = self._pending
        self._pending = None
        event.synchronize()
        loss, norm = copy.tolist()
        return step, loss, norm if has_norm else None


SpikeAction = Literal["warn", "lower", "roll_back"]
_NUM_KEPT = 2
"""States in memory: if the run diverges again from the newer one, that one was copied too late."""
_MOST_RESTORED = 2
"""Restores of the newer state before the older one is used."""
_EPISODE_STEPS = 8
"""Spikes at most this many steps apart count as one."""
_MARGIN_STEPS = 4
"""Minimum steps between a state and the first visible step of a spike, which starts earlier than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeWatch:
    """Settings for the detection of spikes and the reaction. All ranks see the same numbers and act alike.

    A roll-back restores weights, buffers, optimizer state and averaged weights only. Step count, schedule and data
    continue, so the samples of the undone steps are skipped and no sample counts twice (as in Chowdhery et al. 2022,
    arXiv 2204.02311, section 5.1, which resumed after a spike with other data).

    The numbers of a step are checked after it on a CPU, and one step later on an accelerator, to avoid a wait for the
    device.

    Args:
        action: "warn" only warns; "lower" also multiplies the learning rate by `lower_to` permanently; "roll_back"
            restores an earlier state and warms the rate up again from near 0. A second spike within `relapse_steps`
            also multiplies the rate by `lower_to` permanently. "roll_back" also applies if a loss or gradient is not
            finite, which otherwise ends the run.
        rule: the thresholds for a spike.
        lower_to: factor for the learning rate, above 0 and at most 1; 1 never lowers it permanently.
        warm_up_steps: steps of the warm-up after a roll-back.
        relapse_steps: steps after a roll-back within which a second spike lowers the rate permanently.
        keep_every: steps between the states that a roll-back can restore; two are kept, and none is added during a
            spike.
        keep_on: "device", or "cpu" if the device has no room for two more copies of weights and optimizer state.
        folder: roll back to the newest checkpoint in this folder instead of a state in memory; the caller saves the
            checkpoints.
        most_actions: maximum number of times the rate is lowered; then the watch only warns, and a loss that is not
            finite ends the run.

    Raises:
        UserError: an argument is invalid.
    """

    action: SpikeAction = "warn"
    rule: SpikeRule = field(default_factory=SpikeRule)
    lower_to: float = 0.5
    warm_up_steps: int = 20
    relapse_steps: int = 100
    keep_every: int = 20
    keep_on: Literal["device", "cpu"] = "device"
    folder: str | Path | None = None
    most_actions: int = 10

    def __post_init__(self) -> None:
        """Check each argument."""
        for name, choices in (("action", get_args(SpikeAction)), ("keep_on", ("device", "cpu"))):
            if getattr(self, name) not in choices:
                message = f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}."
                raise UserError(message)
        if not 0.0 < self.lower_to <= 1.0:
            message = f"lower_to={self.lower_to!r} must be above 0 and at most 1."
            raise UserError(message)
        checked_int("warm_up_steps", self.warm_up_steps, least=0)
        checked_int("relapse_steps", self.relapse_steps, least=0)
        checked_int("keep_every", self.keep_every)
        checked_int("most_actions", self.most_actions)


def spike_watch(given: SpikeWatch | SpikeAction | None) -> SpikeWatch | None:
    """Return the argument of `Engine(spikes=...)` as a `SpikeWatch`; a bare action uses the defaults.

    Raises:
        UserError: the action is unknown.
    """
    if given is None or isinstance(given, SpikeWatch):
        return given
    return SpikeWatch(action=given)


@dataclass(eq=False, repr=False)
class SpikeGuard:
    """Watches the steps of an engine, and reacts to spikes."""

    watch: SpikeWatch
    _: KW_ONLY
    updater: Updater
    copied: Callable[[int], KeptState]  # function (step) -> a copy of the current state
    device: torch.device
    notifier: Notifier

    def __post_init__(self) -> None:
        self._numbers = LateNumbers(self.device)
        self._detector = SpikeDetector(self.watch.rule)
        self._kept: list[KeptState] = []
        self._last_kept = -self.watch.keep_every
        self._factor = 1.0
        self._warm_up_left = 0
        self._num_actions = 0
        self._last_spike: int | None = None
        self._last_rolled_back: int | None = None
        self._num_again = 0
        self._can_act = self.watch.action != "warn"
        # A roll-back can undo a step that is not finite, so its update is skipped instead of ending the run.
        self.updater.skips_non_finite = self.watch.action == "roll_back"

    def look(self, report: StepReport) -> Spike | None:
        """Return the spike in the numbers that have just arrived, or None; call it after every step."""
        self._advance_warm_up()
        # Under fp16 an overflow is normal: the scaler skips the update.
        if report.skipped and self.updater.scaler.enabled:
            return None
        arrived = self._numbers.exchange(report)
        return None if arrived is None else self._detector.look(*arrived)

    def should_copy(self, step: int) -> bool:
        """Return whether to copy the state after this step."""
        watch = self.watch
        is_due = self._can_act and watch.action == "roll_back" and watch.folder is None
        return is_due and step >= self._last_kept + watch.keep_every and self._detector.is_calm

    def keep(self, step: int) -> None:
        """Copy the current state, and drop all older ones but the newest."""
        self._last_kept = step
        del self._kept[: -(_NUM_KEPT - 1)]
        self._kept.append(self.copied(step))

    def act(self, spike: Spike, step: int, load: Callable[[Path], Path]) -> None:
        """Report a spike and react to it."""
        # Spikes in close succession count as one: one report, and the rate is lowered once.
        is_again = self._last_spike is not None and step - self._last_spike <= _EPISODE_STEPS
        self._last_spike = step
        self._num_again = self._num_again + 1 if is_again else 0
        if not is_again or self._num_again > self.watch.rule.window:
            self._num_again = 0
            self._report(spike, step)
        if self._can_act and self.watch.action == "roll_back":
            self._roll_back(spike, step, load)
        if self._can_act:
            self._detector.begin_again()

    def _report(self, spike: Spike, step: int) -> None:
        """Report a spike and lower the rate, up to `most_actions` times."""
        if self._can_act and self._num_actions >= self.watch.most_actions:
            self._can_act = self.updater.skips_non_finite = False
            self.notifier.spike(
                "spike_watch_gave_up",
                f"{spike}, although the learning rate was lowered {self._num_actions} times, to {self._factor:.3g} of "
                "its original value. From now on the watch only warns.",
                step,
            )
            return
        self.notifier.spike("spike", f"{spike}.", step)
        last = self._last_rolled_back
        is_first = self.watch.action == "roll_back" and (last is None or step - last > self.watch.relapse_steps)
        if not self._can_act or is_first:
            return
        self._num_actions += 1
        if self.watch.lower_to < 1.0:
            self._factor *= self.watch.lower_to
            self._set_factor()
            words = f"the learning rate is {self._factor:.3g} of what it was, from step {step + 1} on"
            self.notifier.diagnosis("rate_lowered", words, "warning", step=step)

    def _roll_back(self, spike: Spike, step: int, load: Callable[[Path], Path]) -> None:
        if self.watch.folder is not None:
            words = f"rolled back to {load(Path(self.watch.folder))}; data, schedule and step count continue"
        else:
            state = self._state_before(spike)
            if state is None:
                words = "cannot roll back: no copy of the state before the spike exists"
                self.notifier.diagnosis("nothing_to_roll_back_to", words, "warning", step=step)
                return
            state.restore()
            num_undone = step - state.step
            words = f"rolled back to step {state.step}: {num_undone} steps are undone, and their samples left out"
        if self.watch.warm_up_steps:
            words += f"; the learning rate rises again over {self.watch.warm_up_steps} steps"
        self._last_kept = self._last_rolled_back = step
        self._warm_up_left = self.watch.warm_up_steps
        self._set_factor()
        self._numbers.drop()
        self.notifier.diagnosis("rolled_back", words, "warning", step=step)

    def _state_before(self, spike: Spike) -> KeptState | None:
        """Return the newest state from well before a spike, or the older one if the newer one led to spikes again."""
        begin = spike.step - spike.num_steps - _MARGIN_STEPS
        while self._kept and self._kept[-1].step > begin:
            self._kept.pop()
        if len(self._kept) > 1 and self._kept[-1].num_restored >= _MOST_RESTORED:
            self._kept.pop()
        return self._kept[-1] if self._kept else None

    def _advance_warm_up(self) -> None:
        if self._warm_up_left:
            self._warm_up_left -= 1
            self._set_factor()

    def _set_factor(self) -> None:
        rest = self._warm_up_left / (self.watch.warm_up_steps + 1)
        self.updater.rate_factor = self._factor * (1.0 - rest)

    def state_dict(self) -> dict[str, Any]:
        """Return the rate factor, the rest of the warm-up and the number of times the rate was lowered."""
        return {"factor": self._factor, "warm_up_left": self._warm_up_left, "num_actions": self._num_actions}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state_dict()`, or start fresh for None (a run without a watch); copies in memory are dropped."""
        state = state or {"factor": 1.0, "warm_up_left": 0, "num_actions": 0}
        self._factor, self._num_actions = float(state["factor"]), int(state["num_actions"])
        self._warm_up_left = int(state["warm_up_left"])
        self._set_factor()
        self._kept.clear()
        self._numbers.drop()
        self._detector = SpikeDetector(self.watch.rule)
        self._last_kept = -self.watch.keep_every
