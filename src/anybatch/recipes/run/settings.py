"""The settings of a run: the given ones, else the ones of an earlier stretch, else the job's defaults."""

import dataclasses

from anybatch.core.batch_ramp import sizes_of
from anybatch.core.geometry import resolve_sizes
from anybatch.core.run_config import STANDARD, RunConfig
from anybatch.errors import UserError
from anybatch.recipes.job import Job

LEARNED = ("effective_batch_size", "learning_rate", "base_batch_size", "learning_rate_rule", "epochs", "steps")
"""The settings that determine the learning rate of a step."""


def resolve_settings(job: Job, given: RunConfig, former: RunConfig | None, *, world_size: int) -> RunConfig:
    """Return the settings of a run: the given ones, else its earlier ones, else the job's defaults.

    Without an effective batch size, a new run uses micro-batch size x accumulation steps x ranks, if both are given.
    """
    if former is not None and given.seed not in (None, former.seed):
        message = (
            f"seed={given.seed} differs from seed {former.seed} of the resumed run: another seed changes the order of "
            "the samples, and would repeat some of this epoch. Leave it out, or start a new run."
        )
        raise UserError(message)
    if given.micro_batch_tokens is not None and job.lengths is None:
        message = (
            f"micro_batch_tokens={given.micro_batch_tokens} splits batches by length, but the job has no lengths. "
            "Add lengths and a collate function: ab.Job(lengths='input_ids', collate=anybatch.data.Padded(), ...)."
        )
        raise UserError(message)
    settings = given.over(complete(job) if former is None else former.over(STANDARD))
    micro_batch_size = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None
    asked = settings.effective_batch_size
    assert asked is not None
    # A resumed run keeps its effective batch unless it is given.
    is_product = (
        former is None
        and given.effective_batch_size is None
        and None not in (given.accumulation_steps, micro_batch_size)
    )
    # Checks every stage of a ramp before the first step.
    resolved = [
        resolve_sizes(
            world_size=world_size,
            effective_batch_size=size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=settings.accumulation_steps,
        ).effective_batch_size
        for size in ((None,) if is_product else sizes_of(asked))
    ]
    return dataclasses.replace(
        settings,
        effective_batch_size=resolved[0] if is_product else asked,
        accumulation_steps=settings.accumulation_steps if micro_batch_size is None else None,
    )


def complete(job: Job) -> RunConfig:
    """Return the job's defaults with a value for every setting that needs one."""
    settings = job.defaults.over(STANDARD)
    if settings.epochs is None and settings.steps is None:
        settings = dataclasses.replace(settings, epochs=1)
    if settings.base_batch_size is None:
        assert settings.effective_batch_size is not None
        settings = dataclasses.replace(settings, base_batch_size=sizes_of(settings.effective_batch_size)[0])
    return settings
