"""Finds loss spikes in the log of a finished or running run."""

import os
from dataclasses import dataclass

from anybatch.core.spikes import Spike, SpikeRule, spikes_of
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import read_jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeReport:
    """The spikes of a log. `print(report)` shows one line for each spike."""

    num_steps: int
    spikes: tuple[Spike, ...]

    def __str__(self) -> str:
        """Return the spikes as text."""
        head = f"{self.num_steps} steps, {len(self.spikes)} spike{'s' * (len(self.spikes) != 1)}"
        return "\n".join([head, *(f"  step {spike.step}: {spike}" for spike in self.spikes)])


def read_spikes(path: str | os.PathLike[str], rule: SpikeRule | None = None) -> SpikeReport:
    """Search the losses and gradient norms in a log for spikes, by the rule that `SpikeWatch` applies during a run.

    If a step was repeated after a resume, the last repetition counts; steps that fp16 skipped are ignored.

    Args:
        path: `events.jsonl`, or the folder of a run.
        rule: definition of a spike; None: the defaults.

    Raises:
        OSError: the log cannot be opened.
        UserError: the log has no steps.
    """
    rule, log = rule or SpikeRule(), rank_logs(path)[0]
    values: dict[int, tuple[float, float | None]] = {}
    for line in read_jsonl(log):
        kind = line.get("kind")
        if kind == "start":
            values = {step: pair for step, pair in values.items() if step < int(line["first_step"])}
        elif kind == "step" and line["loss"] is not None and line["skipped"] is not True:
            norm = line["gradient_norm"]
            values[int(line["step"])] = float(line["loss"]), None if norm is None else float(norm)
    if not values:
        message = f"{log} has no steps. Pass the events.jsonl or the folder of a run."
        raise UserError(message, code="too_few_steps")
    return SpikeReport(num_steps=len(values), spikes=tuple(spikes_of(((s, *v) for s, v in values.items()), rule)))
