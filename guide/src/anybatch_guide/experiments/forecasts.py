"""Forecasts of step times on up to 1,024 ranks, by link, strategy and number of micro-batches."""

import dataclasses
from typing import Any

from anybatch.core.collectives import parse_link
from anybatch.core.geometry import SecondsFit
from anybatch.planner.forecast import forecast
from anybatch.planner.forecast_report import Cluster, ForecastReport, StrategyName, Workload
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.lines import significant

LINKS = ("1Gbit,1ms", "10Gbit,50us", "100Gbit,10us", "400Gbit,5us")
INNER_LINK, PER_HOST = "150GB/s,2us", 8
STRATEGIES: tuple[StrategyName, ...] = ("all_reduce", "zero1", "fsdp")
STEPS, MAX_RANKS = (1, 4, 16), 1024
SAMPLE_SECONDS, FIXED_SECONDS, UPDATE_SECONDS = 0.0028, 0.004, 0.003
"""Times of ResNet-50 at 224 x 224 in mixed precision on a GPU of 2017 (about 360 images per second): per sample, fixed
per micro-batch, and per update."""
GRADIENT_BYTES, MICRO_BATCH_SIZE, EFFECTIVE_BATCH_SIZE = 102_000_000, 32, 8192


def workload(
    *, steps: int | None = None, effective: int | None = EFFECTIVE_BATCH_SIZE, gradient: int = GRADIENT_BYTES
) -> Workload:
    """Return the workload of ResNet-50 for an effective batch size, or for `steps` micro-batches on every rank."""
    return Workload(
        micro_batch=SecondsFit(FIXED_SECONDS, SAMPLE_SECONDS),
        micro_batch_size=MICRO_BATCH_SIZE,
        gradient_bytes=gradient,
        effective_batch_size=effective,
        accumulation_steps=steps,
        update_seconds=UPDATE_SECONDS,
        num_parameters=161,
    )


def cluster(link: str, devices_per_host: int = PER_HOST) -> Cluster:
    """Return a cluster of hosts that are connected by `link`."""
    inner = parse_link(INNER_LINK) if devices_per_host > 1 else None
    return Cluster(link=parse_link(link), inner_link=inner, devices_per_host=devices_per_host)


def run(emit: Emit) -> Data:
    """Forecast strong scaling of every strategy, and weak scaling by number of micro-batches, on every link."""
    forecasts: list[dict[str, Any]] = []
    for done, link in enumerate(LINKS):
        emit_progress(emit, done, len(LINKS), link)
        for strategy in STRATEGIES:
            report = forecast(workload(), cluster(link), world_size=MAX_RANKS, strategy=strategy)
            forecasts.append({"link": link, "strategy": strategy, "scaling": "strong", **_values(report)})
        for steps in STEPS:
            report = forecast(workload(steps=steps, effective=None), cluster(link), world_size=MAX_RANKS)
            forecasts.append(
                {"link": link, "strategy": "all_reduce", "scaling": "weak", "steps": steps, **_values(report)}
            )
    return {"inner_link": INNER_LINK, "devices_per_host": PER_HOST, "forecasts": forecasts}


def _values(report: ForecastReport) -> Data:
    """Return the values of a forecast, six digits each, without the intervals of its times, which are exact here."""
    values = dataclasses.asdict(report)
    for name in ("micro_batch_interval", "update_interval", "queued_share"):
        del values["workload"][name]
    del values["largest_interval"]
    values["rows"] = [
        {name: significant(value, 6) if isinstance(value, float) else value for name, value in row.items()}
        for row in values["rows"]
    ]
    return values


EXPERIMENT = Experiment(
    name="forecasts",
    question="How fast would up to 1,024 ranks be, by connection, strategy and number of micro-batches?",
    run=run,
    seconds=4,
    tolerance=1e-9,
)
