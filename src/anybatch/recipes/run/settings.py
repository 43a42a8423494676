"""The settings of a run: the given ones, else the ones of an earlier stretch, else the job's defaults."""

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
"""The settings that determine the learning rate of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The given settings; None keeps the setting of the resumed run, or the job's default.

    Args:
        effective_batch_size: samples of one optimizer step, over all ranks, or a ramp.
        learning_rate: learning rate at the base batch size.
        base_batch_size: samples per step that the learning rate belongs to.
        learning_rate_rule: how it follows the effective batch size: "linear", "sqrt" or "none".
        epochs: passes over the data set, from the start of the run.
        steps: optimizer steps from the start of the run, instead of epochs.
        seed: seed of initial parameters, order, augmentation and the model's random numbers.
        micro_batch_size: maximum samples per forward and backward, or "auto"; "remeasure": "auto" without cached
            measurements.
        accumulation_steps: micro-batches per rank and step, instead of a micro-batch size.
        micro_batch_tokens: maximum tokens per forward and backward, with padding, instead of either.
        precision: "fp32", "bf16" or "fp16".
        strategy: how ranks sum gradients: "auto", or a name in `anybatch.parallel.registry`.
        average_decay: decay of an exponential moving average of the weights, between 0 and 1.
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
    """The resolved settings of a run, with the fields of `Choices`.

    `epochs` or `steps` is None. `accumulation_steps` and `micro_batch_tokens` are None unless one of them replaces
    `micro_batch_size`.
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
    # With defaults, because older runs do not have these settings.
    strategy: str = "auto"
    average_decay: float | None = None
    micro_batch_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return them as JSON for a run's header; a ramp as on the command line."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        size = self.effective_batch_size
        return values | {"effective_batch_size": size.notation if isinstance(size, BatchRamp) else size}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Settings":
        """Return the settings that `as_json` wrote."""
        size = values["effective_batch_size"]
        return cls(**{**values, "effective_batch_size": BatchRamp.parse(size) if isinstance(size, str) else size})


def resolve_settings(job: Job, choices: Choices, former: Settings | None, *, world_size: int) -> Settings:
    """Return the settings of a run: the given ones, else those it had before, else the job's.

    A new run with a micro-batch size and accumulation steps but without an effective batch size uses their product with
    the ranks.
    """
    chosen = {field.name: getattr(choices, field.name) for field in dataclasses.fields(choices)}
    given = {name: value for name, value in chosen.items() if value is not None}
    if choices.epochs is not None and choices.steps is not None:
        message = f"epochs={choices.epochs} and steps={choices.steps} contradict each other. Pass one of them."
        raise UserError(message)
    if former is not None and choices.seed not in (None, former.seed):
        message = (
            f"seed={choices.seed} differs from seed {former.seed} of the resumed run: another seed is another order of "
            "the samples, which would repeat some of this epoch. Leave it out, or start a new run."
        )
        raise UserError(message)
    if choices.micro_batch_tokens is not None:
        _refuse_two_cuts(job, choices)
    base = _defaults(job) if former is None else former
    # The given one replaces the other, which may be in the base.
    if "epochs" in given or "steps" in given:
        base = dataclasses.replace(base, epochs=None, steps=None)
    if given.keys() & {"micro_batch_size", "accumulation_steps", "micro_batch_tokens"}:
        base = dataclasses.replace(base, micro_batch_size="auto", accumulation_steps=None, micro_batch_tokens=None)
    settings = dataclasses.replace(base, **given)
    micro_batch_size = None if isinstance(settings.micro_batch_size, str) else settings.micro_batch_size
    # A resumed run keeps its effective batch unless it is given.
    is_product = (
        former is None
        and choices.effective_batch_size is None
        and None not in (choices.accumulation_steps, micro_batch_size)
    )
    asked = settings.effective_batch_size
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
            message = f"micro_batch_tokens={tokens} and {name}={value} contradict each other. Pass one of them."
            raise UserError(message)
    if job.lengths is None:
        message = (
            f"micro_batch_tokens={tokens} splits batches by length, but the job has no lengths. "
            "Add lengths and a collate function: ab.Job(lengths='input_ids', collate=anybatch.data.Padded(), ...)."
        )
        raise UserError(message)


def with_settings(settings: Settings, job: Job) -> Job:
    """Return the job with these settings as defaults."""
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
    """Return "name before -> after" for each changed setting."""
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
