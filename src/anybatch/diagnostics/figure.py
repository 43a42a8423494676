"""Pictures of reports: the errors of a check by layer and split, speed and memory by micro-batch size."""

import math
from pathlib import Path

from anybatch.diagnostics.check_report import EXACT, CheckReport
from anybatch.diagnostics.tune_report import TuneReport
from anybatch.events.matplotlib_files import import_drawing

FLOOR = 1e-18
"""Where errors of 0 are drawn."""
COLOURS = ("#00507F", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKS = "osD^vP"


def draw_errors(report: CheckReport, path: Path) -> None:
    """Draw each parameter's part in the gradient error of each cut, on a logarithmic axis."""
    figures = import_drawing("matplotlib.figure", [path])
    names = list(next((split.errors for split in report.splits if split.errors), {}))
    figure = figures.Figure(figsize=(8, max(2.5, 1.6 + 0.24 * len(names))), layout="constrained")
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
    axes.grid(visible=True, axis="x", color="#E6E6E6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=len(report.splits))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def draw_tuning(report: TuneReport, path: Path) -> None:
    """Draw samples per second and peak memory by micro-batch size; mark the fastest and the recommended size."""
    figure = import_drawing("matplotlib.figure", [path]).Figure(figsize=(7, 5), layout="constrained")
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
        axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if too_large:
            axes.axvline(too_large[0], color="#D55E00", linewidth=1, linestyle="--")
    memory.set_xscale("log", base=2)
    sizes = [one.size for one in report.sizes]
    memory.set_xticks(sizes, [str(size) for size in sizes])
    # Only sizes that were measured are marked on the axis.
    memory.minorticks_off()
    memory.set_xlabel("micro-batch size" + (f" (from {too_large[0]} on it does not fit)" if too_large else ""))
    speed.set_title(f"{report.num_samples} samples per step, {report.device}", loc="left", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
