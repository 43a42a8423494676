"""From a job to something that can be stepped: the order in which its functions are called, in one place."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.learning_rate import ScaledRate, scale_optimizer
from anybatch.data.batches import Batches, batches
from anybatch.engine.engine import Engine
from anybatch.engine.inputs import Model
from anybatch.errors import DataError
from anybatch.recipes.job import Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
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
    """

    job: Job
    engine: Engine
    batches: Batches
    held_out: Batches | None
    rates: tuple[ScaledRate, ...]

    def evaluate(self) -> dict[str, float]:
        """Return the job's metrics on its held-out data; nothing where it has none."""
        if self.held_out is None or self.job.evaluate is None:
            return {}
        return self.engine.evaluate(self.held_out, self.job.evaluate.metric)


def start(
    job: Job,
    *,
    effective_batch_size: int | None = None,
    learning_rate: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    **hardware: Any,  # noqa: ANN401 (handed on to the engine, which declares and checks each)
) -> Run:
    """Build a job's model, optimizer, scheduler and batches.

    Whatever is None comes from `job.defaults`. The learning rate belongs to the defaults' base batch size; optimizer
    and rule come first, the scheduler after, so that it starts from the scaled rate.

    Args:
        job: what to learn.
        effective_batch_size: samples of one optimizer step, over all ranks.
        learning_rate: at the base batch size.
        epochs: passes over the data set.
        steps: optimizer steps, instead of epochs.
        seed: of the initial parameters, the order, the augmentation and the model's random numbers.
        num_workers: processes that load data.
        **hardware: what else `ab.Engine` takes: micro_batch_size, strategy, precision, observer, world.

    Raises:
        UserError: what a function of the job returned, or an argument, cannot be used.
    """
    defaults = job.defaults
    size = defaults.effective_batch_size if effective_batch_size is None else effective_batch_size
    rate = defaults.learning_rate if learning_rate is None else learning_rate
    if epochs is None and steps is None:
        epochs, steps = defaults.epochs, defaults.steps

    def optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return job.optimizer(named_parameters, rate)

    data = batches(
        job.dataset(),
        effective_batch_size=size,
        epochs=epochs,
        steps=steps,
        shuffle=job.shuffle,
        seed=seed,
        collate=job.collate,
        num_workers=num_workers,
    )
    engine = Engine(
        make_model(job, seed),
        optimizer,
        job.loss,
        effective_batch_size=size,
        clip=job.clip,
        norms=job.norms,
        rng=job.rng,
        **hardware,
    )
    base = defaults.base_batch_size or defaults.effective_batch_size
    rule = defaults.learning_rate_rule or ("none" if size == base else None)  # then no rule need be known
    rates = scale_optimizer(engine.optimizer, base_batch_size=base, effective_batch_size=size, rule=rule)
    if job.scheduler is not None:
        engine.scheduler = job.scheduler(engine.optimizer, _num_steps(data))
    return Run(job=job, engine=engine, batches=data, held_out=_held_out(job, size), rates=rates)


def make_model(job: Job, seed: int) -> Model:
    """Return a new model whose initial parameters depend on `seed` alone; the caller's random numbers are as before.

    Parameters are drawn on the CPU, so that they are the same whatever the run's device is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return job.model()


def _held_out(job: Job, effective_batch_size: int) -> Batches | None:
    if job.evaluate is None:
        return None
    size = job.evaluate.effective_batch_size or effective_batch_size
    return batches(job.evaluate.dataset(), effective_batch_size=size, shuffle=False, collate=job.collate)


def _num_steps(data: Batches) -> int:
    try:
        return len(data)
    except TypeError:
        message = (
            "the job's scheduler needs the number of steps, and the length of the data set is not known. "
            "Give steps= (here or in Defaults), or leave the scheduler out."
        )
        raise DataError(message) from None
