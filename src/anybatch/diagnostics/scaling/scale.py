"""Measure a job on 1 to N ranks, say why it is not linear, and try the change."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence

from anybatch.diagnostics.scaling.bottleneck import causes_of
from anybatch.diagnostics.scaling.breakdown import evidence_of
from anybatch.diagnostics.scaling.measure import (
    DataFunction,
    RunSettings,
    ScaleRequest,
    compare_settings,
    measure_ranks,
)
from anybatch.diagnostics.scaling.phase_clock import slowest
from anybatch.diagnostics.scaling.report import ScaleReport, TriedChange
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.parallel.world import World
from anybatch.testing import RankPool

_MOST_WAITED = 900.0


def measure_scaling(
    train: Callable[[], TrainSpec],
    data: DataFunction,
    *,
    ranks: Sequence[int] = (2,),
    settings: RunSettings | None = None,
    bucket_sizes: Sequence[int] | None = None,
    most_seconds: float = 20.0,
    apply: bool = False,
    num_cores: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> ScaleReport:
    """Start ranks on the CPUs of this machine, measure the steps of a job, and report what limits their speed.

    For each number of ranks, these steps are interleaved: with reduction, without reduction (all ranks run their shares
    at the same time), on one rank alone, with other bucket sizes, with compressed gradients, with larger micro-batches.
    Steps that load their samples run separately. The effective batch size is the same for all, so each of N ranks has
    an Nth of it.

    Exposed communication is the extra time of a step with reduction over one without; waiting for data is the extra
    wait of a step that loads over one with loaded samples.

    Args:
        train: function () -> a new `TrainSpec`; must be picklable, like `MeasuredJob.train_spec`.
        data: function (steps=) -> function num_workers -> effective batches; must be picklable.
        ranks: numbers of ranks; 1 is always measured too.
        settings: settings of the run; None: the defaults of `anybatch train`.
        bucket_sizes: bytes of the buckets to try; None for 1, 5, 25, 50 and 100 MiB and some of the model's own.
        most_seconds: approximate seconds of interleaved steps, for each number of ranks.
        apply: try the change for the first cause that has one.
        num_cores: number of cores shared by the ranks; None asks the system.
        tell: function (text) that receives the progress in another process; must be picklable.

    Raises:
        UserError: no number of ranks is given, or one is below 1.
    """
    sizes = sorted(set(ranks))
    if not sizes or sizes[0] < 1:
        message = f"ranks={list(ranks)} must be numbers of at least 1, such as (1, 2)."
        raise UserError(message)
    cores = usable_cores() if num_cores is None else num_cores
    settings = RunSettings() if settings is None else settings
    request = ScaleRequest(
        train=train,
        data=data,
        settings=settings,
        bucket_sizes=None if bucket_sizes is None else tuple(bucket_sizes),
        most_seconds=most_seconds,
        device="cpu",
        tell=tell,
    )
    # One rank alone is measured at the same time of day as the others.
    sizes = sizes if len(sizes) == 1 else [size for size in sizes if size > 1]
    reports: list[ScaleReport] = []
    for size in reversed(sizes):  # the most first: the others take the micro-batch size that is the fastest there
        with RankPool(size, timeout_seconds=_MOST_WAITED, start_processes=True) as pool:
            reports.insert(0, pool.run(scale_on_ranks, request, cores, apply and not reports)[0])
        request = dataclasses.replace(request, settings=reports[0].settings)
    return dataclasses.replace(
        reports[-1], evidence={size: report.largest for size, report in zip(sizes, reports, strict=True)}
    )


def scale_on_ranks(request: ScaleRequest, num_cores: int, apply: bool = False) -> ScaleReport:  # noqa: FBT001, FBT002 (handed on by a pool)
    """Run the measurements of `measure_scaling` on existing ranks; call this on every rank of a launcher.

    Args:
        request: the measurements to run.
        num_cores: number of cores shared by the ranks of a host.
        apply: try the change for the first cause that has one.

    Returns:
        The report, on every rank.
    """
    # Open all the time, so that ranks join once for both measurements.
    with World.from_environment(device=request.device):
        evidence = evidence_of(measure_ranks(request))
        settings = dataclasses.replace(request.settings, micro_batch_size=evidence.micro_batch_size)
        report = ScaleReport(
            evidence={evidence.parts.world_size: evidence},
            causes=causes_of(evidence, settings, num_cores),
            settings=settings,
            num_cores=num_cores,
            applies=apply,
        )
        # All ranks have the same times, and so find the same cause.
        cause = report.to_try if apply else None
        if cause is None or cause.settings is None or cause.predicted_step is None:
            return report
        before, after = zip(*compare_settings(request, settings, cause.settings), strict=True)
    tried = TriedChange(
        cause=cause.code,
        before=statistics.median(slowest(before)),
        after=statistics.median(slowest(after)),
        predicted=cause.predicted_step,
        measured=evidence.parts.step,
    )
    return dataclasses.replace(report, tried=tried)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # In a container fewer cores may be usable than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
