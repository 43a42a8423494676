"""Compares ways of using devices on one job: runs it in all of them, interleaved, and measures their cost."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles
from typing import cast

import torch

from anybatch.core.batch import EffectiveBatch
from anybatch.core.geometry import ceil_div
from anybatch.diagnostics.comparison.measure import ComparedJob, RankFigures, measure_on_rank
from anybatch.diagnostics.comparison.report import ComparisonReport, WayResult, slowest
from anybatch.diagnostics.comparison.ways import Way, ways_of
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.memory.host_memory import device_name
from anybatch.testing.ranks import RankPool

_FEWEST_FOR_QUARTILES = 4
_DEFAULT_CPU_RANKS = 2
_DEFAULT_ACCUMULATION_STEPS = 4
"""Where no micro-batch size was given."""


def compare(
    train: Callable[[], TrainSpec],
    data: Callable[[], Iterable[EffectiveBatch]],
    *,
    effective_batch_size: int,
    micro_batch_size: int | None = None,
    num_devices: int | None = None,
    device_type: str | None = None,
    num_samples: float = 1e6,
    price_per_hour: float | None = None,
    num_rounds: int = 5,
    most_seconds: float = 60.0,
    title: str = "ways of using devices",
    tell: Callable[[str], None] | None = None,
) -> ComparisonReport:
    """Run a job in all ways of using devices, interleaved, and compare time, memory, traffic and gradients.

    Each way is built again in every round, makes a step to warm up and three that are timed. On several ranks the time
    of a step is taken from the slowest rank; communication adds the difference to a step of each rank's share
    alone, run on all ranks simultaneously. Each rank has one thread.

    Args:
        train: function () -> a new `TrainSpec`; at the top of a module, so that ranks can import it.
        data: function () -> effective batches of `effective_batch_size`, at least four, such as `ab.batches`; likewise.
        effective_batch_size: samples of one update.
        micro_batch_size: most samples of one forward and backward, where the batch is accumulated; None for a quarter
            of a rank's share.
        num_devices: devices of the ways that use several; None for all GPUs, or two ranks on the CPU.
        device_type: "cuda" or "cpu"; None: "cuda" if there are enough devices, else "cpu".
        num_samples: samples that device-hours are given for.
        price_per_hour: of one device; None for no price.
        num_rounds: rounds at most.
        most_seconds: start no round after this many seconds; there is at least one.
        title: the first line of the report.
        tell: function (text) that receives the progress, in another process; at the top of a module.

    Raises:
        BatchSizeError: sizes that do not fit together.
        UserError: there are fewer devices than were asked for, a number is not above 0, or ranks could not be started.
    """
    numbers = {"num_samples": num_samples, "price_per_hour": price_per_hour, "num_rounds": num_rounds}
    for name, value in (*numbers.items(), ("most_seconds", most_seconds)):
        if value is not None and not 0.0 < value < math.inf:
            message = f"{name}={value} must be a finite number above 0."
            raise UserError(message)
    found_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices is None:
        on_cpu = device_type == "cpu" or not found_devices
        num_devices = min(_DEFAULT_CPU_RANKS, effective_batch_size) if on_cpu else found_devices
    size = micro_batch_size or max(1, ceil_div(effective_batch_size, num_devices) // _DEFAULT_ACCUMULATION_STEPS)
    ways = ways_of(effective_batch_size=effective_batch_size, micro_batch_size=size, num_devices=num_devices)
    kind = device_type or ("cuda" if found_devices >= num_devices else "cpu")
    if kind == "cuda" and found_devices < num_devices:
        message = f"{num_devices} CUDA devices were asked for, and there are {found_devices}. Use fewer, or the CPU."
        raise UserError(message)
    job = ComparedJob(
        train=train,
        data=data,
        ways=ways,
        device_type=kind,
        num_rounds=num_rounds,
        most_seconds=most_seconds,
        tell=tell,
    )
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    with RankPool(num_devices, backend=backend, timeout_seconds=600 + 20 * most_seconds) as pool:
        outcomes = pool.outcomes(measure_on_rank, job)
    failed = next((outcome.error for outcome in outcomes if outcome.error), None)
    if failed is not None:
        message = f"the comparison could not be made: {failed.strip().splitlines()[-1]}"
        raise UserError(message)
    ranks: Sequence[Mapping[str, RankFigures]] = [outcome.value for outcome in outcomes]
    measured = [way for way in ways if not ranks[0][way.name].reason]
    results = {way.name: _result(way, [rank[way.name] for rank in ranks[: way.num_ranks]]) for way in measured}
    native = results.get("native")
    return ComparisonReport(
        title=title,
        device=f"{num_devices} x " * (num_devices > 1) + device_name(torch.device(kind)),
        effective_batch_size=effective_batch_size,
        micro_batch_size=size,
        results=tuple(one if native is None else one.with_variance_of(native) for one in results.values()),
        unmeasured={way.name: ranks[0][way.name].reason for way in ways if ranks[0][way.name].reason},
        num_samples=num_samples,
        price_per_hour=price_per_hour,
    )


def _result(way: Way, figures: Sequence[RankFigures]) -> WayResult:
    steps = slowest([one.step_seconds for one in figures])
    seconds = median(steps)
    alone = median(slowest([one.alone_seconds for one in figures])) if way.num_ranks > 1 else None
    reserved = [one.reserved_bytes for one in figures if one.reserved_bytes is not None]
    return WayResult(
        way=way,
        seconds_per_step=seconds,
        quartiles=(steps[0], steps[-1])
        if len(steps) < _FEWEST_FOR_QUARTILES
        else cast("tuple[float, float]", tuple(quantiles(steps, n=4)[::2])),
        exposed_seconds=None if alone is None else seconds - alone,
        peak_bytes=max(one.peak_bytes for one in figures),
        total_peak_bytes=sum(one.total_peak_bytes for one in figures),
        reserved_bytes=max(reserved, default=None),
        driver_bytes=max((one.driver_bytes for one in figures if one.driver_bytes is not None), default=None),
        gradient_bytes=max(one.gradient_bytes for one in figures),
        gradient_error=figures[0].gradient_error,
        gradient_variance=figures[0].gradient_variance,
    )
