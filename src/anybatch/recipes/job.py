"""`Job`: a training task, independent of the hardware."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.compatibility import PrecisionName
from anybatch.core.geometry import checked_int
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.run_config import RunConfig
from anybatch.data.batches import Batches, batches
from anybatch.data.collate import Collate, Lengths
from anybatch.engine.accumulate import Rng
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.bf16_weights import Bf16Weights
from anybatch.engine.schedule import Scheduler
from anybatch.engine.updater import check_clip
from anybatch.engine.user_code import Model
from anybatch.errors import BatchSizeError, DataError, LossError, ParameterError, UserError
from anybatch.metrics import Metric
from anybatch.norms import Policy, PolicyName

ModelFactory = Callable[[], Model]
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]], float], Optimizer]
DatasetFactory = Callable[[], Any]
SchedulerFactory = Callable[[Optimizer, int], Scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out data and the metric that evaluates a job.

    Args:
        dataset: function () -> data set, as in `Job`; read without shuffling, once per evaluation.
        metric: a metric for `Engine.evaluate`: a declared loss, or a function of (model, batch) that returns one value
            per sample, `LossSum(total, count)`, or a dict of these by name. None: the job's loss.
        effective_batch_size: samples evaluated together (no effect on the result); None: the training batch size.

    Raises:
        DataError, LossError, BatchSizeError: an argument is invalid; the message has the fix.
    """

    dataset: DatasetFactory
    metric: Metric | None = None
    effective_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments without calling any function."""
        _check_function("Evaluation", "dataset", self.dataset, "()", DataError)
        if self.metric is not None and not isinstance(self.metric, Loss):
            _check_function("Evaluation", "metric", self.metric, "(model, batch)", LossError)
        if self.effective_batch_size is not None:
            checked_int("effective_batch_size", self.effective_batch_size, error=BatchSizeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training task: model, optimizer, loss and data. A recipe returns it, and every command accepts it.

    A job holds functions, not objects, so that a command can build the model again: in float64, on fake tensors, once
    per strategy. Each call must return a new object.

    Args:
        model: function () -> `nn.Module`, or a dict of named modules; a class without arguments also works.
        optimizer: function (named_parameters, learning_rate) -> optimizer. Most optimizer classes of torch work:
            `optimizer=torch.optim.AdamW`. It receives the learning rate for `defaults.base_batch_size`; afterwards
            rates are scaled to the effective batch size.
        loss: a declared loss, such as `ab.mean_over_samples(fn)`, or a function of (model, batch) that returns one
            loss per item or `ab.LossSum`.
        dataset: function () -> data set, indexed or iterable, as for `ab.batches`.
        collate: function that makes a micro-batch from a list of samples; None: torch's default.
        lengths: length of each sample, as for `ab.batches`, for splits by length; None: unknown.
        shuffle: whether to shuffle every epoch; must be False for an iterable data set.
        evaluate: held-out data and metric; None: no evaluation.
        scheduler: function (optimizer, num_steps) -> scheduler, stepped once per optimizer step; None: constant
            learning rate. `torch.optim.lr_scheduler.CosineAnnealingLR` works.
        clip: maximum gradient norm of an effective batch.
        norms: policy for BatchNorm in train mode, as for `Engine`.
        rng: what random numbers depend on, as for `Engine`.
        noise: measurement of gradient noise, as for `Engine`; None: no measurement.
        bf16_weights: how bf16 weights are updated, as for `Engine`.
        defaults: a `RunConfig` with the effective batch size, the learning rate, and other settings to override.

    Raises:
        ParameterError, LossError, DataError, UserError: an argument is invalid; the message has the fix.
    """

    model: ModelFactory
    optimizer: OptimizerFactory
    loss: Loss | LossFunction
    dataset: DatasetFactory
    defaults: RunConfig
    collate: Collate | None = None
    lengths: Lengths | None = None
    shuffle: bool = True
    evaluate: Evaluation | None = None
    scheduler: SchedulerFactory | None = None
    clip: float | None = None
    norms: Policy | PolicyName | None = None
    rng: Rng = "micro_batch"
    noise: GradientNoise | None = None
    bf16_weights: Bf16Weights = "copied"

    def __post_init__(self) -> None:
        """Check the arguments without calling any function."""
        _check_function("Job", "model", self.model, "()", ParameterError)
        _check_function("Job", "optimizer", self.optimizer, "(named_parameters, learning_rate)", ParameterError)
        _check_function("Job", "dataset", self.dataset, "()", DataError)
        _check_loss(self.loss)
        if self.collate is not None:
            _check_function("Job", "collate", self.collate, "(samples)", DataError)
        if self.scheduler is not None:
            _check_function("Job", "scheduler", self.scheduler, "(optimizer, num_steps)", ParameterError)
        check_clip(self.clip)
        for name, kind in (("evaluate", Evaluation), ("defaults", RunConfig)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "evaluate" and value is None):
                message = f"Job({name}={value!r}) must be {name}=ab.{kind.__name__}(...), not {_kind(value)}."
                raise UserError(message, code="wrong_type")
        for name in ("effective_batch_size", "learning_rate"):
            if getattr(self.defaults, name) is None:
                message = f"Job(defaults=...) has no {name}. Pass it: defaults=ab.RunConfig({name}=..., ...)."
                raise UserError(message, code="missing_default")

    def train_batches(self, dataset: Any = None, **options: Any) -> Batches:  # noqa: ANN401 (what `batches` takes)
        """Return effective batches of the job's data, with its shuffling, collate function and lengths.

        Args:
            dataset: an earlier result of `self.dataset()`; None calls it.
            **options: further arguments of `ab.batches`.
        """
        data = self.dataset() if dataset is None else dataset
        return batches(data, shuffle=self.shuffle, collate=self.collate, lengths=self.lengths, **options)

    def train_spec(
        self,
        *,
        seed: int | None = None,
        learning_rate: float | None = None,
        effective_batch_size: int | None = None,
        precision: PrecisionName | None = None,
    ) -> TrainSpec:
        """Return the job as a `TrainSpec` with a new model; without the scheduler, which needs the number of steps.

        Args:
            seed: seed of the initial parameters; None: the caller's generator.
            learning_rate: learning rate for the optimizer function; None: the default.
            effective_batch_size: samples of one optimizer step, over all ranks; None: the default, the
                largest size of a ramp.
            precision: number format of forward and backward; None: the default, else fp32.
        """
        rate = self.defaults.learning_rate if learning_rate is None else learning_rate
        assert rate is not None  # checked in __post_init__
        return TrainSpec(
            model=self.model() if seed is None else make_model(self, seed),
            optimizer=lambda named: self.optimizer(named, rate),
            loss=self.loss,
            effective_batch_size=effective_batch_size or self.defaults.largest_batch_size,
            precision=precision or self.defaults.precision or "fp32",
            clip=self.clip,
            norms=self.norms,
            rng=self.rng,
            average_decay=self.defaults.average_decay,
            noise=self.noise,
            bf16_weights=self.bf16_weights,
        )


def make_model(job: Job, seed: int) -> Model:
    """Return a new model whose initial parameters depend only on `seed`; the caller's generators do not change.

    Parameters are drawn on the CPU, so they do not depend on the run's device.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return job.model()


def _check_function(owner: str, name: str, value: object, arguments: str, error: type[UserError]) -> None:
    """Refuse a value that cannot be called with these arguments, such as an object instead of its factory."""
    form = f"a function {name}{arguments}"
    # Passing a module instead of a function is a frequent mistake, and a module is callable too.
    if isinstance(value, nn.Module) or not callable(value):
        fix = f"{form} that returns it: {name}=lambda: ..." if arguments == "()" else form
        message = f"{owner}({name}=...) is {_kind(value)}; pass {fix}."
        raise error(message, code="already_made")
    try:
        # Binding checks the number of arguments without calling the function, which might build a model.
        signature = inspect.signature(value)
    except ValueError:  # some built-in functions have no signature
        return
    num_arguments = arguments.count(",") + (arguments != "()")
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as mismatch:
        message = (
            f"{owner}({name}=...) must be {form}, but {getattr(value, '__name__', _kind(value))}{signature} cannot be "
            f"called like that: {mismatch}."
        )
        raise error(message, code="wrong_arguments") from None


def _check_loss(loss: object) -> None:
    function = loss.function if isinstance(loss, Loss) else loss
    encode = loss.kind.encode if isinstance(loss, Loss) else None
    # A loss with parameters would be shared by all models that a command builds.
    modules = [part for part in (function, encode) if isinstance(part, nn.Module)]
    trained = next((module for module in modules if any(True for _ in module.parameters())), None)
    if trained is not None:
        message = (
            f"Job(loss=...) is {_kind(trained)} with parameters, which all commands would share. Put it into the "
            'model, as in model=lambda: {"net": Net(), "loss": Loss()}, and pass a function of (model, batch).'
        )
        raise LossError(message, code="loss_has_parameters")
    if not callable(function):
        message = (
            f"Job(loss={function!r}) must be a declared loss, such as ab.mean_over_samples(fn), or a function of "
            f"(model, batch), not {_kind(function)}."
        )
        raise LossError(message, code="not_a_loss")


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
