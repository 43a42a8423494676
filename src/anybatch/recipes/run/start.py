"""From a job to something that can be stepped: the order in which its functions are called, in one place."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from anybatch.core.batch_ramp import BatchRamp, sizes_of
from anybatch.core.learning_rate import ScaledRate, ScalingRule, scale_optimizer
from anybatch.core.records import Observer
from anybatch.data.batches import Batches, batches
from anybatch.engine.engine import Engine
from anybatch.engine.spec import Hardware
from anybatch.engine.update.precision import PrecisionName
from anybatch.engine.update.schedule import SchedulerFunction
from anybatch.errors import DataError
from anybatch.recipes.job import Job

Hyperparameters = Mapping[str, Any]
_SCALED: Final = ("lr", "betas", "alpha", "eps")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRun:
    """A job that is ready to be stepped.

    ```python
    run = start(job, micro_batch_size=16)
    for batch in run.batches:
        report = run.engine.step(batch)
    print(run.evaluate())
    ```

    Attributes:
        job: the job.
        engine: over a new model and optimizer.
        batches: the effective batches of the whole run.
        held_out: the batches of the job's evaluation; None where it has none.
        rates: how the learning rate of each parameter group was carried to the effective batch size.
        hyperparameters: of each parameter group, what depends on the batch size, before a scheduler changes it.
    """

    job: Job
    engine: Engine
    batches: Batches
    held_out: Batches | None
    rates: tuple[ScaledRate, ...]
    hyperparameters: tuple[Hyperparameters, ...]

    def evaluate(self) -> dict[str, float]:
        """Return the job's metrics on its held-out data, by the averaged weights if there are any; {} without data."""
        if self.held_out is None or self.job.evaluate is None:
            return {}
        averaged = self.job.average_decay is not None
        return self.engine.evaluate(self.held_out, self.job.evaluate.metric, averaged=averaged)


@dataclass(slots=True, eq=False)
class ScaledOptimizer:
    """Makes a job's optimizer and carries its learning rate to the effective batch size.

    Attributes:
        job: makes the optimizer.
        learning_rate: at the base batch size.
        base_batch_size: samples per step that the learning rate was found with.
        effective_batch_size: samples per step to train with.
        rule: how the learning rate follows; None for the optimizer's own rule.
        rates: how it was carried, for each parameter group; empty until the optimizer is made.
        hyperparameters: of each parameter group, as they were scaled; empty until the optimizer is made.
    """

    job: Job
    learning_rate: float
    base_batch_size: int
    effective_batch_size: int
    rule: ScalingRule | None
    rates: tuple[ScaledRate, ...] = field(default=(), init=False)
    hyperparameters: tuple[Hyperparameters, ...] = field(default=(), init=False)

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return a new optimizer over these parameters."""
        made = self.job.optimizer(named_parameters, self.learning_rate)
        self.rates = scale_optimizer(
            made,
            base_batch_size=self.base_batch_size,
            effective_batch_size=self.effective_batch_size,
            rule=self.rule,
        )
        # A scheduler overwrites these in its constructor; a resumed run whose settings change needs them as they are.
        self.hyperparameters = tuple(
            {name: copy.deepcopy(group[name]) for name in _SCALED if name in group} for group in made.param_groups
        )
        return made


def start(
    job: Job,
    *,
    effective_batch_size: int | BatchRamp | None = None,
    learning_rate: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    schedule_steps: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    precision: PrecisionName = "fp32",
    check_loss: bool = True,
    observer: Observer | None = None,
    **hardware: Any,  # noqa: ANN401 (each is declared by Hardware)
) -> JobRun:
    """Build a job's model, optimizer, scheduler and batches.

    Whatever is None comes from `job.defaults`. The learning rate belongs to the defaults' base batch size; optimizer
    and rule come first, the scheduler after, so that it starts from the scaled rate.

    Args:
        job: what to learn.
        effective_batch_size: samples of one optimizer step, over all ranks, or a ramp of them: the learning rate is
            scaled to its first stage, and stays.
        learning_rate: at the base batch size.
        epochs: passes over the data set.
        steps: optimizer steps, instead of epochs.
        schedule_steps: optimizer steps that the scheduler is made for; None for those of the batches.
        seed: of the initial parameters, the order, the augmentation and the model's random numbers.
        num_workers: processes that load data.
        precision: number format of forward and backward: "fp32", "bf16" or "fp16".
        check_loss: compare the loss with its declaration in the first step.
        observer: looks in on the engine.
        **hardware: the fields of `Hardware`, such as micro_batch_size, strategy and world.

    Raises:
        DataError: the job has a scheduler, and the number of steps is not known.
        UserError: what a function of the job returned, or an argument, cannot be used.
    """
    defaults = job.defaults
    size = defaults.effective_batch_size if effective_batch_size is None else effective_batch_size
    if epochs is None and steps is None:
        epochs, steps = defaults.epochs, defaults.steps
    dataset = job.dataset()
    # Of what a step really sees, also when the rate was found: a step is not larger than the data set.
    first = sizes_of(size)[0]
    seen = _largest_step(dataset, first)
    base = _largest_step(dataset, defaults.base_batch_size or sizes_of(defaults.effective_batch_size)[0])
    optimizer = ScaledOptimizer(
        job=job,
        learning_rate=defaults.learning_rate if learning_rate is None else learning_rate,
        base_batch_size=base,
        effective_batch_size=seen,
        # An optimizer without a known rule can be trained at the batch size its rate was found with.
        rule=defaults.learning_rate_rule or ("none" if seen == base else None),
    )
    data = job.train_batches(
        dataset, effective_batch_size=size, epochs=epochs, steps=steps, seed=seed, num_workers=num_workers
    )
    spec = dataclasses.replace(
        job.train_spec(seed=seed, precision=precision),
        # The engine does not hear of a ramp: batches come as large as they are.
        effective_batch_size=None if isinstance(size, BatchRamp) else size,
        optimizer=optimizer,
        # A resumed run keeps the schedule it began with, however many steps are left of its data.
        scheduler=scheduler_function(job, num_steps_of(data) if schedule_steps is None else schedule_steps),
        check_loss=check_loss,
    )
    engine = Engine.from_spec(spec, Hardware(**hardware), observer=observer)
    if isinstance(size, BatchRamp):
        words = f"steps of {size}; the learning rate is scaled to {seen:,}, and does not follow"
        engine.decisions.add("samples", words)
    elif seen < size:
        words = f"steps of {seen:,} samples, the whole data set, instead of {size:,}; the learning rate follows"
        engine.decisions.add("samples", words)
    return JobRun(
        job=job,
        engine=engine,
        batches=data,
        held_out=_held_out(job, max(sizes_of(size))),
        rates=optimizer.rates,
        hyperparameters=optimizer.hyperparameters,
    )


def _largest_step(dataset: object, effective_batch_size: int) -> int:
    """Return the samples of the largest step: not more than there are, since batches do not cross epochs."""
    try:
        return min(effective_batch_size, max(1, len(dataset)))  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a stream without a length
        return effective_batch_size


def scheduler_function(job: Job, num_steps: int | None) -> SchedulerFunction | None:
    """Return a function that makes the job's scheduler for a run of `num_steps` steps; None if the job has none.

    Raises:
        DataError: the job has one, and the number of steps is not known.
    """
    make = job.scheduler
    if make is None:
        return None
    if num_steps is None:
        message = (
            "the job's scheduler needs the number of steps, and the length of the data set is not known. "
            "Say how many steps to make (--steps, or steps= in Defaults), or leave the scheduler out."
        )
        raise DataError(message)
    return lambda optimizer: make(optimizer, num_steps)


def num_steps_of(data: Batches) -> int | None:
    """Return the number of steps to the end of some batches; None if their data has no length."""
    try:
        return len(data)
    except TypeError:
        return None


def _held_out(job: Job, effective_batch_size: int) -> Batches | None:
    if job.evaluate is None:
        return None
    size = job.evaluate.effective_batch_size or effective_batch_size
    # A list has the lengths of what trains; a name and a function can be asked of other samples as well.
    lengths = job.lengths if isinstance(job.lengths, str) or callable(job.lengths) else None
    data = job.evaluate.dataset()
    return batches(data, effective_batch_size=size, shuffle=False, collate=job.collate, lengths=lengths)
