"""`compare`: runs a job with several training setups, and reports time, memory, traffic and gradients."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from anybatch.core.batch import EffectiveBatch
from anybatch.core.geometry import ceil_div
from anybatch.core.units import columns, in_bytes, three_digits
from anybatch.diagnostics.compared_ranks import RankFigures, measure_on_rank
from anybatch.diagnostics.compared_setups import TrainingSetup, training_setups
from anybatch.diagnostics.step_times import Estimate, busy_cores, estimate
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.memory.device_memory import counting_text, device_name
from anybatch.parallel.launchers import usable_cores
from anybatch.testing.ranks import RankPool

_MAX_ROUNDING = 1e-4
"""A larger relative error means a different gradient; rounding in float32 or TF32 causes a smaller error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupResult:
    """The measurements of one setup."""

    way: TrainingSetup
    round_seconds: tuple[float, ...]  # of a whole step in each round; the slowest rank determines a step
    exposed: Estimate | None  # seconds that communication adds to a step; None on one rank
    peak_bytes: int  # maximum over ranks
    total_peak_bytes: int  # sum over ranks
    reserved_bytes: int | None  # by the allocator, maximum over ranks; None on a CPU
    driver_bytes: int | None  # in use on a rank's device, as in nvidia-smi; None on a CPU
    gradient_bytes: int  # passed to collectives by a rank in a step
    gradient_error: float | None  # relative to the unsplit batch in plain PyTorch; None for another batch size

    @property
    def seconds_per_step(self) -> float:
        """Median of the seconds of a step."""
        return median(self.round_seconds)

    @property
    def seconds_per_sample(self) -> float:
        """Seconds of a step divided by its samples."""
        return self.seconds_per_step / self.way.num_samples

    @property
    def exposed_share(self) -> float | None:
        """The fraction of a step that communication adds, at least 0; None on one rank."""
        return None if self.exposed is None else max(0.0, self.exposed.value / self.seconds_per_step)

    @property
    def exposed_text(self) -> str:
        """`exposed_share` as text; its upper limit if it may be 0."""
        if self.exposed is None or math.isinf(self.exposed.high):
            return "-"
        limit = f"<{max(0.01, self.exposed.high / self.seconds_per_step):.0%}"
        return f"{self.exposed_share:.0%}" if self.exposed.is_sure else limit

    def time_relative_to(self, other: "SetupResult") -> Estimate:
        """Return the time of a sample divided by the time with another setup, compared round by round."""
        factor = other.way.num_samples / self.way.num_samples
        return estimate([factor * a / b for a, b in zip(self.round_seconds, other.round_seconds, strict=True)])

    @property
    def device_hours(self) -> float:
        """Device-hours for a million samples."""
        return self.way.num_devices * self.seconds_per_sample * 1e6 / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonReport:
    """Measurements of several training setups. `print(report)` shows the table."""

    title: str  # first line of the report
    device: str  # name of the devices
    effective_batch_size: int  # samples of one update in all setups except the small batch
    micro_batch_size: int  # maximum samples of one forward and backward in the setups that accumulate
    results: tuple[SetupResult, ...]  # the measured setups
    unmeasured: Mapping[str, str]  # name of each other setup -> why it was not measured
    queued_share: float = 0.0  # share of the time of steps in which ranks waited for a core

    def __str__(self) -> str:
        """Return the tables, the setups that were not measured, and the conclusions."""
        sizes = f"effective batch {self.effective_batch_size}, micro-batches of {self.micro_batch_size} if accumulated"
        lines = [self.title, f"{self.device}; {sizes}", ""]
        lines += [*columns(self._work()), "", *columns(self._costs())]
        on_device = any(result.reserved_bytes is not None for result in self.results)
        lines += ["", counting_text("allocated" if on_device else "in tensors")]
        if self.unmeasured:
            lines += ["", "not measured:"]
            lines += [f"  {name}: {reason}" for name, reason in self.unmeasured.items()]
        return "\n".join([*lines, "", *self.sentences()])

    def sentences(self) -> list[str]:
        """Return conclusions, one sentence each."""
        if not self.results:
            return ["nothing could be measured."]
        results, by_name = self._full_size_results, {result.way.name: result for result in self.results}
        smallest = min(results, key=lambda result: result.peak_bytes)
        found = [self._fastest(), f"least memory: {smallest.way.name}, {in_bytes(smallest.peak_bytes)} on a device."]
        native, accumulated = by_name.get("native"), by_name.get("accumulated")
        if native and accumulated:
            found.append(
                f"accumulated, relative to native (unsplit): {accumulated.peak_bytes / native.peak_bytes:.0%} of the "
                f"memory, {self._times(accumulated, native, 'the time of a step')}."
            )
        each, last = by_name.get("DDP without no_sync"), by_name.get("DDP accumulated")
        if each and last and last.gradient_bytes:
            found.append(
                f"no_sync until the last micro-batch: {in_bytes(last.gradient_bytes)} reduced per step instead of "
                f"{in_bytes(each.gradient_bytes)}, {self._times(each, last, 'the speed')}."
            )
        others = [result.way.name for result in results if (result.gradient_error or 0.0) > _MAX_ROUNDING]
        worst = max(result.gradient_error or 0.0 for result in results)
        found.append(
            f"gradients that differ from the unsplit batch: {', '.join(others)}. `anybatch check` finds the cause."
            if others
            else f"all of these have the gradient of the unsplit batch (relative error at most {worst:.0e})."
        )
        if "DataParallel" in by_name and by_name["DataParallel"].reserved_bytes is None:
            found.append(
                "DataParallel ran its replicas one after another, because there are no GPUs: use DDP's time instead."
            )
        return found

    @property
    def fastest(self) -> tuple[SetupResult, ...]:
        """The setups that may be the fastest, by the intervals of their times; empty if that may be any of several."""
        results = sorted(self._full_size_results, key=lambda result: result.seconds_per_sample)
        equal = tuple(result for result in results if result.time_relative_to(results[0]).low <= 1.0)
        return () if self.doubt or len(equal) == len(results) > 1 else equal

    @property
    def doubt(self) -> str:
        """Why the times show no fastest setup; empty if they do."""
        if any(math.isinf(result.time_relative_to(result).high) for result in self.results):
            return "there was no time for 6 rounds; use a longer --seconds"
        return busy_cores(self.queued_share)

    def _fastest(self) -> str:
        if not (equal := self.fastest):
            return f"no conclusion about speed: {self.doubt or 'the differences are smaller than the noise'}."
        names = ", ".join(result.way.name for result in equal)
        equally = " (equal within the noise)" * (len(equal) > 1)
        return f"fastest: {names}{equally}, {three_digits(1 / equal[0].seconds_per_sample)} samples/s."

    def _times(self, result: SetupResult, other: SetupResult, what: str) -> str:
        times = result.time_relative_to(other)
        if self.doubt or times.low <= 1.0 <= times.high:
            return f"{what} does not clearly differ, {times}"
        return f"{times} times {what}"

    @property
    def _full_size_results(self) -> Sequence[SetupResult]:
        return [row for row in self.results if row.way.num_samples == self.effective_batch_size] or self.results

    def _work(self) -> list[list[str]]:
        rows = [["", "devices", "s/step", "ms/sample", "exposed", "gradients sent", "error"]]
        for result in self.results:
            times = three_digits(result.seconds_per_step), three_digits(1e3 * result.seconds_per_sample)
            sent = in_bytes(result.gradient_bytes) if result.gradient_bytes else "-"
            error = "-" if result.gradient_error is None else f"{result.gradient_error:.0e}"
            rows.append([result.way.name, str(result.way.num_devices), *times, result.exposed_text, sent, error])
        return rows

    def _costs(self) -> list[list[str]]:
        reserves = any(result.reserved_bytes is not None for result in self.results)
        head = ["", "peak/device", "all devices", *["reserved", "nvidia-smi"] * reserves]
        rows = [[*head, "code lines by hand", "with anybatch", "device-hours/million"]]
        for result in self.results:
            way = result.way
            row = [way.name, in_bytes(result.peak_bytes), in_bytes(result.total_peak_bytes)]
            row += [in_bytes(result.reserved_bytes or 0), in_bytes(result.driver_bytes or 0)] * reserves
            row += [str(way.lines_by_hand), str(way.lines_with_anybatch), three_digits(result.device_hours)]
            rows.append(row)
        return rows


def _slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the median seconds of a step in each round, on the slowest rank of each step."""
    return [median(map(max, zip(*steps, strict=True))) for steps in zip(*ranks, strict=True)]


_DEFAULT_CPU_RANKS = 2
_DEFAULT_ACCUMULATION_STEPS = 4
"""Micro-batches of a rank if no micro-batch size is given."""


def compare(
    train: Callable[[], TrainSpec],
    data: Callable[[], Iterable[EffectiveBatch]],
    *,
    effective_batch_size: int,
    micro_batch_size: int | None = None,
    num_devices: int | None = None,
    device_type: str | None = None,
    num_rounds: int = 9,
    max_seconds: float = 60.0,
    title: str = "training setups",
    on_progress: Callable[[str], None] | None = None,
) -> ComparisonReport:
    """Run a job with all training setups, interleaved, and compare time, memory, traffic and gradients.

    In every round, each setup gets a new engine, which runs a warm-up step and up to three timed steps. Setups are
    compared round by round, and differences within the noise are not reported. On several ranks, the slowest determines
    the time of a step. The time of communication is the difference from a step in which all ranks compute
    simultaneously without reducing gradients. Each rank has one thread.

    Args:
        train: function () -> a new `TrainSpec`; at the top of a module, so that ranks can import it.
        data: function () -> batches of `effective_batch_size`, such as `ab.batches`, of which the first is used; also
            importable.
        effective_batch_size: samples of one update.
        micro_batch_size: maximum samples of one forward and backward in setups that accumulate; None: a quarter of a
            rank's share.
        num_devices: devices for the setups that use several; None: all GPUs, or two ranks on the CPU.
        device_type: "cuda" or "cpu"; None: "cuda" if there are enough devices, else "cpu".
        num_rounds: maximum number of rounds.
        max_seconds: start no round after this many seconds; at least one round is run.
        title: the first line of the report.
        on_progress: function (text) that receives the progress, in another process; at the top of a module.

    Raises:
        BatchSizeError: the sizes contradict each other.
        UserError: there are fewer devices than requested, a number is not above 0, or a rank failed.
    """
    for name, value in (("num_rounds", num_rounds), ("max_seconds", max_seconds)):
        if not 0.0 < value < math.inf:
            message = f"{name}={value} must be a finite number above 0."
            raise UserError(message)
    found_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices is None:
        on_cpu = device_type == "cpu" or not found_devices
        num_devices = min(_DEFAULT_CPU_RANKS, effective_batch_size) if on_cpu else found_devices
    size = micro_batch_size or max(1, ceil_div(effective_batch_size, num_devices) // _DEFAULT_ACCUMULATION_STEPS)
    setups = training_setups(effective_batch_size=effective_batch_size, micro_batch_size=size, num_devices=num_devices)
    kind = device_type or ("cuda" if found_devices >= num_devices else "cpu")
    if kind == "cuda" and found_devices < num_devices:
        message = f"{num_devices} CUDA devices were requested, but there are {found_devices}. Use fewer, or the CPU."
        raise UserError(message, code="too_few_devices")
    measure = partial(
        measure_on_rank,
        train,
        data,
        setups,
        device_type=kind,
        num_rounds=num_rounds,
        max_seconds=max_seconds,
        on_progress=on_progress,
    )
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    with RankPool(num_devices, backend=backend, timeout_seconds=600 + 20 * max_seconds) as pool:
        outcomes = pool.outcomes(measure)
    failed = next((outcome.error for outcome in outcomes if outcome.error), None)
    if failed is not None:
        message = f"the comparison failed: {failed.strip().splitlines()[-1]}"
        raise UserError(message)
    ranks: Sequence[Mapping[str, RankFigures]] = [outcome.value for outcome in outcomes]
    measured = [setup for setup in setups if not ranks[0][setup.name].reason]
    results = {way.name: setup_result(way, [rank[way.name] for rank in ranks[: way.num_ranks]]) for way in measured}
    return ComparisonReport(
        title=title,
        device=f"{num_devices} x " * (num_devices > 1) + device_name(torch.device(kind)),
        effective_batch_size=effective_batch_size,
        micro_batch_size=size,
        results=tuple(results.values()),
        unmeasured={setup.name: ranks[0][setup.name].reason for setup in setups if ranks[0][setup.name].reason},
        queued_share=queued_share(measured, ranks, usable_cores()),
    )


def queued_share(setups: Sequence[TrainingSetup], ranks: Sequence[Mapping[str, RankFigures]], num_cores: int) -> float:
    """Return the share of time spent waiting for a core: of one rank, or of all if each has a core, if larger."""
    shares = [0.0]
    for number in {setup.num_ranks for setup in setups if setup.num_ranks <= num_cores} | {1}:
        figures = [rank[setup.name] for setup in setups if setup.num_ranks == number for rank in ranks[:number]]
        shares.append(
            sum(each.queued_seconds for each in figures) / max(sum(each.all_seconds for each in figures), 1e-9)
        )
    return max(shares)


def setup_result(setup: TrainingSetup, figures: Sequence[RankFigures]) -> SetupResult:
    """Return the result of a setup from the measurements of its ranks."""
    seconds = _slowest([rank.step_seconds for rank in figures])
    alone = _slowest([rank.unreduced_seconds for rank in figures])
    reserved = [rank.reserved_bytes for rank in figures if rank.reserved_bytes is not None]
    return SetupResult(
        way=setup,
        round_seconds=tuple(seconds),
        exposed=estimate([step - unreduced for step, unreduced in zip(seconds, alone, strict=True)]) if alone else None,
        peak_bytes=max(rank.peak_bytes for rank in figures),
        total_peak_bytes=sum(rank.total_peak_bytes for rank in figures),
        reserved_bytes=max(reserved, default=None),
        driver_bytes=max((rank.driver_bytes for rank in figures if rank.driver_bytes is not None), default=None),
        gradient_bytes=max(rank.gradient_bytes for rank in figures),
        gradient_error=figures[0].gradient_error,
    )
