"""Draw a forecast: samples per second by ranks, and the parts of a step."""

from pathlib import Path

from anybatch.diagnostics.figure import COLOURS
from anybatch.events.matplotlib_files import import_drawing
from anybatch.planner.forecast.forecast_report import ForecastReport

_PARTS = (
    ("computing", "compute_seconds", 0),
    ("update", "update_seconds", 4),
    ("slowest rank", "straggler_seconds", 5),
    ("network", "exposed_seconds", 1),
    ("control plane", "control_seconds", 3),
)
_FAINT = "#8C8C8C"


def draw_forecast(report: ForecastReport, path: Path) -> None:
    """Draw predicted and ideal samples per second, and the parts of a step below; both by ranks.

    Args:
        report: result of `forecast`.
        path: the file, which ends in .png, .svg or .pdf.

    Raises:
        UserError: matplotlib is not installed, or the file name does not end in .png, .svg or .pdf.
        OSError: the file cannot be written.
    """
    figure = import_drawing("matplotlib.figure", [path]).Figure(figsize=(8, 6), layout="constrained")
    speed, parts = figure.subplots(2, 1, sharex=True)
    sizes = [row.world_size for row in report.rows]
    alone = report.rows[0].samples_per_second
    perfect = [alone * size for size in sizes]
    speed.plot(sizes, perfect, color=_FAINT, linestyle="--", linewidth=1, label="ideal (one rank times ranks)")
    speed.plot(sizes, [row.samples_per_second for row in report.rows], color=COLOURS[0], marker="o", label="forecast")
    if report.largest_useful is not None and report.largest_useful <= sizes[-1]:
        for axes in (speed, parts):
            axes.axvline(report.largest_useful, color=COLOURS[1], linewidth=1, linestyle=":")
        speed.plot([], [], color=COLOURS[1], linewidth=1, linestyle=":", label="largest useful world")
    speed.set_yscale("log")
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
        axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False, fontsize=8, loc="upper left")
    # An opaque background, since the legend overlaps the areas.
    parts.legend(framealpha=0.9, edgecolor="none", fontsize=8, loc="lower left")
    note = f"not validated: {'; '.join(report.unvalidated)}" if report.unvalidated else "gloo's ring, validated"
    speed.set_title(f"{report.strategy} over {report.cluster.link}\n{note}", loc="left", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
