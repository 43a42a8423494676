"""Advice on the effective batch size: from a short run of an engine, or from the log of a finished one."""

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anybatch.core.geometry import require
from anybatch.core.gradient_noise import BatchCost, in_words
from anybatch.core.learning_rate import adam_gain, noise_gain
from anybatch.core.records import StepReport
from anybatch.core.units import columns, three_digits
from anybatch.diagnostics.step_times import PhaseClock, RankSeconds, logged_steps
from anybatch.engine.engine import Engine
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import JsonLine, read_jsonl

MIN_GAIN = 0.05
"""Changing the batch size is not worthwhile if it saves less than this fraction of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """The cost of reaching the same loss with one batch size, relative to the cost with the current batch size."""

    name: str  # "half", "now", "twice" or "best"
    size: float  # in samples
    steps: float
    samples: float
    seconds: float
    interval: tuple[float, float]  # `seconds` at both ends of the noise scale's interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The effective batch size that reaches a loss in the least time. `print(advice)` shows the advice."""

    size: int  # the measured effective batch size, in samples
    micro_batch_size: int  # maximum samples of one forward and backward
    cost: BatchCost = field(metadata={"json": False})  # of each batch size; the critical one is the noise scale
    interval: tuple[float, float]  # the noise scale's 95% interval; the upper end is infinite if it is not known yet
    items: str = "samples"  # the items that the loss is a mean over, such as "tokens"
    items_per_sample: float = 1.0  # mean number of items in a sample
    num_measured: int = 0  # number of steps in which the noise was measured
    num_ranks: int = 1  # number of ranks in the measurement
    device: str = "cpu"  # the device of a rank
    learning_rate: float | None = None  # the learning rate of the measurement

    @property
    def is_known(self) -> bool:
        """Whether the noise scale has an upper bound; if not, only the lower end of its interval is known."""
        return math.isfinite(self.interval[1])

    @property
    def best(self) -> float:
        """The effective batch size, in samples, that reaches a loss fastest; a lower bound unless `is_known`."""
        return self._cost.best

    @property
    def best_interval(self) -> tuple[float, float]:
        """`best` for both ends of the noise scale's interval."""
        low, high = (self.cost.at(end).best for end in self.interval)
        return low, high

    @property
    def gain(self) -> float:
        """The fraction of the time to a loss that the best size saves over the current size; NaN if unknown."""
        return math.nan if self.interval[0] <= 0 else 1.0 - self._cost.seconds(max(1.0, self.best), by=self.size)

    @property
    def gain_of_accumulating(self) -> float:
        """The same, compared with one micro-batch per rank; 0 if the best size is not larger."""
        if self.interval[0] <= 0:
            return math.nan
        alone = self.micro_batch_size * self.num_ranks
        return 0.0 if self.best <= alone else 1.0 - self._cost.seconds(self.best, by=alone)

    @property
    def table(self) -> tuple[AdviceRow, ...]:
        """Rows for half the current size, the current size, twice that, and the best size if it is at least 1.

        Empty if the noise scale is unknown.
        """
        if self.interval[0] <= 0:
            return ()
        sizes = {"half": self.size / 2, "now": float(self.size), "twice": 2.0 * self.size}
        if self.best >= 1:
            sizes["best"] = self.best
        return tuple(self._row(name, size) for name, size in sizes.items())

    def __str__(self) -> str:
        """Return the advice."""
        cost, whole = self.cost, self.cost.step_seconds(self.size)
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        fixed, per_sample = _ms(cost.overhead_seconds), _ms(cost.seconds_per_sample)
        share = cost.overhead_seconds / whole
        lines = [
            f"effective batch {self.size} on {ranks} ({self.device}), {self.num_measured} measured steps",
            f"  {in_words(cost.critical_batch_size, self.interval, self.items, self.items_per_sample)}",
            f"  a step takes {_ms(whole)}: {fixed} fixed ({share:.0%}) plus {per_sample} per sample",
        ]
        if self.interval[0] <= 0:
            return "\n".join([*lines, "", "No advice yet: measure more steps."])
        rates = [f"  {rate:.6g} ({name})" for name, rate in self.learning_rates.items()]
        heading = ["", "scaled learning rates for the best batch size:"] * bool(rates)
        lines += ["", *self._table_lines(), "", *self._verdict(), *heading, *rates]
        return "\n".join([*lines, "", _LIMITS])

    @property
    def effective_batch_size(self) -> int:
        """The measured effective batch size, in samples."""
        return self.size

    @property
    def noise_scale(self) -> float:
        """The noise scale, in samples."""
        return self.cost.critical_batch_size

    @property
    def overhead_seconds(self) -> float:
        """Fixed time of a step of any size."""
        return self.cost.overhead_seconds

    @property
    def seconds_per_sample(self) -> float:
        """Time per sample, over all ranks."""
        return self.cost.seconds_per_sample

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rates for the best batch size, from the noise scale: for SGD, and for optimizers like Adam."""
        best, noise = round(self.best), self._cost.critical_batch_size
        if self.learning_rate is None or best < 1:
            return {}
        sizes = {"base_batch_size": self.size, "effective_batch_size": best}
        return {
            "noise gain, for SGD": self.learning_rate * noise_gain(noise, **sizes),
            "noise gain, for Adam": self.learning_rate * adam_gain(noise, **sizes),
        }

    @property
    def _cost(self) -> BatchCost:
        """The cost for the noise scale; for the lower end of its interval if there is no upper bound."""
        return self.cost if self.is_known else self.cost.at(self.interval[0])

    def _row(self, name: str, size: float) -> AdviceRow:
        low, high = self.interval
        # Instead of infinity, use a million times the batch size.
        ends = [self.cost.at(min(end, 1e6 * self.size)).seconds(size, by=self.size) for end in (low, high)]
        cost = self._cost
        return AdviceRow(
            name=name,
            size=size,
            steps=cost.steps(size, by=self.size),
            samples=cost.samples(size, by=self.size),
            seconds=cost.seconds(size, by=self.size),
            interval=(min(ends), max(ends)),
        )

    def _table_lines(self) -> list[str]:
        rows = [["  to the same loss", "batch", "steps", "samples", "time", "95% interval of time"]]
        for row in self.table:
            low, high = (three_digits(end) for end in row.interval)
            numbers = [f"{three_digits(value)}x" for value in (row.steps, row.samples, row.seconds)]
            rows.append([f"  {row.name}", f"{row.size:,.0f}", *numbers, f"{low}x to {high}x"])
        return columns(rows)

    def _verdict(self) -> list[str]:
        least = "" if self.is_known else "at least "
        low, high = self.best_interval
        ends = f"{low:,.0f} to {high:,.0f}" if self.is_known else f"at least {low:,.0f}"
        lines = [f"time-optimal effective batch: {least}{self.best:,.0f} samples (95% interval {ends})"]
        lines.append(f"it reaches the same loss in {self.gain:.0%} less time than the current {self.size}.")
        return [*lines, self._accumulation_advice()]

    def _accumulation_advice(self) -> str:
        alone, gain = self.micro_batch_size * self.num_ranks, self.gain_of_accumulating
        pieces = f"a batch of {alone:,} (one micro-batch" + (" per rank)" if self.num_ranks > 1 else ")")
        if not self.is_known and gain < MIN_GAIN:
            return f"Unknown yet: whether accumulating is faster than {pieces} (the noise scale has no upper bound)."
        pays = "pays" if gain >= MIN_GAIN else "hardly pays" if gain > 0 else "does not pay"
        verdict = f"Accumulating {pays} here: it reaches a loss in {gain:.0%} less time than {pieces}."
        if gain >= MIN_GAIN:
            return verdict
        return f"{verdict} Accumulate only if the loss needs the whole batch, or for stability."


_LIMITS = (
    "The noise scale estimates the critical batch size, which grows with the samples seen and hardly with the model\n"
    "(arXiv 2410.21676): early in a run this is a lower bound, so measure again after a tenth of the run.\n"
    "The estimate assumes that the learning rate is tuned for each batch size."
)


def _ms(seconds: float) -> str:
    return f"{three_digits(1e3 * seconds)} ms"


_WARM_UP = 2
_ALL = "all parameters"


def advise(
    source: Engine | str | os.PathLike[str],
    batches: Iterable[Any] = (),
    *,
    steps: int = 200,
) -> Advice:
    """Find the effective batch size that reaches a loss fastest, from gradient noise and step times on this machine.

    ```python
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=32, noise=GradientNoise(every=2))
    print(ab.advise(engine, ab.batches(dataset, effective_batch_size=256)))
    ```

    The noise scale approximates the critical batch size B_crit. A given loss is reached fastest at the batch size
    `sqrt(B_crit x overhead / seconds per sample)`, where `overhead` is the fixed time of a step, in seconds.

    Args:
        source: an engine that measures noise; `advise` trains it for `steps` ordinary steps. Or the log of a finished
            run that measured noise (`events.jsonl`, or its folder).
        batches: the training batches.
        steps: maximum number of steps.

    Raises:
        UserError: noise was not measured, or there are fewer than two steps.
    """
    if isinstance(source, Engine):
        return _advice_from_engine(source, batches, steps)
    is_path = isinstance(source, (str, os.PathLike))
    require(is_path, "source", source, "an engine, or the path of the log of a run")
    return _advice_from_log(Path(source))


def _advice_from_engine(engine: Engine, batches: Iterable[Any], steps: int) -> Advice:
    clock = PhaseClock(engine.world.device, waits=True)
    timed: list[tuple[StepReport, RankSeconds]] = []
    reports: list[StepReport] = []
    with engine.observed_by(clock):
        for batch in itertools.islice(batches, steps):
            seconds = clock.timed(lambda batch=batch: reports.append(engine.step(batch)))  # type: ignore[misc]
            timed.append((reports[-1], seconds))
    measured = [report.noise for report in reports if report.noise is not None]
    timed = timed[_WARM_UP:]
    if not measured or not timed:
        message = (
            f"the gradient noise was measured in {len(measured)} of {len(reports)} steps. Build the engine with "
            "noise=GradientNoise(every=2) (of anybatch.noise), with at least two micro-batches in an "
            "effective batch, and pass enough batches."
        )
        raise UserError(message, code="unmeasured_noise")
    # Steps that measure noise take longer, so their times are used only if every step measures noise.
    chosen = [pair for pair in timed if pair[0].noise is None] or timed
    noise = measured[-1]
    group = engine.optimizer.param_groups[0]
    return Advice(
        size=max(report.num_samples for report in reports),
        micro_batch_size=max(unit.num_samples for share in reports[-1].plan.shares for unit in share),
        cost=_cost(noise.scale, [(report.num_samples, seconds) for report, seconds in chosen]),
        num_measured=len(measured),
        num_ranks=engine.world.size,
        device=str(engine.world.device),
        interval=noise.interval,
        items=noise.items,
        items_per_sample=float(noise.items_per_sample),
        learning_rate=float(group.get("initial_lr", group["lr"])),
    )


def _cost(noise_scale: float, steps: Sequence[tuple[int, RankSeconds]]) -> BatchCost:
    """Return the cost model for steps of (samples, seconds)."""
    return BatchCost(
        critical_batch_size=noise_scale,
        overhead_seconds=statistics.median(max(0.0, step.whole - step.load - step.compute) for _, step in steps),
        seconds_per_sample=statistics.median((step.load + step.compute) / number for number, step in steps),
    )


def _advice_from_log(path: Path) -> Advice:
    log = rank_logs(path)[0]
    lines: dict[str, list[JsonLine]] = {"start": [{}], "gradient_noise": [], "step": []}
    for line in read_jsonl(log):
        lines.get(str(line.get("kind")), []).append(line)
    start, noises, steps = lines["start"][-1], lines["gradient_noise"], lines["step"]
    if not noises:
        message = (
            f"{log} has no measurement of the gradient noise. Train a recipe whose ab.Job has "
            "noise=GradientNoise() (of anybatch.noise), or with Engine(noise=...) and a JsonlLog."
        )
        raise UserError(message, code="unmeasured_noise")
    timed = list(logged_steps(log))[1:]  # the first step is longer
    if not timed:
        message = f"{log} has fewer than two complete steps; use the log of a longer run."
        raise UserError(message, code="too_few_steps")
    size, num_ranks = max(number for number, _ in timed), int(start.get("world_size", 1))
    last = noises[-1]
    return Advice(
        size=size,
        micro_batch_size=int(start.get("micro_batch_size") or -(-size // num_ranks)),
        cost=_cost(_positive(last["noise_scale"][_ALL]), timed),
        interval=(float(last["low"][_ALL]), float(last["high"][_ALL])),
        items_per_sample=float(last["items_per_sample"]),
        items="samples" if float(last["items_per_sample"]) == 1.0 else "items",
        num_measured=len(noises),
        num_ranks=num_ranks,
        device=str(start.get("device", "")),
        # A schedule may have lowered the learning rate, so the largest logged rate is the configured rate.
        learning_rate=max(float(line["learning_rates"][0]) for line in steps),
    )


def _positive(value: "float | str | None") -> float:
    number = float("nan") if value is None else float(value)
    return float("inf") if number < 0 else number
