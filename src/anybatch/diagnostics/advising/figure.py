"""Advice as a picture: predicted time and samples to the same loss, by effective batch size."""

import math
from pathlib import Path

from anybatch.diagnostics.advising.advice import Advice
from anybatch.diagnostics.figure import COLOURS
from anybatch.errors import UserError
from anybatch.events.matplotlib_files import import_drawing

_OCTAVES = 4
_POINTS = 161


def draw_advice(advice: Advice, path: Path) -> None:
    """Draw time and samples over the batch size, with the present size, the best one, and the noise scale."""
    if advice.interval[0] <= 0:
        message = "the noise scale is not known yet: measure more steps to draw it."
        raise UserError(message)
    figure = import_drawing("matplotlib.figure", [path]).Figure(figsize=(7, 5), layout="constrained")
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
        axes.grid(visible=True, color="#E6E6E6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    samples.set_xscale("log", base=2)
    ticks = [2**power for power in range(math.ceil(first), math.floor(last) + 1, 2)]
    samples.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    samples.set_xlabel("effective batch size, samples")
    time.legend(frameon=False, fontsize=8)
    scale = f"{advice.cost.critical_batch_size:,.0f}" if advice.is_known else f"at least {low:,.0f}"
    time.set_title(
        f"noise scale {scale} samples (an estimate), {advice.ranks}, {advice.device}", loc="left", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
