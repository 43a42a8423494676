"""A comparison as a picture: time, memory and traffic of each way."""

from pathlib import Path

from anybatch.core.units import in_bytes, three_digits
from anybatch.diagnostics.comparison.report import ComparisonReport
from anybatch.diagnostics.figure import COLOURS
from anybatch.events.matplotlib_files import import_drawing


def draw_comparison(report: ComparisonReport, path: Path) -> None:
    """Draw a bar for each way: time of a sample with what communication adds, peak memory, bytes sent in a step."""
    figures = import_drawing("matplotlib.figure", [path])
    results = report.results
    figure = figures.Figure(figsize=(11, 1.6 + 0.36 * len(results)), layout="constrained")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
