"""Where a run that is over, or still going on, has left its course: read from its log."""

import os
from dataclasses import dataclass

from anybatch.core.spikes import Spike, SpikeRule, spikes_of
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import read_jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeReport:
    """The spikes of a log. Printed, a line for each.

    Attributes:
        num_steps: steps that were looked at.
        spikes: of each episode the first.
        told: what a watch has done while the run went on: step, code and words.
    """

    num_steps: int
    spikes: tuple[Spike, ...]
    told: tuple[tuple[int, str, str], ...]

    def __str__(self) -> str:
        """Return what was found."""
        lines = [f"{self.num_steps} steps, {len(self.spikes)} spike{'s' * (len(self.spikes) != 1)}"]
        lines += [f"  step {spike.step}: {spike}" for spike in self.spikes]
        if self.told:
            lines += ["what the run's own watch said:", *(f"  step {step}: {words}" for step, _, words in self.told)]
        return "\n".join(lines)


def read_spikes(path: str | os.PathLike[str], rule: SpikeRule | None = None) -> SpikeReport:
    """Look through the losses and gradient norms in a log as a watch of the run would have.

    Of steps that were made again after a resume, the last ones count; those that fp16 skipped are left out.

    Args:
        path: `events.jsonl`, or the folder of a run.
        rule: what counts as a spike; None for the defaults.

    Raises:
        UserError: there are fewer steps in it than it takes to find anything.
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
        raise UserError(message)
    spikes = spikes_of(((step, *pair) for step, pair in values.items()), rule)
    return SpikeReport(
        num_steps=len(values),
        spikes=tuple(spikes),
        told=tuple((step, code, words) for (step, code), words in told.items()),
    )
