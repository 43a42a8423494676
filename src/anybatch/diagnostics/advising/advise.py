"""Advice on the effective batch size: from a short run of an engine, or from the log of a finished one."""

import itertools
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from anybatch.core.collectives import Link, best_all_reduce
from anybatch.core.geometry import refuse_unless
from anybatch.core.gradient_noise import BatchCost
from anybatch.core.learning_rate import ScaledRate, scale_rate
from anybatch.core.records import StepReport
from anybatch.core.run_config import ScalingRule
from anybatch.diagnostics.advising.advice import Advice
from anybatch.diagnostics.scaling.from_log import read_steps
from anybatch.diagnostics.scaling.phase_clock import PhaseClock, RankSeconds
from anybatch.engine.engine import Engine
from anybatch.errors import UserError
from anybatch.events.chrome_trace import rank_logs
from anybatch.events.jsonl import JsonLine, read_jsonl
from anybatch.parallel.gradient_buckets import gradient_bytes

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
        raise UserError(message)
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
        raise UserError(message)
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
        raise UserError(message)
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
