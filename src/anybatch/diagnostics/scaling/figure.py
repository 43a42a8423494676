"""A picture of scaling: the parts of a step by number of ranks, and the step by bucket size."""

from pathlib import Path

from anybatch.core.units import in_bytes
from anybatch.diagnostics.figure import COLOURS
from anybatch.diagnostics.scaling.report import ScaleReport
from anybatch.events.matplotlib_files import import_drawing

_PARTS = 8


def draw_scaling(report: ScaleReport, path: Path) -> None:
    """Draw a bar for each number of ranks, made of the parts of a step, and the time by bucket size."""
    figure = import_drawing("matplotlib.figure", [path]).Figure(figsize=(10, 4.2), layout="constrained")
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="x" if axes is bars else "y", color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
