"""Pictures of the reports of compare and scale."""

from pathlib import Path
from typing import Any

from anybatch.core.units import in_bytes, three_digits
from anybatch.diagnostics.compare import ComparisonReport
from anybatch.diagnostics.scale import ScaleReport
from anybatch.events.matplotlib_files import import_drawing

COLOURS = ("#00507F", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def _figure(path: Path, width: float, height: float) -> Any:  # noqa: ANN401 (of an optional dependency)
    return import_drawing("matplotlib.figure", [path]).Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401 (of an optional dependency)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def draw_comparison(report: ComparisonReport, path: Path) -> None:
    """Draw bars for each setup: time per sample with the part of communication, peak memory, bytes sent in a step."""
    results = report.results
    figure = _figure(path, 11, 1.6 + 0.36 * len(results))
    time, memory, traffic = figure.subplots(1, 3, sharey=True)
    rows = range(len(results))
    whole = [1e3 * result.seconds_per_sample for result in results]
    exposed = [value * (result.exposed_share or 0.0) for value, result in zip(whole, results, strict=True)]
    work = [value - extra for value, extra in zip(whole, exposed, strict=True)]
    time.barh(rows, work, color=COLOURS[0], label="work")
    time.barh(rows, exposed, left=work, color=COLOURS[1], label="exposed communication")
    peaks = [result.peak_bytes for result in results]
    memory.barh(rows, peaks, color=COLOURS[2])
    sent = [result.gradient_bytes for result in results]
    traffic.barh(rows, sent, color=COLOURS[1])
    written = (
        (time, "ms per sample", [three_digits(value) for value in whole], whole),
        (memory, "peak memory of a device", [in_bytes(value) for value in peaks], peaks),
        (traffic, "gradients sent by a rank in a step", [in_bytes(value) if value else "" for value in sent], sent),
    )
    for axes, label, texts, ends in written:
        for row, text, end in zip(rows, texts, ends, strict=True):
            axes.annotate(text, (end, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlabel(label, fontsize=9)
        axes.set_xticks([])
        axes.set_xlim(0, 1.35 * max([*ends, 1e-12]))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    devices = [f"{result.way.name} ({result.way.num_devices})" for result in results]
    time.set_yticks(rows, devices, fontsize=9)
    time.invert_yaxis()
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    subtitle = f"{report.device}; effective batch {report.effective_batch_size}; in brackets the number of devices"
    figure.suptitle(f"{report.title}\n{subtitle}", fontsize=10, x=0.01, ha="left")
    _save(figure, path)


_PARTS = 8


def draw_scaling(report: ScaleReport, path: Path) -> None:
    """Draw the parts of a step as a bar for each number of ranks."""
    figure = _figure(path, 10, 3.4)
    bars = figure.subplots()
    last = report.evidence
    columns = report.columns
    names = [parts.ranks for parts in columns]
    begins = [0.0] * len(columns)
    colours = dict(zip((*last.parts.by_name, "other"), (*COLOURS, "#F0E442", "#BFBFBF"), strict=True))
    for part, colour in colours.items():
        widths = [1e3 * (parts.other if part == "other" else parts.by_name[part]) for parts in columns]
        bars.barh(names, widths, left=begins, color=colour, label=part, height=0.55)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for row, parts in enumerate(columns):
        ideal = 1e3 * last.ideal * last.parts.world_size / parts.world_size
        bars.plot([ideal, ideal], [row - 0.38, row + 0.38], color="#262626", linewidth=1.5, linestyle="--")
    bars.invert_yaxis()
    bars.set_xlabel("step time, ms; dashed: N ranks N times as fast")
    bars.set_title(f"{last.num_samples} samples per step, {report.settings.strategy}", loc="left", fontsize=10)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8, ncols=_PARTS)
    bars.grid(visible=True, axis="x", color="#E6E6E6", linewidth=0.6)
    bars.spines[["top", "right"]].set_visible(False)
    bars.set_axisbelow(True)
    _save(figure, path)
