"""`anybatch check RECIPE`: one batch of a recipe, un-split against cut."""

import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.status import Status
from anybatch.core.batch import Placement
from anybatch.core.splitting import Cut
from anybatch.core.tree import Batch
from anybatch.data.batches import batches
from anybatch.diagnostics.check import check
from anybatch.diagnostics.figure import draw_errors
from anybatch.recipes.job import Job
from anybatch.recipes.load import load_recipe
from anybatch.recipes.run.start import make_model


def check_recipe(
    recipe: str, *, num_samples: int, micro_batch_sizes: Sequence[int] | None, seed: int, figure: Path | None
) -> int:
    """Check one batch of a recipe, print the report, and return the exit status.

    Args:
        recipe: as `load_recipe` takes it.
        num_samples: of the batch; the first ones of the recipe's first epoch.
        micro_batch_sizes: cuts to try; None for three.
        seed: of the model's parameters, the order and what is drawn.
        figure: file for a picture of the errors by layer.
    """
    job = load_recipe(recipe)
    report = check(
        make_model(job, seed),
        job.loss,
        first_batch(job, num_samples, seed),
        micro_batch_sizes=micro_batch_sizes,
        norms=job.norms,
        seed=seed,
    )
    sys.stdout.write(f"{recipe}: is the gradient of micro-batches that of the batch?\n{report}\n")
    if figure is not None:
        draw_errors(report, figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE if report.equal else Status.NOT_EXACT


def first_batch(job: Job, num_samples: int, seed: int) -> Batch:
    """Return the first samples of a job's first epoch, collated as one micro-batch."""
    data = batches(
        job.dataset(),
        effective_batch_size=num_samples,
        steps=1,
        shuffle=job.shuffle,
        seed=seed,
        collate=job.collate,
    )
    return next(Placement(Cut(), 1, 0).micro_batches(next(iter(data))))
