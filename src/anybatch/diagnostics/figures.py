"""Pictures of the reports of check, tune, compare, advise and scale."""

import math
from pathlib import Path
from typing import Any

from anybatch.core.units import in_bytes, three_digits
from anybatch.diagnostics.advise import Advice
from anybatch.diagnostics.check_report import EXACT, CheckReport
from anybatch.diagnostics.compare import ComparisonReport
from anybatch.diagnostics.scale import ScaleReport
from anybatch.diagnostics.tune import TuneReport
from anybatch.errors import UserError
from anybatch.events.matplotlib_files import import_drawing

FLOOR = 1e-18
"""Where errors of 0 are drawn."""
COLOURS = ("#00507F", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKS = "osD^vP"


def _figure(path: Path, width: float, height: float) -> Any:  # noqa: ANN401 (of an optional dependency)
    return import_drawing("matplotlib.figure", [path]).Figure(figsize=(width, height), layout="constrained")


def _style(axes: Any, grid: str = "both") -> None:  # noqa: ANN401 (of an optional dependency)
    axes.grid(visible=True, axis=grid, color="#E6E6E6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401 (of an optional dependency)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def draw_errors(report: CheckReport, path: Path) -> None:
    """Draw each parameter's part in the gradient error of each cut, on a logarithmic axis."""
    names = list(next((split.errors for split in report.splits if split.errors), {}))
    figure = _figure(path, 8, max(2.5, 1.6 + 0.24 * len(names)))
    axes = figure.subplots()
    for number, split in enumerate(report.splits):
        # A cut that could not be run has no errors to show.
        if not split.errors:
            continue
        values = [max(split.errors[name], FLOOR) for name in names]
        shown = [value if math.isfinite(value) else 1e3 for value in values]
        axes.plot(
            shown,
            range(len(names)),
            linestyle="none",
            marker=MARKS[number % len(MARKS)],
            color=COLOURS[number % len(COLOURS)],
            label=f"micro-batches of {split.sizes[0]}: {split.verdict}",
        )
    axes.axvline(EXACT, color="#8C8C8C", linewidth=1)
    axes.axvline(report.tolerance, color="#8C8C8C", linewidth=1, linestyle="--")
    for limit, name in ((EXACT, "exact "), (report.tolerance, "rounding ")):
        axes.text(limit, -1.1, name, color="#595959", ha="right", va="top", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(FLOOR / 3, 1e1)
    # From the top down, in the order of the parameters.
    axes.set_ylim(len(names) - 0.4, -1.2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("part in the relative error of the gradient")
    axes.set_title(f"{report.num_samples} samples, un-split against cut: {report.verdict}", loc="left", fontsize=10)
    _style(axes, "x")
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=len(report.splits))
    _save(figure, path)


def draw_tuning(report: TuneReport, path: Path) -> None:
    """Draw samples per second and peak memory by micro-batch size; mark the fastest and the recommended size."""
    figure = _figure(path, 7, 5)
    speed, memory = figure.subplots(2, 1, sharex=True)
    rates = report.rates
    speed.plot(list(rates), list(rates.values()), color=COLOURS[0], marker="o")
    for word, size, mark, colour in (("fastest", report.best, "o", 1), ("recommended", report.recommended, "D", 2)):
        label = f"{word}: {size}"
        speed.plot([size], [rates[size]], linestyle="none", marker=mark, color=COLOURS[colour], label=label)
    speed.legend(loc="lower right", frameon=False, fontsize=8)
    peaks = {one.size: one.peak_bytes / 2**20 for one in report.sizes if one.peak_bytes is not None}
    memory.plot(list(peaks), list(peaks.values()), color=COLOURS[2], marker="s")
    too_large = [one.size for one in report.sizes if one.samples_per_second is None]
    for axes, label in ((speed, "samples per second"), (memory, "peak memory, MiB")):
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        _style(axes)
        if too_large:
            axes.axvline(too_large[0], color="#D55E00", linewidth=1, linestyle="--")
    memory.set_xscale("log", base=2)
    sizes = [one.size for one in report.sizes]
    memory.set_xticks(sizes, [str(size) for size in sizes])
    # Only sizes that were measured are marked on the axis.
    memory.minorticks_off()
    memory.set_xlabel("micro-batch size" + (f" (from {too_large[0]} on it does not fit)" if too_large else ""))
    speed.set_title(f"{report.num_samples} samples per step, {report.device}", loc="left", fontsize=9)
    _save(figure, path)


def draw_comparison(report: ComparisonReport, path: Path) -> None:
    """Draw a bar for each way: time of a sample with what communication adds, peak memory, bytes sent in a step."""
    results = report.results
    figure = _figure(path, 11, 1.6 + 0.36 * len(results))
    time, memory, traffic = figure.subplots(1, 3, sharey=True)
    rows = range(len(results))
    whole = [1e3 * one.seconds_per_sample for one in results]
    exposed = [value * (one.exposed_share or 0.0) for value, one in zip(whole, results, strict=True)]
    work = [value - beside for value, beside in zip(whole, exposed, strict=True)]
    time.barh(rows, work, color=COLOURS[0], label="work")
    time.barh(rows, exposed, left=work, color=COLOURS[1], label="exposed communication")
    peaks = [one.peak_bytes for one in results]
    memory.barh(rows, peaks, color=COLOURS[2])
    sent = [one.gradient_bytes for one in results]
    traffic.barh(rows, sent, color=COLOURS[1])
    written = (
        (time, "ms per sample", [three_digits(value) for value in whole], whole),
        (memory, "peak memory of a device", [in_bytes(value) for value in peaks], peaks),
        (traffic, "gradients sent by a rank in a step", [in_bytes(value) if value else "" for value in sent], sent),
    )
    for axes, label, words, ends in written:
        for row, word, end in zip(rows, words, ends, strict=True):
            axes.annotate(word, (end, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlabel(label, fontsize=9)
        axes.set_xticks([])
        axes.set_xlim(0, 1.35 * max([*ends, 1e-12]))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    devices = [f"{one.way.name} ({one.way.num_devices})" for one in results]
    time.set_yticks(rows, devices, fontsize=9)
    time.invert_yaxis()
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    below = f"{report.device}; effective batch {report.effective_batch_size}; in brackets the number of devices"
    figure.suptitle(f"{report.title}\n{below}", fontsize=10, x=0.01, ha="left")
    _save(figure, path)


_OCTAVES = 4
_POINTS = 161


def draw_advice(advice: Advice, path: Path) -> None:
    """Draw time and samples over the batch size, with the present size, the best one, and the noise scale."""
    if advice.interval[0] <= 0:
        message = "the noise scale is not known yet: measure more steps to draw it."
        raise UserError(message, code="unknown_noise")
    figure = _figure(path, 7, 5)
    time, samples = figure.subplots(2, 1, sharex=True)
    now, best = float(advice.size), max(1.0, advice.best)
    first = max(0.0, math.log2(min(now, best)) - _OCTAVES)
    last = math.log2(max(now, best)) + _OCTAVES
    sizes = [2 ** (first + (last - first) * place / (_POINTS - 1)) for place in range(_POINTS)]
    low, high = advice.interval
    ends = [advice.cost.at(low), advice.cost.at(min(high, 1e6 * now))]
    known = advice.cost if advice.is_known else ends[0]
    for axes, name, of in (
        (time, "time to the same loss", "seconds"),
        (samples, "samples to the same loss", "samples"),
    ):
        bands = [[getattr(end, of)(size, by=now) for size in sizes] for end in ends]
        axes.fill_between(sizes, *bands, color=COLOURS[4], alpha=0.35, linewidth=0, label="95% interval of the noise")
        axes.plot(sizes, [getattr(known, of)(size, by=now) for size in sizes], color=COLOURS[0], label="predicted")
        for word, size, mark, colour in ((f"now: {now:,.0f}", now, "o", 1), (f"best: {best:,.0f}", best, "D", 2)):
            height = getattr(known, of)(size, by=now)
            axes.plot([size], [height], linestyle="none", marker=mark, color=COLOURS[colour], label=word)
        axes.set_yscale("log")
        axes.set_ylabel(f"{name}, now = 1", fontsize=9)
        _style(axes)
    samples.set_xscale("log", base=2)
    ticks = [2**power for power in range(math.ceil(first), math.floor(last) + 1, 2)]
    samples.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    samples.set_xlabel("effective batch size, samples")
    time.legend(frameon=False, fontsize=8)
    scale = f"{advice.cost.critical_batch_size:,.0f}" if advice.is_known else f"at least {low:,.0f}"
    time.set_title(
        f"noise scale {scale} samples (an estimate), {advice.ranks}, {advice.device}", loc="left", fontsize=9
    )
    _save(figure, path)


_PARTS = 8


def draw_scaling(report: ScaleReport, path: Path) -> None:
    """Draw a bar for each number of ranks, made of the parts of a step, and the time by bucket size."""
    figure = _figure(path, 10, 4.2)
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    last = report.largest
    columns = report.columns
    names = [parts.ranks for parts in columns]
    begins = [0.0] * len(columns)
    colours = dict(zip((*last.parts.named, "other"), (*COLOURS, "#F0E442", "#BFBFBF"), strict=True))
    for part, colour in colours.items():
        widths = [1e3 * max(0.0, parts.other if part == "other" else parts.named[part]) for parts in columns]
        bars.barh(names, widths, left=begins, color=colour, label=part, height=0.55)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for place, parts in enumerate(columns):
        ideal = 1e3 * last.ideal * last.parts.world_size / parts.world_size
        bars.plot([ideal, ideal], [place - 0.38, place + 0.38], color="#262626", linewidth=1.5, linestyle="--")
    bars.invert_yaxis()
    bars.set_xlabel("ms of a step; dashed: linear")
    bars.set_title(f"{last.num_samples} samples per step, {report.settings.strategy}", loc="left", fontsize=10)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8, ncols=_PARTS)
    sizes = [in_bytes(one.cut.sizes[0]) for one in last.buckets]
    if sizes:
        places = range(len(sizes))
        curve.errorbar(
            places,
            [1e3 * one.step_seconds for one in last.buckets],
            yerr=[1e3 * one.longer.uncertainty for one in last.buckets],
            color=COLOURS[0],
            marker="o",
            capsize=3,
        )
        curve.set_xticks(
            places, [f"{size}\n{one.cut.num_buckets}" for size, one in zip(sizes, last.buckets, strict=True)]
        )
        curve.set_ylim(bottom=0)
        curve.set_xlabel("bucket size, and number of buckets")
        curve.set_ylabel("ms of a step without loading")
        curve.tick_params(axis="x", labelsize=8)
    else:
        curve.set_axis_off()
    for axes in (bars, curve):
        _style(axes, "x" if axes is bars else "y")
        axes.set_axisbelow(True)
    _save(figure, path)
