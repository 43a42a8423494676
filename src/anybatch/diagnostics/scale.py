"""Measures the steps of a job on one rank and on N, and reports why N ranks are not N times as fast."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from anybatch.core.geometry import checked_int
from anybatch.core.units import columns, in_bytes, per_second
from anybatch.diagnostics.scaling_evidence import Cause, ScalingEvidence, StepBreakdown, causes_of, evidence_of
from anybatch.diagnostics.scaling_ranks import DataFunction, RankMeasurement, RunSettings
from anybatch.engine.arguments import TrainSpec
from anybatch.parallel.launchers import usable_cores
from anybatch.parallel.world import World
from anybatch.testing import RankPool

_MAX_WAIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport:
    """The reasons why N ranks are not N times as fast as one. `print(report)` shows the tables and the causes."""

    measured: ScalingEvidence = field(metadata={"json": False})
    causes: tuple[Cause, ...]
    settings: RunSettings
    num_cores: int

    @property
    def columns(self) -> list[StepBreakdown]:
        """The parts of a step on one rank and on all ranks."""
        return [parts for parts in (self.measured.alone, self.measured.parts) if parts is not None]

    def __str__(self) -> str:
        """Return the tables and the verdict."""
        last = self.measured
        head = (
            f"{last.num_samples} samples per step in micro-batches of {last.micro_batch_size}, {last.device}, "
            f"{self.settings.strategy}, {in_bytes(last.gradient_bytes)} of gradients, "
            f"num_workers={self.settings.num_workers}"
        )
        lines = [head, "", *self._steps(), "", *self._verdict()]
        if last.buckets:
            lines += ["", *self._buckets()]
        return "\n".join(lines)

    @property
    def evidence(self) -> Mapping[int, ScalingEvidence]:
        """The measurements, by number of ranks."""
        return {self.measured.parts.world_size: self.measured}

    def _steps(self) -> list[str]:
        """Return the table of parts, with columns for one rank and for all."""
        last, steps = self.measured, self.columns
        ms = {part: [parts.by_name[part] for parts in steps] for part in last.parts.by_name}
        ms |= {"other": [parts.other for parts in steps], "whole step": [parts.step for parts in steps]}
        rows = {
            "step time, ms": [parts.ranks for parts in steps],
            **{part: [f"{seconds * 1e3:.1f}" for seconds in row] for part, row in ms.items()},
            "samples/s": [per_second(float(f"{last.num_samples / parts.step:.3g}")) for parts in steps],
            "efficiency": [*["100%"] * (len(steps) - 1), self._efficiency()],
        }
        lines = columns([["  " + name, *row] for name, row in rows.items()])
        if last.device == "cpu" and last.parts.world_size > self.num_cores:
            shared = f"{last.parts.world_size} ranks share {self.num_cores} cores, so they cannot scale linearly."
            lines += ["", f"{shared} Measure with a core or a device per rank."]
        return lines

    def _efficiency(self) -> str:
        """Return the efficiency on all ranks, and its interval; loading is not included."""
        found = self.measured.efficiency
        # More than 100% is possible, if the data of a rank fits into its cache, but has to be sure.
        most = math.inf if found.low > 1.0 else 1.0
        return f"{min(found.value, most):.0%} ({found.low:.0%}-{min(found.high, most):.0%})"

    def _verdict(self) -> list[str]:
        step = self.measured.parts.step
        if self.measured.is_busy:
            return ["other programs use these cores: the times show nothing about this job. Stop them."]
        lines = [
            f"not clear: {name}, {max(0.0, part.low) / step:.0%} to {min(part.high / step, 1.0):.0%} of a step."
            for name, part in self.measured.unclear.items()
        ]
        if not self.causes and not lines:
            return ["no bottleneck: only compute takes a tenth of a step or more."]
        for number, cause in enumerate(self.causes):
            label = "bottleneck" if number == 0 else "then"
            lines.append(f"{label}: {cause.code}, {cause.cost / step:.0%} of a step: {cause.what}.")
            predicted, less = cause.predicted_step * 1e3, 1.0 - cause.predicted_step / step
            lines.append(f"  change: {cause.change}. Predicted: {predicted:.1f} ms per step, {less:.0%} less.")
        return lines

    def _buckets(self) -> list[str]:
        last, best = self.measured, self.measured.best_bucket
        assert best is not None
        assert last.current_bucket is not None
        if len(last.buckets) == 1:
            sizes = _sizes(best.cut.sizes)
            return [f"bucket size: makes no difference, because {sizes} all give {best.cut}."]
        rows, notes = [["  buckets", "step time, ms", "longer than best", "bucket_bytes"]], [""]
        for trial in last.buckets:
            marks = ["in use"] * (trial is last.current_bucket) + ["recommended"] * (trial is best and not last.is_busy)
            notes.append(f"  <- {', '.join(marks)}" if marks else "")
            longer, sizes = f"{trial.longer.value * 1e3:.1f}", _sizes(trial.cut.sizes)
            rows.append([f"  {trial.cut.num_buckets}", f"{trial.step_seconds * 1e3:.1f}", longer, sizes])
        table = [line + note for line, note in zip(columns(rows), notes, strict=True)]
        size = self.settings.bucket_bytes if best is last.current_bucket else best.cut.sizes[0]
        recommended = ["", f"recommended: bucket_bytes={size} ({in_bytes(size)}, {best.cut})."]
        return table if last.is_busy else table + recommended


def _sizes(sizes: Sequence[int]) -> str:
    # Sizes that differ by a few bytes are printed once.
    return ", ".join(dict.fromkeys(map(in_bytes, sizes)))


def measure_scaling(
    train: Callable[[], TrainSpec],
    data: DataFunction,
    *,
    num_ranks: int = 2,
    settings: RunSettings | None = None,
    bucket_sizes: Sequence[int] | None = None,
    max_seconds: float = 20.0,
    num_cores: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ScaleReport:
    """Start ranks on the CPUs of this machine, measure the steps of a job, and report what limits their speed.

    The interleaved kinds of step are: with reduction; without reduction, on all ranks simultaneously; on one rank
    alone; with other bucket sizes. Steps that load their samples run separately. All have
    the same effective batch size, so each of N ranks has an Nth of it.

    Exposed communication is the time that reduction adds to a step. Waiting for data is the time that loading adds to
    a step, compared with a step whose samples are loaded beforehand.

    Args:
        train: function () -> a new `TrainSpec`; must be picklable, like `MeasuredJob.train_spec`.
        data: function (steps) -> function (num_workers) -> the effective batches; must be picklable, like
            `MeasuredJob.data`.
        num_ranks: number of ranks; one rank is always measured too.
        settings: settings of the run; None: the defaults of `anybatch train`.
        bucket_sizes: bytes of the buckets to try; None: 1, 5, 25, 50 and 100 MiB, and parts of the gradients.
        max_seconds: approximate seconds of interleaved steps.
        num_cores: number of cores shared by the ranks; None: the number of cores that this process may use.
        on_progress: function (text) that receives the progress in another process; must be picklable.

    Raises:
        UserError: the number of ranks is below 1.
    """
    checked_int("num_ranks", num_ranks)
    measure = partial(
        scale_on_ranks,
        train,
        data,
        num_cores=usable_cores() if num_cores is None else num_cores,
        settings=settings,
        bucket_sizes=bucket_sizes,
        max_seconds=max_seconds,
        device="cpu",
        on_progress=on_progress,
    )
    with RankPool(num_ranks, timeout_seconds=_MAX_WAIT_SECONDS, start_processes=True) as pool:
        report: ScaleReport = pool.run(measure)[0]
    return report


def scale_on_ranks(
    train: Callable[[], TrainSpec],
    data: DataFunction,
    *,
    num_cores: int,
    settings: RunSettings | None = None,
    bucket_sizes: Sequence[int] | None = None,
    max_seconds: float = 20.0,
    device: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ScaleReport:
    """Run the measurements of `measure_scaling` on existing ranks; call this on every rank of a launcher.

    `num_cores` is the number of cores that the ranks of a host share; `device` is the device of this rank (None: the
    launcher's). Every rank returns the report.
    """
    settings = RunSettings() if settings is None else settings
    with World.from_environment(device=device) as world:
        times = RankMeasurement(
            world, train, data, settings, bucket_sizes=bucket_sizes, max_seconds=max_seconds, on_progress=on_progress
        ).times()
        evidence = evidence_of(world.gather_objects(times))
    settings = dataclasses.replace(settings, micro_batch_size=evidence.micro_batch_size)
    return ScaleReport(
        measured=evidence,
        causes=causes_of(evidence, settings, num_cores),
        settings=settings,
        num_cores=num_cores,
    )
