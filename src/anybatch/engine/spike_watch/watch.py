"""What is done about a spike: warn, lower the learning rate, or go back, lower it and warm up again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from anybatch.core.reports import StepReport
from anybatch.core.spikes import Spike, SpikeDetector, SpikeRule
from anybatch.core.whole_numbers import checked_int
from anybatch.engine.spike_watch.kept_state import KeptState
from anybatch.engine.spike_watch.late_numbers import LateNumbers
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.engine.update.updater import Updater
from anybatch.errors import UserError

SpikeAction = Literal["warn", "lower", "roll_back"]
_NUM_KEPT = 2
"""States in memory: where a run diverges again from the newer one, that one was kept too late."""
_MOST_RESTORED = 2
"""How often the newer one is gone back to before that is taken to be so."""
_EPISODE_STEPS = 8
"""Spikes that follow each other within as many steps are one."""
_MARGIN_STEPS = 4
"""Steps between a state and the beginning of a spike, which has begun before it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeWatch:
    """What is watched for, and what is done about it. All ranks see the same numbers, and do the same.

    A roll-back takes weights, buffers, the optimizer's state and averaged weights back, and nothing else: step count,
    schedule and data go on, so the samples of the steps that are undone are left out, and none counts twice (as
    Chowdhery et al. 2022, arXiv 2204.02311, section 5.1, went on behind a spike on other data).

    On a CPU a step's numbers are looked at behind it; on an accelerator one step later, when they have arrived, so that
    nothing waits for the device.

    Args:
        action: "warn" only says so; "lower" also multiplies the learning rate by `lower_to`, for good; "roll_back" goes
            back to a state from before, and the rate rises again from near 0. Where the run leaves its course again
            within `relapse_steps`, the rate was the cause: it rises to `lower_to` of what it was, for good. It also
            goes back where a loss or gradient is not finite, which otherwise ends the run.
        rule: what counts as a spike.
        lower_to: what the rate is multiplied by, above 0 and up to 1; 1 never lowers it for good.
        warm_up_steps: steps over which the rate rises again behind a roll-back.
        relapse_steps: steps behind a roll-back within which a second spike lowers the rate for good.
        keep_every: steps between states that are kept to go back to, two at a time, as long as nothing is unusual.
        keep_on: "device", or "cpu" where the device has no room for two more copies of weights and optimizer.
        folder: checkpoints to go back to instead: of the newest one, what a roll-back takes back. Nothing is kept in
            memory then, and saving them is left to the caller.
        most_actions: how often the rate is lowered before the watch only warns, and a loss that is not finite ends the
            run: lowering has not helped.

    Raises:
        UserError: an argument that cannot be used.
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
    """Return what `Engine(spikes=...)` was given as a value: an action alone stands for the defaults.

    Raises:
        UserError: it is neither.
    """
    if given is None or isinstance(given, SpikeWatch):
        return given
    return SpikeWatch(action=given)


class SpikeGuard:
    """Watches the steps of an engine, and acts.

    Args:
        watch: what is watched for, and what is done about it.
        updater: updates parameters, at a rate that can be lowered.
        keep: function (step) -> a copy of the present state.
        device: of the numbers in a report.
        notifier: sends records of spikes, and of what was done.
    """

    def __init__(
        self,
        watch: SpikeWatch,
        *,
        updater: Updater,
        keep: Callable[[int], KeptState],
        device: torch.device,
        notifier: Notifier,
    ) -> None:
        self.watch = watch
        self._updater = updater
        self._keep = keep
        self._notifier = notifier
        self._numbers = LateNumbers(device)
        self._detector = SpikeDetector(watch.rule)
        self._kept: list[KeptState] = []
        self._last_kept = -watch.keep_every
        self._factor = 1.0
        self._warm_up_left = 0
        self._num_actions = 0
        self._last_spike: int | None = None
        self._last_rolled_back: int | None = None
        self._num_again = 0
        self._can_act = watch.action != "warn"
        # Where there is a state to go back to, a step that is not finite is left out instead of ending the run.
        updater.skips_non_finite = watch.action == "roll_back"

    def look(self, report: StepReport) -> Spike | None:
        """Return the spike that a step was which has just arrived; the steps that are looked at are a step apart."""
        self._advance_warm_up()
        # Under fp16 a gradient that has overflowed is nothing unusual: the scaler has left the update out.
        if report.skipped and self._updater.scaler.enabled:
            return None
        arrived = self._numbers.exchange(report)
        return None if arrived is None else self._detector.look(*arrived)

    def keeps_now(self, step: int) -> bool:
        """Whether the state behind a step is to be kept."""
        watch = self.watch
        is_due = self._can_act and watch.action == "roll_back" and watch.folder is None
        return is_due and step >= self._last_kept + watch.keep_every and self._detector.is_calm

    def keep(self, step: int) -> None:
        """Keep the present state, and of those before the newest one."""
        self._last_kept = step
        del self._kept[: -(_NUM_KEPT - 1)]
        self._kept.append(self._keep(step))

    def act(self, spike: Spike, step: int, load: Callable[[Path], Path]) -> None:
        """Say what was found and do what is to be done about it.

        Args:
            spike: what was found.
            step: the step that was made last.
            load: function (folder) -> path: takes weights and the like from the newest checkpoint.
        """
        # Spikes close behind each other are one: told once, and the rate is lowered once, however many are undone.
        is_again = self._last_spike is not None and step - self._last_spike <= _EPISODE_STEPS
        self._last_spike = step
        self._num_again = self._num_again + 1 if is_again else 0
        if not is_again or self._num_again > self.watch.rule.window:
            self._num_again = 0
            self._tell(spike, step)
        if self._can_act and self.watch.action == "roll_back":
            self._roll_back(spike, step, load)
        if self._can_act:
            self._detector.begin_again()

    def _tell(self, spike: Spike, step: int) -> None:
        """Tell of a spike, and lower the rate, as long as that has not been done too often."""
        if self._can_act and self._num_actions >= self.watch.most_actions:
            self._can_act = self._updater.skips_non_finite = False
            self._notifier.spike(
                "spike_watch_gave_up",
                f"{spike}, and the learning rate has been lowered {self._num_actions} times already, to "
                f"{self._factor:.3g} of what it was. That has not helped: from now on the watch only warns.",
                step,
            )
            return
        self._notifier.spike("spike", f"{spike}.", step)
        last = self._last_rolled_back
        is_first = self.watch.action == "roll_back" and (last is None or step - last > self.watch.relapse_steps)
        if not self._can_act or is_first:
            return
        self._num_actions += 1
        if self.watch.lower_to < 1.0:
            self._factor *= self.watch.lower_to
            self._set_factor()
            words = f"the learning rate is {self._factor:.3g} of what it was, from step {step + 1} on"
            self._notifier.diagnosis("rate_lowered", words, "warning", step=step)

    def _roll_back(self, spike: Spike, step: int, load: Callable[[Path], Path]) -> None:
        if self.watch.folder is not None:
            words = f"rolled back to {load(Path(self.watch.folder))}; data, schedule and step count go on"
        else:
            state = self._state_before(spike)
            if state is None:
                words = "no state from before it has been kept, so there is none to go back to"
                self._notifier.diagnosis("nothing_to_roll_back_to", words, "warning", step=step)
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
        self._notifier.diagnosis("rolled_back", words, "warning", step=step)

    def _state_before(self, spike: Spike) -> KeptState | None:
        """Return the newest state from well before a spike; of one that has led to another spike, the older one."""
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
        self._updater.rate_factor = self._factor * (1.0 - rest)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know: how far the rate was lowered."""
        return {"factor": self._factor, "warm_up_left": self._warm_up_left, "num_actions": self._num_actions}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; None for a checkpoint of a run that was not watched. What was kept in memory is dropped."""
        state = state or {"factor": 1.0, "warm_up_left": 0, "num_actions": 0}
        self._factor, self._num_actions = float(state["factor"]), int(state["num_actions"])
        self._warm_up_left = int(state["warm_up_left"])
        self._set_factor()
        self._kept.clear()
        self._numbers.drop()
        self._detector = SpikeDetector(self.watch.rule)
        self._last_kept = -self.watch.keep_every
