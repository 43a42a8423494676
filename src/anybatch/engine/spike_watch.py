"""Reactions to a spike: warn, lower the learning rate, or roll back and warm up again."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.records import StepReport
from anybatch.core.spikes import Spike, SpikeDetector, SpikeWatch
from anybatch.engine.notifier import Notifier
from anybatch.engine.precision import UpdateTarget
from anybatch.engine.schedule import WeightAverage
from anybatch.engine.updater import HostCopy, Updater

_SCHEDULED = frozenset(
    {"params", "lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "max_momentum", "base_momentum"}
)
"""Entries of the optimizer's parameter groups that schedules set; a roll-back does not restore them."""


class KeptState:
    """A copy of weights, buffers, optimizer state and averaged weights after a step.

    Step count, learning-rate schedule and data position are not copied.
    """

    def __init__(
        self,
        step: int,
        modules: nn.Module,
        target: UpdateTarget,
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
            {name: copy.deepcopy(value) for name, value in group.items() if name not in _SCHEDULED}
            for group in self._optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state, any number of times."""
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


def _tensors(modules: nn.Module, target: UpdateTarget, average: WeightAverage | None) -> Iterable[torch.Tensor]:
    """Return the tensors that an update or a forward changes in place; frozen parameters are excluded."""
    tensors = [
        *(parameter for parameter in modules.parameters() if parameter.requires_grad),
        *modules.buffers(),
        *target.extra_weights.values(),
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


_NUM_KEPT = 2
"""Copies in memory. If the run keeps diverging from the newer copy, it was made too late: restore the older one."""
_MAX_RESTORED = 2
"""Number of times the newer copy is restored before the older one is restored."""
_EPISODE_STEPS = 8
"""Spikes at most this many steps apart count as one spike."""
_RELAPSE_STEPS = 100
"""Steps after a roll-back within which a second spike lowers the rate permanently."""
_MARGIN_STEPS = 4
"""Minimum steps between a copy and the first detected step of a spike, since a spike starts before it is detected."""


@dataclass(eq=False, repr=False)
class SpikeGuard:
    """Watches the steps of an engine, and reacts to spikes."""

    watch: SpikeWatch
    _: KW_ONLY
    updater: Updater
    copy_state: Callable[[int], KeptState]  # function (step) -> a copy of the current state
    device: torch.device
    notifier: Notifier

    def __post_init__(self) -> None:
        self._pending: tuple[int, bool, HostCopy] | None = None
        self._detector = SpikeDetector(self.watch.rule)
        self._kept: list[KeptState] = []
        self._last_kept = -self.watch.keep_every
        self._factor = 1.0
        self._warm_up_left = 0
        self._num_actions = 0
        self._last_spike: int | None = None
        self._last_rolled_back: int | None = None
        self._num_repeated = 0
        self._can_act = self.watch.action != "warn"
        # With "roll_back", skip the update of a non-finite step instead of raising: the roll-back undoes the step.
        self.updater.skips_non_finite = self.watch.action == "roll_back"

    def detect(self, report: StepReport) -> Spike | None:
        """Return a spike in the newest readable loss and gradient norm, or None; called after every step."""
        self._advance_warm_up()
        # Under fp16 an overflow is normal: the scaler skips the update.
        if report.skipped and self.updater.scaler.enabled:
            return None
        loss, norm = report.contributions.sum(), report.gradient_norm
        if self.device.type == "cpu":
            return self._detector.add(report.step, float(loss), None if norm is None else float(norm))
        # On an accelerator, the previous step is checked, because its numbers are already on the host.
        both = torch.stack((loss, loss if norm is None else norm.to(loss.dtype)))
        arrived, self._pending = self._pending, (report.step, norm is not None, HostCopy(both))
        if arrived is None:
            return None
        step, has_norm, copied = arrived
        late_loss, late_norm = copied.read().tolist()
        return self._detector.add(step, late_loss, late_norm if has_norm else None)

    def should_copy(self, step: int) -> bool:
        """Return whether to copy the state after this step."""
        is_due = step >= self._last_kept + self.watch.keep_every
        return is_due and self._can_act and self.watch.action == "roll_back" and self._detector.is_calm

    def keep(self, step: int) -> None:
        """Copy the current state, and drop all earlier copies except the newest."""
        self._last_kept = step
        del self._kept[: -(_NUM_KEPT - 1)]
        self._kept.append(self.copy_state(step))

    def react(self, spike: Spike, step: int) -> None:
        """Report a spike and react to it."""
        # Spikes in close succession count as one: one report, and the rate is lowered once.
        is_repeated = self._last_spike is not None and step - self._last_spike <= _EPISODE_STEPS
        self._last_spike = step
        self._num_repeated = self._num_repeated + 1 if is_repeated else 0
        if not is_repeated or self._num_repeated > self.watch.rule.window:
            self._num_repeated = 0
            self._report(spike, step)
        if self._can_act and self.watch.action == "roll_back":
            self._roll_back(spike, step)
        if self._can_act:
            self._detector.reset_sums()

    def _report(self, spike: Spike, step: int) -> None:
        """Report a spike and lower the rate, up to `max_actions` times."""
        if self._can_act and self._num_actions >= self.watch.max_actions:
            self._can_act = self.updater.skips_non_finite = False
            self.notifier.spike(
                "spike_watch_gave_up",
                f"{spike}, after {self._num_actions} reactions; the learning rate is {self._factor:.3g} of the "
                "schedule's. From now on the watch only warns.",
                step,
            )
            return
        self.notifier.spike("spike", f"{spike}.", step)
        last = self._last_rolled_back
        is_first = self.watch.action == "roll_back" and (last is None or step - last > _RELAPSE_STEPS)
        if not self._can_act or is_first:
            return
        self._num_actions += 1
        if self.watch.lower_to < 1.0:
            self._factor *= self.watch.lower_to
            self._set_factor()
            message = f"from step {step + 1} on, the learning rate is {self._factor:.3g} of the rate of the schedule"
            self.notifier.diagnosis("rate_lowered", message, "warning", step=step)

    def _roll_back(self, spike: Spike, step: int) -> None:
        state = self._state_before(spike)
        if state is None:
            message = "cannot roll back: no copy of the state before the spike exists"
            self.notifier.diagnosis("nothing_to_roll_back_to", message, "warning", step=step)
            return
        state.restore()
        message = f"rolled back to step {state.step}: {step - state.step} steps are undone, and their samples left out"
        if self.watch.warm_up_steps:
            message += f"; the learning rate rises again over {self.watch.warm_up_steps} steps"
        self._last_kept = self._last_rolled_back = step
        self._warm_up_left = self.watch.warm_up_steps
        self._set_factor()
        self._pending = None  # its step was undone
        self.notifier.diagnosis("rolled_back", message, "warning", step=step)

    def _state_before(self, spike: Spike) -> KeptState | None:
        """Return the newest copy from before a spike, or the older one after `_MAX_RESTORED` roll-backs to it."""
        begin = spike.step - spike.num_steps - _MARGIN_STEPS
        while self._kept and self._kept[-1].step > begin:
            self._kept.pop()
        if len(self._kept) > 1 and self._kept[-1].num_restored >= _MAX_RESTORED:
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
        """Return the rate factor, the remaining steps of the warm-up, and how often the rate was lowered."""
        return {"factor": self._factor, "warm_up_left": self._warm_up_left, "num_actions": self._num_actions}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state_dict()`, or start fresh for None (a run without a watch); drop all copies of states."""
        state = state or {"factor": 1.0, "warm_up_left": 0, "num_actions": 0}
        self._factor, self._num_actions = float(state["factor"]), int(state["num_actions"])
        self._warm_up_left = int(state["warm_up_left"])
        self._set_factor()
        self._kept.clear()
        self._pending = None
        self._detector = SpikeDetector(self.watch.rule)
        self._last_kept = -self.watch.keep_every
