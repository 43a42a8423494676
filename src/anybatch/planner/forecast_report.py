"""The inputs of a forecast, and its report as text and as a picture."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anybatch.core.collectives import Link
from anybatch.core.geometry import SecondsFit, ceil_div, checked_int
from anybatch.core.units import columns, in_bytes, per_second, three_digits
from anybatch.diagnostics.figures import COLOURS
from anybatch.diagnostics.step_times import busy_cores
from anybatch.errors import UserError
from anybatch.events.matplotlib_files import FAINT, new_figure

StrategyName = Literal["all_reduce", "ddp", "zero1", "fsdp"]
FsdpReduction = Literal["every_micro_batch", "last_micro_batch"]
Algorithm = Literal["best", "ring", "tree", "gloo"]

BACKWARD_SHARE = 2 / 3
"""Share of the backward in a micro-batch's time: it computes two matrix products for each product of the forward."""
CONTROL_LATENCY_SECONDS = 100e-6
"""Minimum latency of a control-plane round, measured between two network namespaces of a busy machine
(benchmarks/control_plane.py). TCP accounts for 30 us (benchmarks/results/several_hosts_cpu_2026-11-24.md), waking
threads and Python for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a training step, and the times of one rank.

    Attributes:
        micro_batch: seconds of forward and backward as a function of the samples of a micro-batch.
        micro_batch_size: maximum samples of a micro-batch.
        gradient_bytes: bytes of one copy of all gradients, as communicated.
        effective_batch_size: samples of a step over all ranks; None if the samples per rank are fixed (weak scaling).
        accumulation_steps: micro-batches of each rank in a step; None for as few as possible.
        update_seconds: time of the optimizer on a rank that updates all parameters.
        bucket_bytes: size of a bucket of gradients, and of the weights that FSDP gathers together.
        backward_share: share of the backward in a micro-batch's time.
        variation: standard deviation of the ranks' times in a step, relative to the mean.
        num_parameters: number of tensors with a gradient; the last message of a step has a flag for each.
        counts_need_data: the loss counts tokens or other items in the data, so ranks exchange counts before a step.
        micro_batch_interval: ends of the 95% interval of a micro-batch's time, relative to `micro_batch`.
        update_interval: ends of the 95% interval of `update_seconds`; None for an exact time.
        queued_share: share of the measured time in which steps waited for a core.

    Raises:
        UserError: a number is out of range.
    """

    micro_batch: SecondsFit
    micro_batch_size: int
    gradient_bytes: int
    effective_batch_size: int | None = None
    accumulation_steps: int | None = None
    update_seconds: float = 0.0
    bucket_bytes: int = 25 * 2**20
    backward_share: float = BACKWARD_SHARE
    variation: float = 0.0
    num_parameters: int = 100
    counts_need_data: bool = False
    micro_batch_interval: tuple[float, float] = (1.0, 1.0)
    update_interval: tuple[float, float] | None = None
    queued_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "gradient_bytes", "bucket_bytes", "num_parameters"):
            checked_int(name, getattr(self, name))
        for name in ("effective_batch_size", "accumulation_steps"):
            if getattr(self, name) is not None:
                checked_int(name, getattr(self, name))
        for name in ("update_seconds", "variation", "backward_share"):
            value, maximum = getattr(self, name), 1.0 if name == "backward_share" else math.inf
            if not 0.0 <= value <= maximum:
                message = f"{name}={value} must be a number from 0 to {maximum}."
                raise UserError(message)
        if not 0.0 < self.micro_batch.seconds(self.micro_batch_size) < math.inf:
            message = f"a micro-batch of {self.micro_batch_size} samples must take a positive time: {self.micro_batch}."
            raise UserError(message)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each bucket, in the order of the backward: full buckets, then the rest."""
        full, rest = divmod(self.gradient_bytes, self.bucket_bytes)
        return (self.bucket_bytes,) * full + ((rest,) if rest else ())

    def share(self, num_ranks: int) -> tuple[int, int, int]:
        """Return the samples of the rank with the most, the number of its micro-batches, and their size.

        With an effective batch size, the samples are split into `accumulation_steps` parts, or into as few as fit.
        """
        if self.effective_batch_size is None:
            steps = self.accumulation_steps or 1
            return steps * self.micro_batch_size, steps, self.micro_batch_size
        share = ceil_div(self.effective_batch_size, num_ranks)
        steps = min(share, max(self.accumulation_steps or 1, ceil_div(share, self.micro_batch_size)))
        size = ceil_div(share, steps)
        return share, ceil_div(share, size), size

    def extremes(self) -> "tuple[Workload, ...]":
        """Return the workload with the ends of the intervals of its times, in all combinations."""
        fit, updates = self.micro_batch, self.update_interval or (self.update_seconds,)
        fits = [SecondsFit(end * fit.fixed_seconds, end * fit.sample_seconds) for end in self.micro_batch_interval]
        pairs = itertools.product(fits, updates)
        return tuple(dataclasses.replace(self, micro_batch=each, update_seconds=update) for each, update in pairs)

    def samples(self, num_ranks: int) -> int:
        """Return the samples of a step over all ranks."""
        return self.effective_batch_size or num_ranks * self.share(num_ranks)[0]

    def micro_batch_seconds(self, num_ranks: int) -> tuple[float, ...]:
        """Return the seconds of each micro-batch of the rank with the most samples; the last one may be smaller."""
        share, steps, size = self.share(num_ranks)
        return (self.micro_batch.seconds(size),) * (steps - 1) + (self.micro_batch.seconds(share - (steps - 1) * size),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The network between ranks, and how collectives use it.

    Attributes:
        link: link of a host.
        inner_link: link between the devices of a host; None for one device per host.
        devices_per_host: devices that share the host's link.
        algorithm: all-reduce algorithm over hosts: "ring", "tree", "best" (the faster of the two at each size), or
            "gloo" (gloo's ring, the only algorithm compared with measurements).
        control_link: link of the control plane; None for `link` with at least `CONTROL_LATENCY_SECONDS`.

    Raises:
        UserError: hosts have several devices but no inner link, or use gloo.
    """

    link: Link
    inner_link: Link | None = None
    devices_per_host: int = 1
    algorithm: Algorithm = "best"
    control_link: Link | None = None

    def __post_init__(self) -> None:
        checked_int("devices_per_host", self.devices_per_host)
        if self.devices_per_host > 1 and self.inner_link is None:
            message = f"inner_link is missing for devices_per_host={self.devices_per_host}: Link(...), or 300GB/s,2us."
            raise UserError(message)
        if self.devices_per_host > 1 and self.algorithm == "gloo":
            message = f"algorithm='gloo' does not support devices_per_host={self.devices_per_host}. Use 1, or 'ring'."
            raise UserError(message)

    @property
    def control(self) -> Link:
        """The link of the control plane."""
        if self.control_link is not None:
            return self.control_link
        return Link(max(CONTROL_LATENCY_SECONDS, self.link.latency_seconds), self.link.bytes_per_second)


USEFUL_GAIN = 1.5
"""Twice the ranks are useful if samples per second grow by at least this factor: +50%, half of the ideal +100%."""
_HEAD = ("ranks", "samples", "split", "step", "samples/s", "efficiency", "slowest", "network", "control")
_PARTS = (
    ("computing", "compute_seconds", 0),
    ("update", "update_seconds", 4),
    ("slowest rank", "straggler_seconds", 5),
    ("network", "exposed_seconds", 1),
    ("control plane", "control_seconds", 3),
)
_MAX_UNCLEAR = 4
"""A largest useful world that noise may change by more than this factor is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRow:
    """The forecast for a step on a number of ranks."""

    world_size: int  # number of ranks
    num_samples: int  # samples of the step, over all ranks
    micro_batch_size: int  # samples of a micro-batch
    accumulation_steps: int  # micro-batches of the rank with the most samples
    step_seconds: float  # time of the step, the sum of the last five fields
    samples_per_second: float  # throughput of all ranks
    efficiency: float  # throughput divided by (number of ranks x throughput of one rank)
    compute_seconds: float  # forwards and backwards of an average rank
    straggler_seconds: float  # delay of the slowest rank
    exposed_seconds: float  # communication of gradients and weights that computation does not hide
    control_seconds: float  # exposed time of the control plane: counts and agreement
    update_seconds: float  # the optimizer's update


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastReport:
    """Predicted steps on increasing numbers of ranks; `print(report)` shows the whole report."""

    workload: Workload  # the sizes and times that the forecast is based on
    cluster: Cluster  # the network
    strategy: StrategyName  # how ranks sum gradients
    reduction: FsdpReduction | None  # when fsdp reduces; None for other strategies
    rows: tuple[ForecastRow, ...]  # one row for each number of ranks, ascending
    largest_useful: int | None  # ranks up to which each doubling brings `USEFUL_GAIN`; None: no limit found
    why: str  # the reason for this limit, as a clause
    largest_interval: tuple[int | None, int | None]  # the same for the intervals of the measured times
    unvalidated: tuple[str, ...]  # parts of the forecast that were not compared with measurements

    def __str__(self) -> str:
        """Return tables, the largest useful number of ranks, and the assumptions."""
        low, high = map(_ranks, self.largest_interval)
        ends = f" (95% interval: {low} to {high})" * (low != high)
        useful = f"largest useful world: {_ranks(self.largest_useful)}{ends}; {self.why}."
        if self.doubt:
            useful = f"largest useful world: not clear; {self.doubt}."
        lines = [
            *self._heading(),
            "",
            *self._table(),
            "",
            useful,
            f"(useful: each doubling brings at least {USEFUL_GAIN} times the samples/s)",
            "",
            *self._assumptions(),
        ]
        return "\n".join(lines)

    @property
    def doubt(self) -> str:
        """Why the measured times show no largest useful world; empty if they do."""
        low, high = (end or math.inf for end in self.largest_interval)
        noisy = "the noise of the measured times allows {} to {}".format(*map(_ranks, self.largest_interval))
        return busy_cores(self.workload.queued_share) or noisy * (high > _MAX_UNCLEAR * low)

    def _heading(self) -> list[str]:
        work, net = self.workload, self.cluster
        size = work.micro_batch_size
        batch = (
            f"effective batch of {work.effective_batch_size:,} samples (strong scaling)"
            if work.effective_batch_size is not None
            else f"{work.accumulation_steps or 1} x {size} samples on each rank (weak scaling)"
        )
        hosts = "" if net.inner_link is None else f", {net.devices_per_host} devices per host over {net.inner_link}"
        when = f", reduction {self.reduction}" if self.reduction else ""
        computing, update = work.micro_batch.seconds(size), work.update_seconds
        times = _interval(computing, [computing * end for end in work.micro_batch_interval])
        updates = _interval(update, work.update_interval or (update, update))
        one_rank = f"one rank: {times} for {size} samples, {updates} for the update"
        return [
            f"{self.strategy}{when}, {batch}",
            f"{one_rank}; {in_bytes(work.gradient_bytes)} of gradients in buckets of {in_bytes(work.bucket_bytes)}",
            f"link {net.link}{hosts}; all-reduce: {net.algorithm}; control plane over {net.control}",
        ]

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [_HEAD]
        for row in self.rows:
            parts = (row.straggler_seconds, row.exposed_seconds, row.control_seconds)
            rows.append(
                (
                    f"{row.world_size:,}",
                    f"{row.num_samples:,}",
                    f"{row.accumulation_steps} x {row.micro_batch_size}",
                    f"{three_digits(1000 * row.step_seconds)} ms",
                    per_second(row.samples_per_second),
                    f"{row.efficiency:.0%}",
                    *(f"{part / row.step_seconds:.0%}" for part in parts),
                )
            )
        return [f"  {line}" for line in columns(rows, num_left=0)]

    def _assumptions(self) -> list[str]:
        work = self.workload
        lines = [
            "assumed: no contention between ranks; gradients are ready at an even rate during the last backward,",
            f"  which is {work.backward_share:.0%} of a micro-batch;",
            f"  ranks' times are normally distributed (variation {work.variation:.1%}), and all wait for the slowest;",
            "  ranks agree in about log2 N rounds, each with the latency of the control link (100 us).",
        ]
        if self.unvalidated:
            lines.append(f"not validated against measurements: {'; '.join(self.unvalidated)}.")
        return lines


def _ranks(number: int | None) -> str:
    return "no limit found" if number is None else f"{number:,} rank{'s' * (number != 1)}"


def _interval(seconds: float, ends: Sequence[float]) -> str:
    low, high = (three_digits(1000 * end) for end in ends)
    return f"{three_digits(1000 * seconds)} ms" + f" ({low} to {high})" * (low != high)


def draw_forecast(report: ForecastReport, path: Path) -> None:
    """Draw two charts over the number of ranks: samples per second (predicted and ideal), and the parts of a step.

    Raises:
        UserError: matplotlib is not installed, or the file name does not end in .png, .svg or .pdf.
        OSError: the file cannot be written.
    """
    with new_figure([path], 8.0, 6.0) as figure:
        speed, parts = figure.subplots(2, 1, sharex=True)
        sizes = [row.world_size for row in report.rows]
        speeds = [row.samples_per_second for row in report.rows]
        perfect = [speeds[0] * size for size in sizes]
        speed.plot(sizes, perfect, color=FAINT, linestyle="--", linewidth=1, label="ideal (one rank times ranks)")
        speed.plot(sizes, speeds, color=COLOURS[0], marker="o", label="forecast")
        if report.largest_useful is not None and not report.doubt and report.largest_useful <= sizes[-1]:
            for axes in (speed, parts):
                axes.axvline(report.largest_useful, color=COLOURS[1], linewidth=1, linestyle=":")
            speed.plot([], [], color=COLOURS[1], linewidth=1, linestyle=":", label="largest useful world")
        speed.set_yscale("log", base=2)
        speed.yaxis.set_major_formatter("{x:,g}")
        speed.minorticks_off()
        speed.set_ylabel("samples per second")
        shares = [[getattr(row, name) / row.step_seconds for row in report.rows] for _, name, _ in _PARTS]
        parts.stackplot(
            sizes,
            shares,
            labels=[name for name, _, _ in _PARTS],
            colors=[COLOURS[number] for _, _, number in _PARTS],
            alpha=0.85,
        )
        parts.set_ylim(0, 1)
        parts.set_ylabel("part of a step")
        parts.set_xlabel("ranks")
        parts.set_xscale("log", base=2)
        parts.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8, rotation=45)
        parts.minorticks_off()
        for axes in (speed, parts):
            axes.grid(visible=True, linewidth=0.6)
        speed.legend(fontsize=8, loc="upper left")
        # An opaque background, since the legend overlaps the areas.
        parts.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, loc="lower left")
        note = f"not validated: {'; '.join(report.unvalidated)}" if report.unvalidated else "gloo's ring, validated"
        speed.set_title(f"{report.strategy} over {report.cluster.link}\n{note}", loc="left", fontsize=9)
