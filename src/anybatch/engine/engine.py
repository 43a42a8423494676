"""The engine: training steps of any effective batch size, with the exact gradient."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch.optim import Optimizer

from anybatch.core.batch import Position
from anybatch.core.compatibility import PrecisionName
from anybatch.core.gradient_noise import GradientNoise
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.records import Observer, StepReport
from anybatch.core.spikes import SpikeAction, SpikeWatch
from anybatch.core.splitting import Deal
from anybatch.engine.accumulate import Rng
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.bf16_weights import Bf16Weights
from anybatch.engine.build import build
from anybatch.engine.data_progress import RunProgress
from anybatch.engine.forward_state import BufferUpdate
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize
from anybatch.engine.notifier import TensorsByCategory
from anybatch.engine.optimizer_memory import evaluation_weights
from anybatch.engine.parts import SaveForm
from anybatch.engine.precision import OptimizerFunction
from anybatch.engine.schedule import Scheduler, SchedulerFunction, Stateful, WeightAverage
from anybatch.engine.step import SummedBatch
from anybatch.engine.updater import Updated
from anybatch.engine.user_code import Model, checked_path
from anybatch.errors import UserError
from anybatch.metrics import Metric
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World


class Engine:
    """Trains a model with a given effective batch size, with the exact gradient, on any hardware.

    One `step` is one optimizer update from one effective batch. The engine splits the batch into micro-batches that fit
    in memory, and divides them among the ranks. The gradient is the sum over all micro-batches, divided by the number
    of items (samples or tokens); it is clipped once.

    ```python
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=16)
    for batch in ab.batches(dataset, effective_batch_size=256, epochs=3):
        report = engine.step(batch)
    ```

    Args:
        model: the module to train, or a dict of named modules. The engine moves it to this rank's device, and zeroes,
            clips and reduces the gradients of its trainable parameters and no others.
        optimizer: a torch optimizer over these parameters, or a function `named_parameters -> optimizer`, which gets
            float32 master weights instead of bf16 and fp16 parameters.
        loss: a declared loss (such as `ab.mean_over_samples(fn)`), or a function of (model, batch) that returns a mean
            over samples, one loss per item or `ab.LossSum`. If it is a module, its parameters are trained too.
        effective_batch_size: samples per step over all ranks; larger batches raise an error, smaller ones a warning.
        micro_batch_size: maximum number of samples per forward and backward. "auto" tries a few sizes on the first
            batch and takes the fastest, `Auto` has options for this (docs/auto_size.md), and `ab.token_budget` limits
            tokens instead of samples (docs/lengths.md).
        accumulation_steps: micro-batches per rank and step. Without a micro-batch size, they are of nearly equal size.
        deal: assignment of samples to ranks. "balanced": rank shares differ by at most one sample; "fixed": whole
            micro-batches are assigned, so they are the same on any number of ranks.
        strategy: a name such as "ddp", a strategy object, or "auto": see docs/ranks.md.
        precision: "fp32" (no autocast: the model runs in the types of its parameters), "bf16" or "fp16" autocast;
            "fp16" scales the loss.
        bf16_weights: how bf16 weights are updated: in float32 copies ("copied"), in float32 with the lower 16 bits
            stored separately ("split"), or with stochastic rounding ("stochastic").
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`, stepped once per completed update.
        clip: maximum 2-norm of the gradient of an effective batch; None: no clipping.
        measure_gradient_norm: report the gradient norm and detect non-finite gradients; False saves the time for this.
        noise: measure the gradient's noise scale, an estimate of the critical batch size; see docs/gradient_noise.md.
        average_decay: keep an exponential moving average of the weights, such as 0.999; see `evaluate(averaged=True)`.
        norms: the samples whose statistics BatchNorm layers use in train mode: "keep", "sync", "freeze", "exact", or a
            policy of `anybatch.norms`; see docs/batch_norm.md. None: "keep", with a warning if the split changes the
            gradient.
        buffers: by name or pattern, how to combine buffers that a forward updates and reads (such as a queue): "mean"
            over samples, "first", a function, "keep". See docs/forward_state.md.
        rng: "micro_batch" seeds random numbers by (seed, step, first sample of the micro-batch); "per_sample" seeds
            dropout by (seed, step, sample, call), so that the split does not change it; None seeds nothing.
        check_loss: check in the first step, on a few samples, whether the loss matches its declaration.
        seed: seed for `rng`. None: the seed of `ab.batches`; for other batches, a seed computed from torch's generator
            and the weights before the first step.
        spikes: action after a spike in the loss or gradient norm: "warn", "lower" the learning rate, "roll_back", or a
            `SpikeWatch` of `anybatch.spikes`; None: none. See docs/learning_rates.md.
        observer: receives a record of every micro-batch, reduction, phase and step.
        world: the ranks; None: from the environment.

    Raises:
        UserError: an argument is invalid; model and optimizer are unchanged.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | OptimizerFunction,
        loss: Loss | LossFunction,
        *,
        effective_batch_size: int | None = None,
        micro_batch_size: MicroBatchSize = "auto",
        accumulation_steps: int | None = None,
        deal: Deal = "balanced",
        strategy: str | Strategy = "auto",
        precision: PrecisionName = "fp32",
        bf16_weights: Bf16Weights = "copied",
        scheduler: Scheduler | SchedulerFunction | None = None,
        clip: float | None = None,
        measure_gradient_norm: bool = True,
        noise: GradientNoise | None = None,
        average_decay: float | None = None,
        norms: Policy | PolicyName | None = None,
        buffers: Mapping[str, BufferUpdate] | None = None,
        rng: Rng = "micro_batch",
        check_loss: bool = True,
        seed: int | None = None,
        spikes: SpikeWatch | SpikeAction | None = None,
        observer: Observer | None = None,
        world: World | None = None,
    ) -> None:
        spec = TrainSpec(
            model=model,
            optimizer=optimizer,
            loss=loss,
            effective_batch_size=effective_batch_size,
            precision=precision,
            bf16_weights=bf16_weights,
            scheduler=scheduler,
            clip=clip,
            measure_gradient_norm=measure_gradient_norm,
            noise=noise,
            average_decay=average_decay,
            norms=norms,
            buffers=buffers,
            rng=rng,
            check_loss=check_loss,
            seed=seed,
            spikes=spikes,
        )
        hardware = Hardware(
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            deal=deal,
            strategy=strategy,
            world=world,
        )
        self._set_up(spec, hardware, observer)

    @classmethod
    def from_spec(cls, spec: TrainSpec, hardware: Hardware | None = None, *, observer: Observer | None = None) -> Self:
        """Return an engine for a spec; the same as passing its fields to `Engine`.

        Args:
            spec: the model, optimizer and loss, with their settings.
            hardware: the ranks, the strategy and the micro-batch size; None: the defaults.
            observer: receives a record of every micro-batch, reduction, phase and step.

        Raises:
            UserError: an argument is invalid; model and optimizer are unchanged.
        """
        # Skips `__init__`, which takes the fields of the spec as separate arguments.
        engine = cls.__new__(cls)
        cls._set_up(engine, spec, hardware or Hardware(), observer)
        return engine

    def _set_up(self, spec: TrainSpec, hardware: Hardware, observer: Observer | None) -> None:
        self._parts = build(spec, hardware, observer)
        # A world that was passed belongs to the caller, who closes it.
        self._made_world = hardware.world is None
        self._is_closed = False
        self.model = spec.model
        self.num_steps = 0
        self._progress = RunProgress()

    def __repr__(self) -> str:
        return self._parts.describe(self.num_steps, self.position)

    @property
    def position(self) -> Position:
        """Position in the data set of the last step: the epoch, and the number of its samples used so far."""
        return self._progress.position

    @position.setter
    def position(self, position: Position) -> None:
        self._progress.set(position)

    @property
    def world(self) -> World:
        """The ranks."""
        return self._parts.world

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that updates the parameters."""
        return self._parts.updater.target.optimizer

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler that is stepped once per update."""
        return self._parts.updater.scheduler

    @property
    def average(self) -> WeightAverage | None:
        """The averaged weights; None without `average_decay`."""
        return self._parts.updater.average

    @property
    def decisions(self) -> dict[str, str]:
        """The engine's automatic choices as text, by name; callers may add entries."""
        return self._parts.decisions

    @property
    def resident_tensors(self) -> Callable[[], TensorsByCategory]:
        """Function () -> the tensors that stay in memory between steps, by purpose."""
        return self._parts.updater.resident.tensors

    def step(self, batch: Any) -> StepReport:  # noqa: ANN401 (any nested batch)
        """Make one optimizer update from one effective batch.

        Args:
            batch: a batch of `ab.batches` or `ab.shares`; any other nested batch is this rank's share. A dict or tuple
                holds fields; a list that could hold fields or samples is refused (`anybatch.data.SampleList`).

        Returns:
            The report of the step. Its numbers stay on the device until they are read.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            ParameterError: the set of trainable parameters has changed since the engine was created.
            NonFiniteError: the loss or the gradient is NaN or infinite.
            MemoryExhaustedError: out of memory, and the step cannot be retried with smaller micro-batches.
            RankFailedError: another rank failed first; start all ranks again from a checkpoint.
            RanksDifferError: batches, settings or calls differ between ranks; the step was not made.
            ReplicaError: weights differ between ranks, which are compared every 100 steps.
            UpdateFailedError: the last update was interrupted, and no checkpoint has been loaded since.
            UserError: the engine is closed.
        """
        if self._is_closed:
            self._raise_closed()
        parts = self._parts
        with parts.failures_reported("engine.step", self.num_steps, needs_whole_update=True):
            # Allocate before the first micro-batch: an update that runs out of memory half-way cannot be undone.
            if not parts.updater.optimizer_memory.is_allocated:
                parts.updater.optimizer_memory.allocate()
            progress = self._progress.of(batch, parts.notifier.warn)
            # Plans and runs the step; after an out-of-memory error, again with smaller micro-batches.
            summed = parts.runner.run(batch, self.num_steps, progress)
            updated = parts.updater.update(summed.gradients, summed.contributions, self.num_steps)
            self._progress.advance(progress, summed.planned.end)
            report = self._record(summed, updated)
        if parts.notifier.observers or parts.updater.scheduler is not None or parts.spikes is not None:
            parts.finish_step(report, updated)
        return report

    def gradients(self, batch: Any) -> dict[str, torch.Tensor | None]:  # noqa: ANN401 (any nested batch)
        """Return copies of the gradient of one effective batch, by parameter name, without an update.

        A parameter that no rank used has the gradient None. Parameters, optimizer and position do not change.
        """
        if self._is_closed:
            self._raise_closed()
        parts = self._parts
        with parts.failures_reported("engine.gradients", self.num_steps, needs_whole_update=True):
            summed = parts.runner.run(batch, self.num_steps, self._progress.of(batch, parts.notifier.warn))
            copies = {
                name: None if gradient is None else parts.context.scaler.unscaled(gradient)
                for name, gradient in zip(parts.context.prepared.parameters, summed.gradients, strict=True)
            }
            parts.guard.run_hooks(tuple(copies.values()))
            # Clear only after copying, because gradients may be views of buckets.
            parts.clear_gradients()
        return copies

    def evaluate(
        self, batches: Iterable[Any], metric: Metric | None = None, *, averaged: bool = False
    ) -> dict[str, float]:
        """Return metrics over the samples of all batches and ranks, independent of the micro-batch and world size.

        Call it on every rank. The model runs in eval mode and returns to its previous mode afterwards.

        Args:
            batches: from `ab.batches(..., shuffle=False)` or `ab.shares`, or this rank's batches; the same number on
                every rank.
            metric: a declared loss, a function of (model, batch) that returns one value per sample,
                `ab.LossSum(total, count)` or a dict of these, or an `anybatch.metrics.OverWholeSet`. None: the loss.
            averaged: use the averaged weights, see `average_decay`.

        Raises:
            RanksDifferError, ReplicaError: the calls or the weights differ between ranks.
        """
        from anybatch.engine.evaluation import evaluate, evaluation_mode, stale_statistics  # noqa: PLC0415 (many runs evaluate nothing)

        average = self.average
        if averaged and average is None:
            message = "evaluate(averaged=True) needs averaged weights. Use Engine(average_decay=0.999), for example."
            raise UserError(message)
        parts = self._parts
        if averaged and (stale := stale_statistics(parts.modules)):
            parts.notifier.warn("statistics_are_not_averaged", stale)
        parts.updater.finite.settle()
        weights = average.in_place() if averaged and average is not None else nullcontext()
        optimizer_weights = evaluation_weights(self.optimizer)
        with evaluation_mode(parts.modules), parts.failures_reported("engine.evaluate", self.num_steps, barrier=True):
            parts.replicas.compare(self.num_steps)
            with torch.no_grad(), optimizer_weights, weights:
                metrics, num_samples = evaluate(
                    batches,
                    parts.context.loss if metric is None else metric,
                    context=parts.context,
                    placement=parts.sizes.placement,
                    world=parts.world,
                    on_halved=parts.notifier.report_halving,
                )
        parts.notifier.evaluate(self.num_steps, num_samples, metrics)
        return metrics

    def save(
        self,
        folder: str | Path,
        *,
        keep_last: int = 2,
        only_trainable: bool = False,
        sharded: bool | None = None,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint with the complete state of the run into `folder`, atomically; return its path.

        Call it on every rank.

        Args:
            folder: the folder for the run's checkpoints, with one subfolder for each.
            keep_last: number of checkpoints to keep. To keep the best by a metric, save into a separate folder with
                `keep_last=1` whenever the metric improves.
            only_trainable: leave out frozen parameters, such as the base of an adapter; the model must have them when
                the checkpoint is loaded.
            sharded: True: each rank writes its shards into a shared folder, without gathering. False: rank 0 writes
                whole tensors. None: True if parameters are sharded. `load` reads both, on any number of ranks.
            wait: True: wait until the checkpoint is complete. False: wait only until rank 0 has copied the state into
                host memory; a thread writes it during training, and the next save, load or close waits for the thread.
                False cannot be combined with shards of several ranks.

        Raises:
            CheckpointError: the checkpoint could not be written; older ones are unchanged. With `wait=False` the next
                step warns, and the next save, load or close raises the error.
            RanksDifferError, ReplicaError: the calls or the weights differ between ranks.
            UpdateFailedError: the last update was interrupted, so weights may be half updated.

        Warns:
            AnyBatchWarning: the learning rate is set by a scheduler that the engine does not know and does not save.
        """
        form = SaveForm(keep_last=keep_last, only_trainable=only_trainable, sharded=sharded, wait=wait)
        return self._parts.save(checked_path("folder", folder), self.num_steps, self._progress, form)

    def load(self, path: str | Path) -> Position:
        """Resume from a checkpoint, or from the newest intact one in a folder; return its position in the data.

        With the same world size the run continues bit for bit; with another world size it continues with the same
        samples, and results agree up to rounding. Learning rates come from the checkpoint: to change them, set them in
        `engine.optimizer` afterwards.

        Raises:
            CheckpointError: there is no intact checkpoint, or it has another model, optimizer or precision; model,
                optimizer and position are unchanged.

        Warns:
            UserWarning: the newest checkpoint is damaged, so an older one was loaded; or sizes differ from saved sizes.
            AnyBatchWarning: the optimizer class differs, the saved state of an object was not loaded, or unseeded
                random numbers cannot continue.
        """
        parts = self._parts
        # Without a step number: after a load that failed on one rank, ranks may be at different steps.
        with parts.failures_reported("engine.load", None, barrier=True):
            loaded = parts.load(checked_path("path", path), self._restore)
        for skipped in loaded.skipped:
            parts.notifier.checkpoint("fell_back", self.num_steps, skipped.path, None, skipped.reason)
            warnings.warn(f"skipped the damaged checkpoint {skipped.path}: {skipped.reason}", stacklevel=2)
        parts.notifier.checkpoint("loaded", self.num_steps, loaded.path, None)
        return self.position

    def save_also(self, **objects: Stateful) -> None:
        """Save the state of these objects in every checkpoint from now on, and restore it in `load`.

        For objects that the engine does not use itself, such as a loader or a scheduler that you step yourself:
        `engine.save_also(scheduler=scheduler)`. Call it before `load`. The state of rank 0 is restored on every rank.

        Args:
            objects: objects with `state_dict()` and `load_state_dict(state)`, by the name under which to save them.

        Raises:
            UserError: an object lacks these methods.
        """
        for name, item in objects.items():
            if not isinstance(item, Stateful):
                message = f"{name}={item!r} cannot be saved: it needs the methods state_dict and load_state_dict."
                raise UserError(message)
        self._parts.also_saved.update(objects)

    def _restore(self, state: Mapping[str, Any], path: Path | None = None) -> None:
        # Restore the parts first: if the state does not fit, this call raises before anything has changed.
        self._parts.restore(state, path)
        self.num_steps = int(state["num_steps"])
        self._progress.load_state_dict(state)

    def reschedule(self, scheduler: SchedulerFunction) -> None:
        """Replace the scheduler by a new one, which starts at its beginning.

        Args:
            scheduler: function `optimizer -> scheduler`. Before this call, reset the values that the old scheduler has
                set in the optimizer's parameter groups: `initial_lr` and the learning rates.

        Raises:
            UserError: the function did not return a scheduler.
        """
        self._parts.updater.reschedule(scheduler)

    def close(self, error: BaseException | None = None) -> None:
        """Remove every hook from the model, send the last record, and close the world if the engine created it.

        Args:
            error: the error that ended the run, if any.
        """
        self._is_closed = True
        self._parts.close(error, self.num_steps)
        self._parts.notifier.end(self.num_steps, error)
        try:
            # Skipped after an error, because an error of this check would hide the first one.
            if error is None:
                self._parts.updater.finite.settle()
            self._parts.announce(self._parts.saver.close(failed=error is not None))
        finally:
            if self._made_world:
                self.world.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def observed_by(
        self, observer: Observer, on_micro_batch: Callable[[Any], None] = lambda _: None
    ) -> AbstractContextManager[None]:
        """Return a context in which an additional observer receives records, and every micro-batch calls a function.

        Args:
            observer: receives the same records as the engine's observer, after it.
            on_micro_batch: function (micro-batch on its device), called before its forward; its result is ignored.
        """
        return self._parts.notifier.with_observer(observer, on_micro_batch)

    def _raise_closed(self) -> NoReturn:
        """Refuse to train after `close`, which removes the hooks that reduce gradients."""
        message = (
            f"the engine was closed after step {self.num_steps} and cannot train. "
            "Call close() only after the last step, or create a new engine."
        )
        raise UserError(message, code="closed")

    def _record(self, summed: SummedBatch, updated: Updated) -> StepReport:
        """Count the step, and return its report."""
        noise = self._parts.noise
        report = StepReport(
            step=self.num_steps,
            plan=summed.planned.plan,
            position=summed.planned.end,
            learning_rates=updated.learning_rates,
            skipped=updated.skipped,
            update=self._parts.updater.target.update,
            contributions=summed.contributions,
            weights=dict(self._parts.loss_weights),
            counts=summed.counts,
            gradient_norm=updated.gradient_norm,
            too_large=summed.too_large,
            noise=None if noise is None or summed.noise is None else noise.add(summed.noise),
        )
        self.num_steps += 1
        self._parts.updater.interrupted_by = ""  # the update is counted
        return report
