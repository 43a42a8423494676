"""Advice on the effective batch size: from a short run of an engine, or from the log of a finished one."""

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from anybatch.core.collectives import Link, best_all_reduce
from anybatch.core.geometry import refuse_unless
from anybatch.core.gradient_noise import BatchCost, in_words
from anybatch.core.learning_rate import ScaledRate, noise_gain, scale_rate
from anybatch.core.records import StepReport
from anybatch.core.run_config import ScalingRule
from anybatch.core.units import three_digits
from anybatch.diagnostics.step_times import PhaseClock, RankSeconds, read_steps
from anybatch.engine.engine import Engine
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import JsonLine, read_jsonl
from anybatch.parallel.gradient_buckets import gradient_bytes

HARDLY = 0.05
"""A gain below this part of the time is not worth another batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """One batch size against the present one, which is 1."""

    name: str  # why it is in the table
    size: float  # samples
    steps: float  # to the same loss, as the rest
    samples: float
    seconds: float  # by the noise scale itself
    interval: tuple[float, float]  # of seconds, by both ends of the noise scale's interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Which effective batch size is worth it. `print(advice)` shows it.

    Attributes:
        size: samples of the effective batch that was measured.
        micro_batch_size: most samples of one forward and backward.
        cost: time and samples by batch size, with the noise scale as critical batch size.
        interval: the noise scale's 95% interval; its upper end is infinite while it is not known.
        items: the loss's items, such as "tokens".
        items_per_sample: their number in a sample.
        num_measured: steps in which noise was measured.
        num_ranks: that were measured on.
        device: of a rank.
        learning_rate: that was measured with.
        rates: that learning rate scaled to the best batch size, by each rule.
        on_ranks: predictions by number of ranks.
        rows: of parameters, name to noise scale.
    """

    size: int
    micro_batch_size: int
    cost: BatchCost
    interval: tuple[float, float]
    items: str = "samples"
    items_per_sample: float = 1.0
    num_measured: int = 0
    num_ranks: int = 1
    device: str = "cpu"
    learning_rate: float | None = None
    rates: tuple[ScaledRate, ...] = ()
    on_ranks: Mapping[int, BatchCost] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the noise scale has an interval with two ends; otherwise it is at least the lower one."""
        return math.isfinite(self.interval[1])

    @property
    def best(self) -> float:
        """The effective batch size at which the time to a loss is least, in samples; at least that, if not known."""
        return self._cost.best

    @property
    def best_interval(self) -> tuple[float, float]:
        """The same by both ends of the noise scale's interval."""
        low, high = (self.cost.at(end).best for end in self.interval)
        return low, high

    @property
    def ranks(self) -> str:
        """The number of ranks, in words."""
        return f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"

    @property
    def overhead_share(self) -> float:
        """The part of a step that does not depend on its samples."""
        return self.cost.overhead_seconds / self.cost.step_seconds(self.size)

    @property
    def gain(self) -> float:
        """The part of the time to a loss that the best batch saves over the present one."""
        return 1.0 - self._cost.seconds(max(1.0, self.best), by=self.size)

    @property
    def gain_of_accumulating(self) -> float:
        """The part of the time that the best batch saves over one micro-batch per rank; 0 if it is not larger."""
        alone = self.micro_batch_size * self.num_ranks
        return 0.0 if self.best <= alone else 1.0 - self._cost.seconds(self.best, by=alone)

    @property
    def table(self) -> tuple[AdviceRow, ...]:
        """Half, the present, twice and the best batch size; the best only where there is one of at least a sample."""
        sizes = {"half": self.size / 2, "now": float(self.size), "twice": 2.0 * self.size}
        if self.best >= 1:
            sizes["best"] = self.best
        return tuple(self._row(name, size) for name, size in sizes.items())

    def __str__(self) -> str:
        """Return the advice."""
        cost = self.cost
        step, fixed, per_sample = (
            _ms(one) for one in (cost.step_seconds(self.size), cost.overhead_seconds, cost.seconds_per_sample)
        )
        lines = [
            f"effective batch {self.size} on {self.ranks} ({self.device}), {self.num_measured} measured steps",
            f"  {in_words(cost.critical_batch_size, self.interval, self.items, self.items_per_sample)}",
            f"  a step takes {step}: {fixed} fixed ({self.overhead_share:.0%}) plus {per_sample} per sample",
        ]
        if self.interval[0] <= 0:
            return "\n".join([*lines, "", "No advice yet: measure more steps."])
        lines += ["", *self._table_lines(), "", *self._verdict(), *self._rate_lines(), *self._rank_lines()]
        return "\n".join([*lines, "", _LIMITS])

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values; an infinite end is null."""
        known = self.interval[0] > 0
        return {
            "effective_batch_size": self.size,
            "micro_batch_size": self.micro_batch_size,
            "num_ranks": self.num_ranks,
            "device": self.device,
            "num_measured": self.num_measured,
            "noise_scale": _finite(self.cost.critical_batch_size),
            "interval": [_finite(end) for end in self.interval],
            "items": self.items,
            "items_per_sample": self.items_per_sample,
            "noise_scale_by_row": {name: _finite(scale) for name, scale in self.rows.items()},
            "overhead_seconds": self.cost.overhead_seconds,
            "seconds_per_sample": self.cost.seconds_per_sample,
            "best": _finite(self.best),
            "best_interval": [_finite(end) for end in self.best_interval],
            "gain": _finite(self.gain) if known else None,
            "gain_of_accumulating": _finite(self.gain_of_accumulating) if known else None,
            "learning_rate": self.learning_rate,
            "learning_rates": {rate.rule: rate.learning_rate for rate in self.rates} | self.rates_by_noise,
            "table": [asdict(row) for row in (self.table if known else ())],
            "on_ranks": {str(number): _finite(self._best_of(cost)) for number, cost in self.on_ranks.items()},
        }

    @property
    def rates_by_noise(self) -> dict[str, float]:
        """The learning rate at the best batch by the noise scale itself, for SGD and for optimizers like Adam."""
        if self.learning_rate is None or not self.rates:
            return {}
        best = self.rates[0].effective_batch_size
        noise = self._cost.critical_batch_size
        gain = noise_gain(noise, base_batch_size=self.size, effective_batch_size=best)
        return {
            "noise gain, for SGD": self.learning_rate * gain,
            "square root of the noise gain, for Adam": self.learning_rate * math.sqrt(gain),
        }

    @property
    def _cost(self) -> BatchCost:
        """The cost by the noise scale, or by its lower end while it has no upper end."""
        return self.cost if self.is_known else self.cost.at(self.interval[0])

    def _best_of(self, cost: BatchCost) -> float:
        return cost.at(self._cost.critical_batch_size).best

    def _row(self, name: str, size: float) -> AdviceRow:
        low, high = self.interval
        # Beyond any measured end: a million times the batch is as good as infinite.
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
        lines = [f"  {'to the same loss':<18}{'batch':>9}{'steps':>9}{'samples':>9}{'time':>9}   95% interval of time"]
        for row in self.table:
            low, high = (three_digits(end) for end in row.interval)
            numbers = "".join(f"{three_digits(value) + 'x':>9}" for value in (row.steps, row.samples, row.seconds))
            lines.append(f"  {row.name:<18}{row.size:>9,.0f}{numbers}   {low}x to {high}x")
        return lines

    def _verdict(self) -> list[str]:
        least = "" if self.is_known else "at least "
        low, high = self.best_interval
        ends = f"{low:,.0f} to {high:,.0f}" if self.is_known else f"at least {low:,.0f}"
        lines = [f"time-optimal effective batch: {least}{self.best:,.0f} samples (95% interval {ends})"]
        if self.gain < HARDLY:
            lines.append(
                f"the present {self.size} is within {HARDLY:.0%} of the least time: nothing to gain by another."
            )
        else:
            lines.append(f"it saves {self.gain:.0%} of the time to a loss against the present {self.size}.")
        return [*lines, self._on_accumulating()]

    def _on_accumulating(self) -> str:
        alone, gain = self.micro_batch_size * self.num_ranks, self.gain_of_accumulating
        pieces = f"{alone:,} samples, one micro-batch" + (" on each rank" if self.num_ranks > 1 else "")
        otherwise = (
            "Accumulate for a loss over the whole batch, or for stability, and not for speed; it pays if a step "
            "has a higher fixed cost, as over a slow network."
        )
        if gain >= HARDLY:
            return f"Accumulating pays here: {gain:.0%} less time to a loss than with {pieces}."
        if not self.is_known:
            return f"Whether accumulating pays is unknown yet: the noise scale has no upper bound. One pass: {pieces}."
        if gain > 0:
            return f"Accumulating hardly pays here: {gain:.0%} less time than with {pieces}. {otherwise}"
        return f"Accumulating does not pay here: the best batch is not above {pieces}. {otherwise}"

    def _rate_lines(self) -> list[str]:
        if not self.rates:
            return []
        by_noise = [f"  lr {rate:.6g} ({name})" for name, rate in self.rates_by_noise.items()]
        return ["", "learning rate there, by each rule:", *(f"  {rate}" for rate in self.rates), *by_noise]

    def _rank_lines(self) -> list[str]:
        if not self.on_ranks:
            return []
        here = _least_seconds(self._cost, self.best)
        lines = ["", "time-optimal effective batch on other numbers of ranks (predicted):"]
        for number, cost in self.on_ranks.items():
            size = self._best_of(cost)
            ratio = _least_seconds(cost.at(self._cost.critical_batch_size), size) / here
            lines.append(f"  {number:>4} ranks: {size:,.0f} samples, {1 / ratio:.2f} times as fast as here at its best")
        return lines


_LIMITS = (
    "The noise scale is an estimate of the critical batch size, at this point of training and with the learning rate\n"
    "tuned for each size; it grows as the loss falls."
)


def _least_seconds(cost: BatchCost, size: float) -> float:
    """Return the time to a loss, up to a factor that all batch sizes and numbers of ranks share."""
    return (1.0 + cost.critical_batch_size / size) * cost.step_seconds(size)


def _ms(seconds: float) -> str:
    return f"{three_digits(1e3 * seconds)} ms"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_WARM_UP = 2
_ALL = "all parameters"


def advise(
    source: Engine | str | os.PathLike[str],
    batches: Iterable[Any] = (),
    *,
    steps: int = 200,
    ranks: Sequence[int] = (),
    link: Link | None = None,
) -> Advice:
    """Find the effective batch size that pays off, by the gradient noise and the step time on this machine.

    ```python
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=32, noise=GradientNoise(every=2))
    print(ab.advise(engine, ab.batches(dataset, effective_batch_size=256)))
    ```

    The noise scale approximates the critical batch size B_crit. With `overhead`, the fixed
    seconds of a step, the time to a loss is minimal at `sqrt(B_crit x overhead / seconds per sample)`.

    Args:
        source: an engine that measures noise, and makes ordinary steps here (it trains on); or the log of a finished
            run that did (`events.jsonl`, or the folder it is in).
        batches: the training batches.
        steps: maximum number of steps.
        ranks: numbers of ranks to predict for, each a multiple of the present one.
        link: between them.

    Raises:
        UserError: noise was not measured, there are fewer than two steps, or ranks lack a link.
    """
    refuse_unless(isinstance(ranks, Sequence), "ranks", ranks, "a list of numbers of ranks")
    if ranks and link is None:
        message = f"ranks={list(ranks)} needs link=, what connects them: parse_link('25Gbit,20us'), say."
        raise UserError(message, code="no_link")
    if isinstance(source, Engine):
        advice, num_bytes = _of_engine(source, batches, steps)
    else:
        refuse_unless(
            isinstance(source, (str, os.PathLike)), "source", source, "an engine, or the path of the log of a run"
        )
        advice, num_bytes = _of_log(Path(source))
    return replace(advice, on_ranks=_on_ranks(advice, ranks, link, num_bytes))


def _of_engine(engine: Engine, batches: Iterable[Any], steps: int) -> tuple[Advice, int]:
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
            f"of {len(reports)} steps {len(measured)} have measured the gradient's noise. Build the engine with "
            "noise=GradientNoise(every=2) (of anybatch.noise), with at least two micro-batches in an "
            "effective batch, and pass enough batches."
        )
        raise UserError(message, code="unmeasured_noise")
    # Steps that measure noise take longer, so they are timed only if all steps do.
    chosen = [pair for pair in timed if pair[0].noise is None] or timed
    noise = measured[-1]
    cost = BatchCost(
        critical_batch_size=noise.scale,
        overhead_seconds=statistics.median(max(0.0, one.whole - one.load - one.compute) for _, one in chosen),
        seconds_per_sample=statistics.median((one.load + one.compute) / report.num_samples for report, one in chosen),
    )
    group = engine.optimizer.param_groups[0]
    advice = Advice(
        size=max(report.num_samples for report in reports),
        micro_batch_size=max(unit.num_samples for share in reports[-1].plan.shares for unit in share),
        cost=cost,
        num_measured=len(measured),
        num_ranks=engine.world.size,
        device=str(engine.world.device),
        interval=noise.interval,
        items=noise.items,
        items_per_sample=float(noise.items_per_sample),
        rows=noise.scales,
    )
    parameters = [parameter for one in engine.optimizer.param_groups for parameter in one["params"]]
    return with_rates(advice, float(group.get("initial_lr", group["lr"])), group), gradient_bytes(parameters)


def _of_log(path: Path) -> tuple[Advice, int]:
    log = rank_logs(path)[0]
    lines: dict[str, list[JsonLine]] = {"start": [{}], "gradient_noise": [], "step": []}
    for line in read_jsonl(log):
        lines.get(str(line.get("kind")), []).append(line)
    start, noises, steps = lines["start"][-1], lines["gradient_noise"], lines["step"]
    if not noises:
        message = (
            f"{log} holds no measurement of the gradient's noise. Train a recipe whose ab.Job has "
            "noise=GradientNoise() (of anybatch.noise), or with Engine(noise=...) and a JsonlLog."
        )
        raise UserError(message, code="unmeasured_noise")
    times = read_steps(log)
    size = max(int(line["num_samples"]) for line in steps)
    of_samples = times.waiting + times.compute
    last = noises[-1]
    micro_batch_size = start.get("micro_batch_size")
    advice = Advice(
        size=size,
        micro_batch_size=int(micro_batch_size) if micro_batch_size else -(-size // times.num_ranks),
        cost=BatchCost(
            critical_batch_size=_positive(last["noise_scale"][_ALL]),
            overhead_seconds=max(0.0, times.step - of_samples),
            seconds_per_sample=of_samples / size,
        ),
        interval=(float(last["low"][_ALL]), float(last["high"][_ALL])),
        items_per_sample=float(last["items_per_sample"]),
        items="samples" if float(last["items_per_sample"]) == 1.0 else "items",
        num_measured=len(noises),
        num_ranks=times.num_ranks,
        device=str(start.get("device", "")),
        rows={name: float(value) for name, value in last["noise_scale"].items()},
    )
    # A schedule ends low: the largest rate is the one that was chosen.
    rate = max(float(line["learning_rates"][0]) for line in steps)
    return with_rates(advice, rate, {}), int(start.get("gradient_bytes", 0))


def with_rates(advice: Advice, learning_rate: float, group: Mapping[str, Any]) -> Advice:
    """Return advice with the learning rate at the best batch size, by each rule there is."""
    best = round(advice.best)
    rates: tuple[ScaledRate, ...] = ()
    if best >= 1:
        rates = tuple(
            scale_rate(
                learning_rate,
                base_batch_size=advice.size,
                effective_batch_size=best,
                rule=rule,
                betas=tuple(float(beta) for beta in group.get("betas", ())),
                eps=float(group["eps"]) if "betas" in group else None,
            )
            for rule in get_args(ScalingRule)
        )
    return replace(advice, learning_rate=learning_rate, rates=rates)


def _on_ranks(advice: Advice, ranks: Sequence[int], link: Link | None, num_bytes: int) -> dict[int, BatchCost]:
    found = {}
    for number in ranks:
        if number < advice.num_ranks or number % advice.num_ranks:
            message = f"ranks={number} is not a multiple of the {advice.num_ranks} measured ranks."
            raise UserError(message)
        assert link is not None  # checked before
        # The overhead already includes the reduction of the present ranks; no overlap with the backward is assumed.
        already = best_all_reduce(num_bytes, advice.num_ranks, link) if advice.num_ranks > 1 else 0.0
        more = max(0.0, best_all_reduce(num_bytes, number, link) - already) if number > 1 else 0.0
        found[number] = advice.cost.on_ranks(number // advice.num_ranks, more)
    return found


def _positive(value: "float | str | None") -> float:
    number = float("nan") if value is None else float(value)
    return float("inf") if number < 0 else number
