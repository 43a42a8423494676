"""Measure a job on 1 to N ranks, say why it is not linear, and try the change."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence

from anybatch.diagnostics.scaling.bottleneck import causes_of
from anybatch.diagnostics.scaling.breakdown import Evidence, evidence_of
from anybatch.diagnostics.scaling.measure import (
    DataFunction,
    RunSettings,
    ScaleRequest,
    compare_settings,
    measure_ranks,
)
from anybatch.diagnostics.scaling.phase_clock import StepSeconds
from anybatch.diagnostics.scaling.report import ScaleReport, TriedChange
from anybatch.engine.spec import TrainSpec
from anybatch.errors import UserError
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
) -> ScaleReport:
    """Start ranks on the CPUs of this machine, measure the steps of a job, and say what keeps them from being faster.

    On each number of ranks whole steps are run in turns: with reduction, without it (each rank its own share, at the
    same time), on one rank alone, in other bucket sizes, with compressed gradients, in larger micro-batches. Steps that
    load their samples are run by themselves. All is measured at one effective batch size, so that N ranks have an Nth
    of it each.

    Exposed communication is the time of a step with reduction minus that of the same step without; waiting for data is
    what a step that loads waits longer than one whose samples are there.

    Args:
        train: function () -> what is trained, made anew; it can be pickled, as `MeasuredJob.train_spec` can.
        data: function (steps=) -> function num_workers -> effective batches; it can be pickled, too.
        ranks: numbers of ranks; 1 is measured beside every other.
        settings: of the run; None for those of `anybatch train`.
        bucket_sizes: bytes of the buckets to try; None for 1, 5, 25, 50 and 100 MiB and some of the model's own.
        most_seconds: about the seconds that steps in turns may take, for each number of ranks.
        apply: try the change that belongs to the first cause.
        num_cores: that ranks share; None asks the system.

    Raises:
        UserError: no number of ranks, or one below 1.
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
    )
    # One rank alone is measured beside the others, at the same time of day.
    sizes = sizes if len(sizes) == 1 else [size for size in sizes if size > 1]
    evidence: dict[int, Evidence] = {}
    tried = None
    for size in reversed(sizes):  # the largest first: it takes the most, and the others its micro-batch size
        with RankPool(size, timeout_seconds=_MOST_WAITED, start_processes=True) as pool:
            evidence[size] = evidence_of(pool.run(measure_ranks, request)[0])
            request = dataclasses.replace(
                request, settings=dataclasses.replace(settings, micro_batch_size=evidence[size].micro_batch_size)
            )
            if apply and size == sizes[-1]:
                tried = _try(pool, request, evidence[size], cores)
    evidence = dict(sorted(evidence.items()))
    return ScaleReport(
        evidence=evidence,
        causes=causes_of(evidence[sizes[-1]], request.settings, cores),
        settings=request.settings,
        num_cores=cores,
        tried=tried,
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # In a container fewer cores may be usable than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _try(pool: RankPool, request: ScaleRequest, evidence: Evidence, num_cores: int) -> TriedChange | None:
    """Try the change of the first cause that has one to try."""
    causes = causes_of(evidence, request.settings, num_cores)
    first = next(iter(causes), None)
    if first is None or first.settings is None or first.predicted_step is None:
        return None
    both = pool.run(compare_settings, request, request.settings, first.settings)[0]
    return TriedChange(
        before=_step([one[0] for one in both]),
        after=_step([one[1] for one in both]),
        predicted=first.predicted_step,
        measured=evidence.parts.step,
    )


def _step(ranks: Sequence[Sequence[StepSeconds]]) -> float:
    slowest = [max(step.whole for step in steps) for steps in zip(*ranks, strict=True)]
    found: float = statistics.median(slowest)
    return found
