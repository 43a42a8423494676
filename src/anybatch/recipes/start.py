"""Builds a job: completes its settings, and calls its functions in the right order."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import resolve_sizes
from anybatch.core.learning_rate import ScaledRate, scale_optimizer
from anybatch.core.records import Observer
from anybatch.core.run_config import STANDARD, RunConfig
from anybatch.core.schedules import BatchRamp, sizes_of
from anybatch.core.token_budget import token_budget
from anybatch.data.batches import Batches, batches
from anybatch.engine.arguments import Hardware
from anybatch.engine.engine import Engine
from anybatch.engine.schedule import SchedulerFunction
from anybatch.errors import DataError, UserError
from anybatch.recipes.job import Job

LEARNED = ("effective_batch_size", "learning_rate", "base_batch_size", "learning_rate_rule", "epochs", "steps")
"""The settings that determine the learning rate of a step."""


def resolve_settings(job: Job, given: RunConfig, former: RunConfig | None, *, world_size: int) -> RunConfig:
    """Return the settings of a run: the given settings, else the resumed run's settings, else the job's defaults."""
    if former is not None and given.seed not in (None, former.seed):
        message = (
            f"seed={given.seed} differs from seed {former.seed} of the resumed run: another seed changes the order of "
            "the samples, and would repeat some of this epoch. Omit the seed, or start a new run."
        )
        raise UserError(message, code="other_seed")
    if given.micro_batch_tokens is not None and job.lengths is None:
        message = (
            f"micro_batch_tokens={given.micro_batch_tokens} splits batches by length, but the job has no lengths. "
            "Add lengths and a collate function: ab.Job(lengths='input_ids', collate=anybatch.data.Padded(), ...)."
        )
        raise UserError(message, code="needs_lengths")
    settings = given.with_defaults(complete(job) if former is None else former.with_defaults(STANDARD))
    micro_batch_size = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None
    effective_batch_size = settings.effective_batch_size
    assert effective_batch_size is not None
    # Check every size of a ramp (a growing batch size) before the first step.
    for size in sizes_of(effective_batch_size):
        resolve_sizes(
            world_size=world_size,
            effective_batch_size=size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=settings.accumulation_steps,
        )
    return settings if micro_batch_size is None else dataclasses.replace(settings, accumulation_steps=None)


def complete(job: Job) -> RunConfig:
    """Return the job's defaults with a value for every setting that needs one."""
    settings = job.defaults.with_defaults(STANDARD)
    if settings.epochs is None and settings.steps is None:
        settings = dataclasses.replace(settings, epochs=1)
    if settings.base_batch_size is None:
        assert settings.effective_batch_size is not None
        settings = dataclasses.replace(settings, base_batch_size=sizes_of(settings.effective_batch_size)[0])
    return settings


Hyperparameters = Mapping[str, Any]
_SCALED: Final = ("lr", "betas", "alpha", "eps")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRun:
    """A job that is ready to step.

    ```python
    run = start(job, micro_batch_size=16)
    for batch in run.batches:
        report = run.engine.step(batch)
    print(run.evaluate())
    ```

    `batches` are the effective batches of the run; `held_out` are the batches of the evaluation, or None. `rates` and
    `hyperparameters` are the scaled values of each parameter group, before a scheduler changes them.
    """

    job: Job
    engine: Engine
    batches: Batches
    held_out: Batches | None
    rates: tuple[ScaledRate, ...]
    hyperparameters: tuple[Hyperparameters, ...]

    def evaluate(self) -> dict[str, float]:
        """Return the job's metrics on its held-out data, with averaged weights if there are any; {} without data."""
        if self.held_out is None or self.job.evaluate is None:
            return {}
        averaged = self.job.defaults.average_decay is not None
        return self.engine.evaluate(self.held_out, self.job.evaluate.metric, averaged=averaged)


def start(
    job: Job,
    config: RunConfig | None = None,
    *,
    schedule_steps: int | None = None,
    num_workers: int = 0,
    check_loss: bool = True,
    observer: Observer | None = None,
    **hardware: Any,  # noqa: ANN401 (each is declared by Hardware)
) -> JobRun:
    """Build a job's model, optimizer, scheduler and batches with the given settings, else with `job.defaults`.

    The learning rate belongs to the base batch size, and is scaled to the effective batch size. The scheduler is built
    last, so that it starts from the scaled rate; `schedule_steps` is its length (None: the number of batches).
    `hardware` are fields of `Hardware` that override those in `config`.
    """
    config = (config or RunConfig()).with_defaults(complete(job))
    size, rate = config.effective_batch_size, config.learning_rate
    assert size is not None
    assert rate is not None
    job = dataclasses.replace(job, defaults=config)
    dataset = job.dataset()
    # A step is at most the whole data set; the same limit applies to the base batch size.
    first = sizes_of(size)[0]
    step_size = _largest_step(dataset, first)
    base = _largest_step(dataset, config.base_batch_size or first)
    rates: list[ScaledRate] = []
    hyperparameters: list[Hyperparameters] = []
    # An optimizer without a known rule can still be used at its tuned batch size.
    rule = config.learning_rate_rule or ("none" if step_size == base else None)

    def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        built = job.optimizer(named_parameters, rate)
        rates.extend(scale_optimizer(built, base_batch_size=base, effective_batch_size=step_size, rule=rule))
        # A scheduler overwrites these values when it is created; a resume with changed settings needs the originals.
        hyperparameters.extend(
            {name: copy.deepcopy(group[name]) for name in _SCALED if name in group} for group in built.param_groups
        )
        return built

    data = job.train_batches(
        dataset,
        effective_batch_size=size,
        epochs=config.epochs,
        steps=config.steps,
        seed=config.seed or 0,
        num_workers=num_workers,
    )
    spec = dataclasses.replace(
        job.train_spec(seed=config.seed, precision=config.precision),
        # With a ramp the engine gets no size, since batches have different sizes.
        effective_batch_size=None if isinstance(size, BatchRamp) else size,
        optimizer=optimizer,
        # A resumed run keeps its original schedule, regardless of the remaining steps.
        scheduler=scheduler_function(job, num_steps_of(data) if schedule_steps is None else schedule_steps),
        check_loss=check_loss,
    )
    engine = Engine.from_spec(spec, Hardware(**_hardware_fields(config) | hardware), observer=observer)
    if isinstance(size, BatchRamp):
        text = f"steps of {size}; the learning rate is scaled to {step_size:,} and stays constant over the ramp"
        engine.decisions["samples"] = text
    elif step_size < size:
        text = f"steps of {step_size:,} samples (the whole data set) instead of {size:,}, also for the learning rate"
        engine.decisions["samples"] = text
    return JobRun(
        job=job,
        engine=engine,
        batches=data,
        held_out=_held_out(job, max(sizes_of(size))),
        rates=tuple(rates),
        hyperparameters=tuple(hyperparameters),
    )


def _hardware_fields(config: RunConfig) -> dict[str, Any]:
    """Return the settings that are fields of `Hardware`, by name."""
    names, tokens = {field.name for field in dataclasses.fields(Hardware)}, config.micro_batch_tokens
    found = {name: value for name, value in config.given.items() if name in names}
    return found if tokens is None else found | {"micro_batch_size": token_budget(tokens)}


def _largest_step(dataset: object, effective_batch_size: int) -> int:
    """Return the samples of the largest step: at most the whole data set, because batches do not cross epochs."""
    try:
        return min(effective_batch_size, max(1, len(dataset)))  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a stream without a length
        return effective_batch_size


def scheduler_function(job: Job, num_steps: int | None) -> SchedulerFunction | None:
    """Return a function that builds the job's scheduler for `num_steps` steps; None if the job has none."""
    make = job.scheduler
    if make is None:
        return None
    if num_steps is None:
        message = (
            "the job's scheduler needs the number of steps, but the data set has no length. "
            "Set the number of steps (--steps, or steps= in defaults=ab.RunConfig(...)), or omit the scheduler."
        )
        raise DataError(message, code="needs_length")
    return lambda optimizer: make(optimizer, num_steps)


def num_steps_of(data: Batches) -> int | None:
    """Return the number of steps to the end of the batches; None if the data has no length."""
    try:
        return len(data)
    except TypeError:
        return None


def _held_out(job: Job, effective_batch_size: int) -> Batches | None:
    if job.evaluate is None:
        return None
    size = job.evaluate.effective_batch_size or effective_batch_size
    # A list of lengths belongs to the training data; a name or a function works for other data too.
    lengths = job.lengths if isinstance(job.lengths, str) or callable(job.lengths) else None
    data = job.evaluate.dataset()
    return batches(data, effective_batch_size=size, shuffle=False, collate=job.collate, lengths=lengths)
