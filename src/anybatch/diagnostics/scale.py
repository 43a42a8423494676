"""Measures a job on 1 to N ranks, says why it is not linear, and tries the change."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anybatch.core.units import in_bytes, per_second
from anybatch.diagnostics.scaling_evidence import Cause, ScalingEvidence, StepBreakdown, causes_of, evidence_of
from anybatch.diagnostics.scaling_ranks import (
    DataFunction,
    RunSettings,
    ScaleRequest,
    compare_settings,
    measure_ranks,
)
from anybatch.diagnostics.step_times import slowest
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.parallel.world import World
from anybatch.testing import RankPool

_CAME, _CAME_IN_PART = 0.7, 0.3
_USUAL_LOW, _USUAL_HIGH = 25 * 2**20, 50 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedChange:
    """A tried change, interleaved with the unchanged run; `measured` is the step time of the prediction."""

    cause: str
    before: float
    after: float
    predicted: float
    measured: float

    @property
    def predicted_gain(self) -> float:
        """The predicted part of a step to save."""
        return 1.0 - self.predicted / self.measured

    @property
    def gain(self) -> float:
        """The saved part of a step."""
        return 1.0 - self.after / self.before

    def __str__(self) -> str:
        """Return both gains, and whether the prediction is confirmed."""
        ratio = self.gain / self.predicted_gain if self.predicted_gain > 0 else 0.0
        verdict = "confirmed" if ratio >= _CAME else "partly confirmed" if ratio >= _CAME_IN_PART else "not confirmed"
        return (
            f"tried for {self.cause}: {self.before * 1e3:.1f} ms -> {self.after * 1e3:.1f} ms per step, "
            f"{self.gain:.0%} faster (predicted {self.predicted_gain:.0%}): {verdict}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport:
    """The limits of scaling. `print(report)` shows them."""

    evidence: Mapping[int, ScalingEvidence]
    causes: tuple[Cause, ...]
    settings: RunSettings
    num_cores: int
    tried: TriedChange | None = None
    applies: bool = False

    @property
    def largest(self) -> ScalingEvidence:
        """The evidence on the most ranks."""
        return self.evidence[max(self.evidence)]

    @property
    def columns(self) -> list[StepBreakdown]:
        """The step by part for each number of ranks, from one rank on."""
        alone = self.largest.alone
        alone_first = [] if alone is None or 1 in self.evidence else [alone]
        return [*alone_first, *(one.parts for one in self.evidence.values())]

    @property
    def to_try(self) -> Cause | None:
        """The first cause whose change is one of the settings of a run, else None."""
        triable = (cause for cause in self.causes if cause.settings is not None and cause.predicted_step is not None)
        return next(triable, None)

    def __str__(self) -> str:
        """Return the tables and the verdict."""
        last = self.largest
        head = (
            f"{last.num_samples} samples per step in micro-batches of {last.micro_batch_size}, {last.device}, "
            f"{self.settings.strategy}, {in_bytes(last.gradient_bytes)} of gradients, "
            f"num_workers={self.settings.num_workers}"
        )
        lines = [head, "", *self._steps(), "", *self._verdict()]
        if self.tried is not None:
            lines += ["", str(self.tried)]
        elif self.applies and self.causes:
            lines += ["", "tried: nothing, because these changes are not settings of this run."]
        if last.buckets:
            lines += ["", *self._buckets()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {
            "settings": asdict(self.settings),
            "num_cores": self.num_cores,
            "evidence": {str(size): asdict(one) for size, one in self.evidence.items()},
            "causes": [asdict(cause) for cause in self.causes],
            "tried": None if self.tried is None else asdict(self.tried),
        }

    def _steps(self) -> list[str]:
        """Return the table of parts, with a column for each number of ranks."""
        last, columns = self.largest, self.columns
        ms = {part: [parts.named[part] for parts in columns] for part in last.parts.named}
        ms |= {"other": [parts.other for parts in columns], "whole step": [parts.step for parts in columns]}
        found = [self.evidence.get(parts.world_size) for parts in columns]
        rows = {
            "ms of a step": [parts.ranks for parts in columns],
            **{part: [f"{one * 1e3:.1f}" for one in row] for part, row in ms.items()},
            "samples/s": [per_second(float(f"{last.num_samples / parts.step:.3g}")) for parts in columns],
            "of linear": ["100%" if one is None else f"{one.efficiency:.0%}" for one in found],
        }
        lines = [f"  {name:<22}" + "".join(f"{word:>10}" for word in row) for name, row in rows.items()]
        if last.device == "cpu" and last.parts.world_size > self.num_cores:
            shared = f"{last.parts.world_size} ranks share {self.num_cores} cores: no strategy makes this linear."
            lines += ["", f"{shared} Measure with a core or a device per rank."]
        return lines

    def _verdict(self) -> list[str]:
        step = self.largest.parts.step
        if not self.causes:
            return ["no bottleneck: only compute takes a tenth of a step or more."]
        lines = []
        for number, cause in enumerate(self.causes):
            word = "bottleneck" if number == 0 else "then"
            lines.append(f"{word}: {cause.code}, {cause.cost / step:.0%} of a step: {cause.what}.")
            gain = ""
            if cause.predicted_step is not None:
                less = 1.0 - cause.predicted_step / step
                gain = f" Predicted: {cause.predicted_step * 1e3:.1f} ms per step, {less:.0%} less."
            lines.append(f"  change: {cause.change}.{gain}")
        return lines

    def _buckets(self) -> list[str]:
        last, best = self.largest, self.largest.best_bucket
        assert best is not None
        assert last.current_bucket is not None
        if len(last.buckets) == 1:
            sizes = _sizes(best.cut.sizes)
            return [f"bucket size: nothing to choose: {sizes} are the same {best.cut}."]
        lines = ["  buckets  ms of a step  longer than best  bucket_bytes"]
        for one in last.buckets:
            marks = [word for word, trial in (("in use", last.current_bucket), ("recommended", best)) if trial is one]
            note = f"  <- {', '.join(marks)}" if marks else ""
            longer = f"{one.longer.seconds * 1e3:.1f} ± {one.longer.uncertainty * 1e3:.1f}"
            sizes = _sizes(one.cut.sizes)
            lines.append(f"  {one.cut.num_buckets:>7}  {one.step_seconds * 1e3:>12.1f}  {longer:>16}  {sizes}{note}")
        return [*lines, "", self._advice()]

    def _advice(self) -> str:
        """Return the recommendation, compared with the usual advice."""
        last, best = self.largest, self.largest.best_bucket
        assert best is not None
        usual = [one for one in last.buckets if any(_USUAL_LOW <= size <= _USUAL_HIGH for size in one.cut.sizes)]
        note = "the usual 25 to 50 MiB were not among the sizes."
        if usual:
            nearest = min(usual, key=lambda one: one.step_seconds)
            extra = nearest.step_seconds / best.step_seconds - 1.0
            one_bucket = " (one bucket: the model has less)" if nearest.cut.num_buckets == 1 else ""
            holds = f"cost {extra:.0%}" if nearest.longer.is_sure and nearest is not best else "are as good"
            note = f"the usual 25 to 50 MiB{one_bucket} {holds} here."
        size = self.settings.bucket_bytes if best is last.current_bucket else best.cut.sizes[0]
        return f"recommended: bucket_bytes={size} ({in_bytes(size)}, {best.cut}); {note}"


def _sizes(sizes: Sequence[int]) -> str:
    # Sizes that differ by a few bytes look the same.
    return ", ".join(dict.fromkeys(map(in_bytes, sizes)))


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
        raise UserError(message, code="ranks_below_one")
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
