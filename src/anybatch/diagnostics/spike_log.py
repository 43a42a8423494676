"""Finds loss spikes in the log of a finished or running run."""

import os
from dataclasses import dataclass

from anybatch.core.spikes import Spike, SpikeRule, spikes_of
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import read_jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeReport:
    """The spikes of a log, and the messages of the run's own watch. Prints one line for each."""

    num_steps: int
    spikes: tuple[Spike, ...]
    told: tuple[tuple[int, str, str], ...]

    def __str__(self) -> str:
        """Return the spikes as text."""
        lines = [f"{self.num_steps} steps, {len(self.spikes)} spike{'s' * (len(self.spikes) != 1)}"]
        lines += [f"  step {spike.step}: {spike}" for spike in self.spikes]
        if self.told:
            lines += ["messages of the run's own watch:", *(f"  step {step}: {words}" for step, _, words in self.told)]
        return "\n".join(lines)


def read_spikes(path: str | os.PathLike[str], rule: SpikeRule | None = None) -> SpikeReport:
    """Search the losses and gradient norms in a log for spikes, as a watch of the run does.

    Of steps repeated after a resume, the last one counts; steps that fp16 skipped are ignored.

    Args:
        path: `events.jsonl`, or the folder of a run.
        rule: definition of a spike; None: the defaults.

    Raises:
        UserError: the log has too few steps.
        OSError: the log cannot be opened.
    """
    rule, log = rule or SpikeRule(), rank_logs(path)[0]
    values: dict[int, tuple[float, float | None]] = {}
    told: dict[tuple[int, str], str] = {}
    for line in read_jsonl(log):
        kind = line.get("kind")
        if kind == "start":
            first = int(line["first_step"])
            values = {step: pair for step, pair in values.items() if step < first}
            told = {key: words for key, words in told.items() if key[0] < first}
        elif kind == "step" and line["loss"] is not None and line["skipped"] is not True:
            norm = line["gradient_norm"]
            values[int(line["step"])] = float(line["loss"]), None if norm is None else float(norm)
        elif kind == "diagnosis" and line["step"] is not None:
            told[int(line["step"]), str(line["code"])] = str(line["message"])
    if len(values) <= rule.least:
        message = (
            f"{log} holds {len(values)} steps, and level and scatter are known after {rule.least}: a log of a longer "
            "run is needed."
        )
        raise UserError(message, code="too_few_steps")
    spikes = spikes_of(((step, *pair) for step, pair in values.items()), rule)
    return SpikeReport(
        num_steps=len(values),
        spikes=tuple(spikes),
        told=tuple((step, code, words) for (step, code), words in told.items()),
    )
