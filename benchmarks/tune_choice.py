"""Compare the choice of `anybatch tune` with the times of all sizes, and measure the cost of tuning.

Three recipes: digits (convolutions with GroupNorm), text (a transformer), and digits with BatchNorm, where the whole
batch is recommended unless a policy is chosen; with "keep", `tune` looks for the fastest size. Each recipe is tuned
three times with default options, in wall-clock time as users see it. Then whole steps run at every size, alternating
in turns of a fifth of a second, in CPU time of the process with one thread, so that other programs have little effect.
The figure is a size's step time relative to the fastest size in the same turn; the fastest size has the lowest
median.

    python benchmarks/tune_choice.py [--turns 12] [--out benchmarks/results/NAME.md]
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import report
import torch
from torch import nn

import anybatch as ab
from anybatch.diagnostics.repeated_steps import CachedBatch
from anybatch.diagnostics.tune import TuneReport, tune
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.recipes.digits import digits
from anybatch.recipes.load import MeasuredJob

NUM_TUNINGS = 3
TURN_SECONDS = 0.2


def with_batch_norm() -> ab.Job:
    """Return the recipe digits with BatchNorm instead of GroupNorm."""
    return dataclasses.replace(digits(), model=lambda: batch_normed(digits().model()))


def batch_normed(model: nn.Module) -> nn.Module:
    """Return a model with BatchNorm instead of its GroupNorms."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.GroupNorm):
            setattr(model, name, nn.BatchNorm2d(child.num_channels))
    return model


CASES: dict[str, tuple[str, str | None]] = {
    "digits": ("digits", None),
    "text": ("text", None),
    "digits with BatchNorm": (f"{__file__}:with_batch_norm", None),
    'the same, norms="keep"': (f"{__file__}:with_batch_norm", "keep"),
}
"""Recipe and policy for BatchNorm, by the name in the table."""


def tuned(recipe: str, norms: str | None) -> tuple[list[TuneReport], list[float]]:
    """Return the results of each tuning, and its seconds."""
    reports, seconds = [], []
    for _ in range(NUM_TUNINGS):
        job = MeasuredJob(recipe=recipe)
        begun = time.perf_counter()
        train = dataclasses.replace(job.train_spec(), norms=norms)  # type: ignore[arg-type]  # one of its words
        reports.append(tune(train, job.data(steps=1)(0)))
        seconds.append(time.perf_counter() - begun)
    return reports, seconds


def alternated(recipe: str, norms: str | None, sizes: list[int], num_turns: int) -> dict[int, list[float]]:
    """Return the seconds of a step at each size, turn by turn."""
    job = MeasuredJob(recipe=recipe)
    cached = CachedBatch(next(iter(job.data(steps=1)(0))))

    def stepper(size: int) -> Callable[[], object]:
        made: TrainSpec = dataclasses.replace(
            job.train_spec(),
            scheduler=None,
            check_loss=False,
            norms=norms or "keep",  # type: ignore[arg-type]
        )
        engine = ab.Engine.from_spec(made, Hardware(micro_batch_size=size))
        engine.step(cached)
        return lambda: engine.step(cached)

    steps = {size: stepper(size) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(num_turns):
        for size in sizes if turn % 2 else reversed(sizes):
            begun, number = time.process_time(), 0
            while not number or time.process_time() - begun < TURN_SECONDS:
                steps[size]()
                number += 1
            found[size].append((time.process_time() - begun) / number)
    return found


def rows(num_turns: int) -> Iterator[str]:
    """Yield a table row for each recipe, and after the table the rate of every size."""
    curves = []
    for name, (recipe, norms) in CASES.items():
        reports, seconds = tuned(recipe, norms)
        sizes = [one.size for one in reports[0].sizes]
        times = alternated(recipe, norms, sizes, num_turns)
        fastest = min(sizes, key=lambda size: statistics.median(times[size]))
        for each, taken in zip(reports, seconds, strict=True):
            pairs = zip(times[each.recommended], times[fastest], strict=True)
            ratios = [one / best for one, best in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            between = f"{low:.3f} to {high:.3f}"
            cells = (name, each.num_samples, each.recommended, fastest, f"{middle:.3f}", between, f"{taken:.1f}")
            yield f"| {' | '.join(map(str, cells))} |"
        middles = {
            size: statistics.median(one / best for one, best in zip(times[size], times[fastest], strict=True))
            for size in sizes
        }
        curves.append(f"- {name}: " + ", ".join(f"{size}: {ratio:.2f}" for size, ratio in middles.items()))
    yield ""
    yield "Times of all sizes by that of the fastest:"
    yield ""
    yield from curves


def main() -> None:
    """Tune, then time all sizes, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--turns", type=int, default=12, help="in which every size is timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("recipe", "samples", "recommended", "fastest", "time by the fastest", "quartiles", "tuned in, s")
    report.publish(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows(options.turns)],
        title="What tune recommends, against all sizes in turns",
        command=f"python benchmarks/tune_choice.py --turns {options.turns}",
        setting=f"1 thread, {options.turns} turns of {TURN_SECONDS} s for each size",
        out=options.out,
    )


if __name__ == "__main__":
    main()
