"""The settings of a run: those asked for, else those of an earlier part of the run, else the job's defaults."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anybatch.core.batch_ramp import BatchRamp, sizes_of
from anybatch.core.geometry import resolve_sizes
from anybatch.core.learning_rate import ScalingRule
from anybatch.engine.update.precision import PrecisionName
from anybatch.errors import UserError
from anybatch.recipes.job import Job

MicroBatchSizeChoice = int | Literal["auto", "remeasure"]

LEARNED = ("effective_batch_size", "learning_rate", "base_batch_size", "learning_rate_rule", "epochs", "steps")
"""The settings that the learning rate of a step depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The settings asked for; None leaves one to the run that is resumed, or to the job's defaults.

    Args:
        effective_batch_size: samples of one optimizer step, over all ranks, or a ramp of them.
        learning_rate: at the base batch size.
        base_batch_size: samples per step that the learning rate belongs to.
        learning_rate_rule: how it follows the effective batch size: "linear", "sqrt" or "none".
        epochs: passes over the data set, from the very beginning.
        steps: optimizer steps from the very beginning, instead of epochs.
        seed: of the initial parameters, the order, the augmentation and the model's random numbers.
        micro_batch_size: most samples of one forward and backward, or "auto"; "remeasure" is "auto" without the
            measurements of earlier runs.
        accumulation_steps: micro-batches per rank and step, instead of a micro-batch size.
        micro_batch_tokens: most tokens of one forward and backward, padding included, instead of either.
        precision: "fp32", "bf16" or "fp16".
        strategy: how ranks sum gradients: "auto", or a name in `anybatch.parallel.registry`.
        average_decay: of an exponential moving average of the weights, between 0 and 1.
    """

    effective_batch_size: int | BatchRamp | None = None
    learning_rate: float | None = None
    base_batch_size: int | None = None
    learning_rate_rule: ScalingRule | None = None
    epochs: int | None = None
    steps: int | None = None
    seed: int | None = None
    micro_batch_size: MicroBatchSizeChoice | None = None
    accumulation_steps: int | None = None
    micro_batch_tokens: int | None = None
    precision: PrecisionName | None = None
    strategy: str | None = None
    average_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run; the fields are those of `Choices`, decided.

    `epochs` or `steps` is None, and so are `accumulation_steps` and `micro_batch_tokens`, unless one of them takes the
    place of a micro-batch size.
    """

    effective_batch_size: int | BatchRamp
    learning_rate: float
    base_batch_size: int
    learning_rate_rule: ScalingRule | None
    epochs: int | None
    steps: int | None
    seed: int
    micro_batch_size: MicroBatchSizeChoice
    accumulation_steps: int | None
    precision: PrecisionName
    # With defaults: folders of runs that were begun before these settings existed are read, too.
    strategy: str = "auto"
    average_decay: float | None = None
    micro_batch_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return them as a run's header has them: a ramp in the words of the command line."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        size = self.effective_batch_size
        return values | {"effective_batch_size": size.notation if isinstance(size, BatchRamp) else size}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """Return what `as_json` has written."""
        size = values["effective_batch_size"]
        return cls(**{**values, "effective_batch_size": BatchRamp.parse(size) if isinstance(size, str) else size})


def resolve_settings(job: Job, choices: Choices, former: Settings | None, *, world_size: int) -> Settings:
    """Return the settings of a run: those chosen, else those it had before, else the job's.

    The micro-batch size times the accumulation steps times the ranks is the effective batch size of a new run for
    which both are chosen and it is not.

    Raises:
        BatchSizeError: the three sizes contradict each other on so many ranks.
        UserError: both epochs and steps, or another seed than that of the run that is resumed.
    """
    chosen = {field.name: getattr(choices, field.name) for field in dataclasses.fields(choices)}
    given = {name: value for name, value in chosen.items() if value is not None}
    if choices.epochs is not None and choices.steps is not None:
        message = f"epochs={choices.epochs} and steps={choices.steps} both say where to stop. Give one of them."
        raise UserError(message)
    if former is not None and choices.seed not in (None, former.seed):
        message = (
            f"seed={choices.seed}, and the run that is resumed has seed {former.seed}: another seed is another order "
            "of the samples, in which some of this epoch would come twice. Leave it out, or begin a new run."
        )
        raise UserError(message)
    if choices.micro_batch_tokens is not None:
        _refuse_two_cuts(job, choices)
    base = _defaults(job) if former is None else former
    # The one that is given replaces the other one, which the base may have.
    if "epochs" in given or "steps" in given:
        base = dataclasses.replace(base, epochs=None, steps=None)
    if given.keys() & {"micro_batch_size", "accumulation_steps", "micro_batch_tokens"}:
        base = dataclasses.replace(base, micro_batch_size="auto", accumulation_steps=None, micro_batch_tokens=None)
    settings = dataclasses.replace(base, **given)
    micro_batch_size = None if isinstance(settings.micro_batch_size, str) else settings.micro_batch_size
    # A resumed run keeps its effective batch: to change it, it has to be named.
    is_product = (
        former is None
        and choices.effective_batch_size is None
        and None not in (choices.accumulation_steps, micro_batch_size)
    )
    asked = settings.effective_batch_size
    # Every stage of a ramp, so that one that contradicts is refused before the first step.
    resolved = [
        resolve_sizes(
            world_size=world_size,
            effective_batch_size=size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=settings.accumulation_steps,
        ).effective_batch_size
        for size in ((None,) if is_product else sizes_of(asked))
    ]
    assert resolved[0] is not None
    return dataclasses.replace(
        settings,
        effective_batch_size=resolved[0] if is_product else asked,
        accumulation_steps=settings.accumulation_steps if micro_batch_size is None else None,
    )


def _refuse_two_cuts(job: Job, choices: Choices) -> None:
    tokens = choices.micro_batch_tokens
    for name in ("micro_batch_size", "accumulation_steps"):
        value = getattr(choices, name)
        if value is not None:
            message = f"micro_batch_tokens={tokens} and {name}={value} both say how batches are cut. Give one of them."
            raise UserError(message)
    if job.lengths is None:
        message = (
            f"micro_batch_tokens={tokens} cuts batches by length, and the job does not say how long its samples are. "
            "Give it lengths and a collate function: ab.Job(lengths='input_ids', collate=anybatch.data.Padded(), ...)."
        )
        raise UserError(message)


def with_settings(settings: Settings, job: Job) -> Job:
    """Return the job with these settings as its defaults.

    Raises:
        BatchSizeError, UserError: a number that cannot be used.
    """
    defaults = dataclasses.replace(
        job.defaults,
        effective_batch_size=settings.effective_batch_size,
        learning_rate=settings.learning_rate,
        base_batch_size=settings.base_batch_size,
        learning_rate_rule=settings.learning_rate_rule,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    return dataclasses.replace(job, defaults=defaults, average_decay=settings.average_decay)


def differences(before: Settings, after: Settings, names: Iterable[str]) -> tuple[str, ...]:
    """Return "name before -> after" for each of the settings that is not as it was."""
    return tuple(
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    )


def _defaults(job: Job) -> Settings:
    defaults = job.defaults
    return Settings(
        effective_batch_size=defaults.effective_batch_size,
        learning_rate=defaults.learning_rate,
        base_batch_size=defaults.base_batch_size or sizes_of(defaults.effective_batch_size)[0],
        learning_rate_rule=defaults.learning_rate_rule,
        epochs=1 if defaults.epochs is None and defaults.steps is None else defaults.epochs,
        steps=defaults.steps,
        seed=0,
        micro_batch_size="auto",
        accumulation_steps=None,
        precision="fp32",
        average_decay=job.average_decay,
    )
