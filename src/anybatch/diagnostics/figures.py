"""Pictures of the reports of compare and scale."""

from collections.abc import Sequence
from pathlib import Path

from anybatch.core.units import in_bytes, three_digits
from anybatch.diagnostics.compare import ComparisonReport
from anybatch.diagnostics.scale import ScaleReport
from anybatch.events.matplotlib_files import INK, new_figure

COLOURS = ("#00507F", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def draw_comparison(report: ComparisonReport, path: Path) -> None:
    """Draw bars for each setup: time per sample with the part of communication, peak memory, bytes sent in a step."""
    results = report.results
    times = [1e3 * result.seconds_per_sample for result in results]
    exposed = [value * (result.exposed_share or 0.0) for value, result in zip(times, results, strict=True)]
    peaks, sent = [result.peak_bytes for result in results], [result.gradient_bytes for result in results]
    panels: Sequence[tuple[str, Sequence[float], Sequence[str]]] = (
        ("ms per sample; orange: exposed communication", times, [three_digits(value) for value in times]),
        ("peak memory of a device", peaks, [in_bytes(value) for value in peaks]),
        ("gradients sent by a rank in a step", sent, [in_bytes(value) if value else "" for value in sent]),
    )
    names = [f"{result.way.name} ({result.way.num_devices})" for result in results]
    with new_figure([path], 11.0, 1.6 + 0.36 * len(results)) as figure:
        axes = figure.subplots(1, 3, sharey=True)
        for panel, colour, (label, values, texts) in zip(axes, COLOURS[::2], panels, strict=True):
            panel.bar_label(panel.barh(names, values, color=colour), texts, padding=3, fontsize=8)
            panel.set_xlabel(label, fontsize=9)
            panel.set_xticks([])
            panel.set_xlim(0, 1.35 * max([*values, 1e-12]))
        starts = [whole - extra for whole, extra in zip(times, exposed, strict=True)]
        axes[0].barh(names, exposed, left=starts, color=COLOURS[1])
        axes[0].invert_yaxis()
        subtitle = f"{report.device}; effective batch {report.effective_batch_size}; in brackets the number of devices"
        figure.suptitle(f"{report.title}\n{subtitle}", fontsize=10, x=0.01, ha="left")


_PARTS = 8


def draw_scaling(report: ScaleReport, path: Path) -> None:
    """Draw the parts of a step as a bar for each number of ranks."""
    last, columns = report.measured, report.columns
    names, begins = [parts.ranks for parts in columns], [0.0] * len(columns)
    colours = dict(zip((*last.parts.by_name, "other"), (*COLOURS, "#F0E442", "#BFBFBF"), strict=True))
    with new_figure([path], 10.0, 3.4) as figure:
        bars = figure.subplots()
        for part, colour in colours.items():
            widths = [1e3 * (parts.other if part == "other" else parts.by_name[part]) for parts in columns]
            bars.barh(names, widths, left=begins, color=colour, label=part, height=0.55)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        for row, parts in enumerate(columns):
            ideal = 1e3 * last.ideal * last.parts.world_size / parts.world_size
            bars.plot([ideal, ideal], [row - 0.38, row + 0.38], color=INK, linewidth=1.5, linestyle="--")
        bars.invert_yaxis()
        bars.set_xlabel("step time, ms; dashed: N ranks N times as fast")
        bars.set_title(f"{last.num_samples} samples per step, {report.settings.strategy}", loc="left", fontsize=10)
        bars.grid(visible=True, axis="x", linewidth=0.6)
        figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", fontsize=8, ncols=_PARTS)
