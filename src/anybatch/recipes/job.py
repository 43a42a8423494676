"""`Job`: everything that is learned, and nothing that is only hardware."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.batch_ramp import BatchRamp, sizes_of
from anybatch.core.learning_rate import ScalingRule
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.whole_numbers import checked_int
from anybatch.data.batches import Batches, batches
from anybatch.data.fetch import Collate
from anybatch.data.lengths import Lengths
from anybatch.engine.checkpoint_state import Scheduler
from anybatch.engine.evaluation import Metric
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.engine.inputs import Model
from anybatch.engine.rng.generators import Rng
from anybatch.engine.spec import TrainSpec
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.engine.update.clipping import ClipArgument, clip_policy
from anybatch.engine.update.precision import PrecisionName
from anybatch.errors import BatchSizeError, DataError, LossError, ParameterError, UserError
from anybatch.norms import Policy, PolicyName

ModelFactory = Callable[[], Model]
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]], float], Optimizer]
DatasetFactory = Callable[[], Any]
SchedulerFactory = Callable[[Optimizer, int], Scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The numbers a job is run with unless others are given.

    Args:
        effective_batch_size: samples of one optimizer step, over all ranks; or a `BatchRamp` of them, whose first stage
            is what the learning rate is scaled to. Other verbs than train take its largest stage.
        learning_rate: found with `base_batch_size`; it is what the optimizer function receives.
        base_batch_size: samples per step that `learning_rate` was found with; None for `effective_batch_size`,
            the first stage of a ramp.
        learning_rate_rule: how the learning rate follows the effective batch size: "linear", "sqrt" or "none"; None
            for the rule that has a source for the optimizer (`default_rule`).
        epochs: passes over the data set.
        steps: optimizer steps, instead of epochs. Neither: one epoch.

    Raises:
        BatchSizeError: a batch size is not a whole number of at least 1.
        UserError: any other number that cannot be used, or both `epochs` and `steps`.
    """

    effective_batch_size: int | BatchRamp
    learning_rate: float
    base_batch_size: int | None = None
    learning_rate_rule: ScalingRule | None = None
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check every number by itself, and the two lengths against each other."""
        if not isinstance(self.effective_batch_size, BatchRamp):  # a ramp has checked its own sizes
            checked_int("effective_batch_size", self.effective_batch_size, error=BatchSizeError)
        for name in ("base_batch_size", "epochs", "steps"):
            if getattr(self, name) is not None:
                error = BatchSizeError if name == "base_batch_size" else UserError
                checked_int(name, getattr(self, name), error=error)
        if self.epochs is not None and self.steps is not None:
            message = f"epochs={self.epochs} and steps={self.steps} both say where to stop. Give one of them."
            raise UserError(message)
        rate = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 < rate < math.inf:
            message = f"learning_rate={rate!r} must be a finite number above 0."
            raise UserError(message)
        if self.learning_rate_rule is not None and self.learning_rate_rule not in get_args(ScalingRule):
            rules = ", ".join(map(repr, get_args(ScalingRule)))
            message = (
                f"learning_rate_rule={self.learning_rate_rule!r} must be one of {rules}, or None for the optimizer's."
            )
            raise UserError(message)

    @property
    def largest_batch_size(self) -> int:
        """Samples of the largest step: the one that has to fit."""
        return max(sizes_of(self.effective_batch_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out data, and the metric on it that judges a job.

    Args:
        dataset: function () -> data set, as in `Job`. It is read in its own order, once per evaluation.
        metric: what `Engine.evaluate` takes: a declared loss, or a function of (model, batch) that returns one value
            per sample, `LossSum(total, count)`, or a dict of those by name. None: the job's loss.
        effective_batch_size: samples that are evaluated at a time; None: as many as are trained with. The result does
            not depend on it.

    Raises:
        DataError, LossError, BatchSizeError: an argument cannot be used; says which and what to give.
    """

    dataset: DatasetFactory
    metric: Metric | None = None
    effective_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without calling anything."""
        _check_function("Evaluation", "dataset", self.dataset, "()", DataError)
        if self.metric is not None and not isinstance(self.metric, Loss):
            _check_function("Evaluation", "metric", self.metric, "(model, batch)", LossError)
        if self.effective_batch_size is not None:
            checked_int("effective_batch_size", self.effective_batch_size, error=BatchSizeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that defines what is learned: the one contract between a recipe and every verb.

    A job holds functions, not objects, so that a verb can build the model again: in float64, under fake tensors, once
    per strategy. Each call must return a new object.

    Args:
        model: function () -> `nn.Module`, or a dict of named modules; a class without arguments will do.
        optimizer: function (named_parameters, learning_rate) -> optimizer. Most of torch's classes are such functions
            themselves: `optimizer=torch.optim.AdamW`. The learning rate is that of `defaults.base_batch_size`; the
            result is scaled to the effective batch size afterwards.
        loss: a declared loss (`ab.mean_over_samples(fn)` and its like), or a function of (model, batch) that returns
            one loss per item or `ab.LossSum`.
        dataset: function () -> data set, with an index or iterable, as `ab.batches` takes it.
        collate: makes a micro-batch of a list of samples; None for torch's own.
        lengths: how long each sample is, as `ab.batches` takes it, for runs that are cut by length; None for unknown.
        shuffle: whether each epoch has an order of its own; must be False for a data set without an index.
        evaluate: held-out data and metric; None for none.
        scheduler: function (optimizer, num_steps) -> scheduler, stepped once per optimizer step; None for a constant
            learning rate. `torch.optim.lr_scheduler.CosineAnnealingLR` is such a function itself.
        clip: largest gradient norm, a clipping policy, or one per parameter group; once per effective batch.
        norms: what to do about BatchNorm in train mode, as `Engine` takes it.
        rng: what random numbers belong to, as `Engine` takes it.
        average_decay: keep an exponential moving average of the weights, such as 0.999, and evaluate with it; None for
            none.
        noise: measure the gradient's noise scale, as `Engine` takes it; None does not.
        bf16_weights: what is kept beside weights in bf16, as `Engine` takes it.
        defaults: batch size, length and learning rate.

    Raises:
        ParameterError, LossError, DataError, UserError: an argument cannot be used; says which and what to give.
    """

    model: ModelFactory
    optimizer: OptimizerFactory
    loss: Loss | LossFunction
    dataset: DatasetFactory
    defaults: Defaults
    collate: Collate | None = None
    lengths: Lengths | None = None
    shuffle: bool = True
    evaluate: Evaluation | None = None
    scheduler: SchedulerFactory | None = None
    clip: ClipArgument = None
    norms: Policy | PolicyName | None = None
    rng: Rng = "micro_batch"
    average_decay: float | None = None
    noise: GradientNoise | None = None
    bf16_weights: Bf16Weights = "copied"

    def __post_init__(self) -> None:
        """Check what can be checked without calling anything."""
        _check_function("Job", "model", self.model, "()", ParameterError)
        _check_function("Job", "optimizer", self.optimizer, "(named_parameters, learning_rate)", ParameterError)
        _check_function("Job", "dataset", self.dataset, "()", DataError)
        _check_loss(self.loss)
        if self.collate is not None:
            _check_function("Job", "collate", self.collate, "(samples)", DataError)
        if self.scheduler is not None:
            _check_function("Job", "scheduler", self.scheduler, "(optimizer, num_steps)", ParameterError)
        clip_policy(self.clip)
        for name, kind in (("evaluate", Evaluation), ("defaults", Defaults)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "evaluate" and value is None):
                message = f"Job({name}={value!r}) must be {name}=ab.{kind.__name__}(...), not {_kind(value)}."
                raise UserError(message)

    def train_batches(self, dataset: Any = None, **options: Any) -> Batches:  # noqa: ANN401 (what `batches` takes)
        """Return effective batches of the job's data, in the order and layout that the job says.

        Args:
            dataset: what `self.dataset()` has returned before; None calls it.
            **options: the other arguments of `ab.batches`.
        """
        data = self.dataset() if dataset is None else dataset
        return batches(data, shuffle=self.shuffle, collate=self.collate, lengths=self.lengths, **options)

    def train_spec(
        self,
        *,
        seed: int | None = None,
        learning_rate: float | None = None,
        effective_batch_size: int | None = None,
        precision: PrecisionName = "fp32",
    ) -> TrainSpec:
        """Return the job as a value for an engine, with a new model; without a scheduler, which needs the steps.

        Args:
            seed: of the initial parameters; None draws them from the caller's generator.
            learning_rate: handed to the optimizer function; None for that of the defaults.
            effective_batch_size: samples of one optimizer step, over all ranks; None for those of the defaults,
                the largest of a ramp.
            precision: number formats of forward and backward.
        """
        rate = self.defaults.learning_rate if learning_rate is None else learning_rate
        return TrainSpec(
            model=self.model() if seed is None else make_model(self, seed),
            optimizer=lambda named: self.optimizer(named, rate),
            loss=self.loss,
            effective_batch_size=effective_batch_size or self.defaults.largest_batch_size,
            precision=precision,
            clip=self.clip,
            norms=self.norms,
            rng=self.rng,
            average_decay=self.average_decay,
            noise=self.noise,
            bf16_weights=self.bf16_weights,
        )


def make_model(job: Job, seed: int) -> Model:
    """Return a new model whose initial parameters depend on `seed` alone; the caller's random numbers are as before.

    Parameters are drawn on the CPU, so that they are the same whatever the run's device is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return job.model()


def _check_function(owner: str, name: str, value: object, arguments: str, error: type[UserError]) -> None:
    """Refuse what cannot be called with these arguments, and objects in the place of what makes them."""
    form = f"a function {name}{arguments}"
    # A module is callable as well, and is what people give by mistake.
    if isinstance(value, nn.Module) or not callable(value):
        cure = f"{form} that makes it: {name}=lambda: ..." if arguments == "()" else form
        message = f"{owner}({name}=...) was given {_kind(value)}, already made; pass {cure}."
        raise error(message)
    try:
        # Called for real it would cost a model; binding shows a wrong number of arguments as well.
        signature = inspect.signature(value)
    except ValueError:  # some built-in functions have no signature
        return
    num_arguments = arguments.count(",") + (arguments != "()")
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError as mismatch:
        message = (
            f"{owner}({name}=...) must be {form}, but {getattr(value, '__name__', _kind(value))}{signature} cannot be "
            f"called so: {mismatch}."
        )
        raise error(message) from None


def _check_loss(loss: object) -> None:
    function = loss.function if isinstance(loss, Loss) else loss
    encode = loss.kind.encode if isinstance(loss, Loss) else None
    # A loss with parameters would be made once and shared by every model that a verb builds.
    own = next((f for f in (function, encode) if isinstance(f, nn.Module) and any(True for _ in f.parameters())), None)
    if own is not None:
        message = (
            f"Job(loss=...) is {_kind(own)} with parameters, which every verb would train on. Put it into the "
            'model, as in model=lambda: {"net": Net(), "loss": Loss()}, and give a function of (model, batch).'
        )
        raise LossError(message)
    if not callable(function):
        message = (
            f"Job(loss={function!r}) must be a declared loss, such as ab.mean_over_samples(fn), or a function of "
            f"(model, batch), not {_kind(function)}."
        )
        raise LossError(message)


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"
