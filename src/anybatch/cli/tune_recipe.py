"""`anybatch tune RECIPE`: the first batch of a recipe at many micro-batch sizes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.status import Status
from anybatch.data.batches import Batches, batches
from anybatch.diagnostics.figure import draw_tuning
from anybatch.diagnostics.tune import LOADED_STEPS, tune
from anybatch.engine.update.precision import PrecisionName
from anybatch.recipes.load import load_recipe
from anybatch.recipes.run.start import make_model

WORKERS = (0, 1, 2)


def tune_recipe(
    recipe: str,
    *,
    effective_batch_size: int | None,
    micro_batch_size: Sequence[int] | None,
    workers: Sequence[int] | None,
    precision: PrecisionName,
    seed: int,
    figure: Path | None,
) -> int:
    """Tune a recipe, print the report, and return the exit status.

    Args:
        recipe: as `load_recipe` takes it.
        effective_batch_size: samples of a step; None for the recipe's.
        micro_batch_size: sizes to try; None for a row of them.
        workers: numbers of loading processes to try; None for 0, 1 and 2.
        precision: number format of forward and backward.
        seed: of the parameters and the order.
        figure: file for a picture of the curves.
    """
    job = load_recipe(recipe)
    size = effective_batch_size or job.defaults.effective_batch_size
    dataset = job.dataset()

    def data(num_workers: int) -> Batches:
        return batches(
            dataset,
            effective_batch_size=size,
            steps=LOADED_STEPS + 1,
            shuffle=job.shuffle,
            seed=seed,
            collate=job.collate,
            num_workers=num_workers,
        )

    report = tune(
        lambda: make_model(job, seed),
        lambda named: job.optimizer(named, 1e-6 * job.defaults.learning_rate),  # one batch over and over may diverge
        job.loss,
        data,
        micro_batch_sizes=micro_batch_size,
        num_workers=WORKERS if workers is None else workers,
        precision=precision,
        norms=job.norms,
        rng=job.rng,
    )
    sys.stdout.write(f"{recipe}: which micro-batch size is the fastest?\n{report}\n")
    if figure is not None:
        draw_tuning(report, figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE
