"""The engine: name the batch, step exactly."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from anybatch.core.batch import Position
from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.records import Observer
from anybatch.core.reports import StepReport
from anybatch.core.splitting import Deal
from anybatch.engine.build import build
from anybatch.engine.checkpoint_state import Scheduler, Stateful
from anybatch.engine.data_progress import DataProgress, RunProgress
from anybatch.engine.evaluation import Metric, evaluate, evaluation_mode, stale_statistics
from anybatch.engine.forward_state.buffer_updates import BufferUpdate
from anybatch.engine.gradient_noise import GradientNoise
from anybatch.engine.inputs import Model, checked_path
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize
from anybatch.engine.parts import Parts, SaveForm
from anybatch.engine.rng.generators import Rng
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.engine.spike_watch.watch import SpikeAction, SpikeWatch
from anybatch.engine.step_runner import SummedBatch
from anybatch.engine.telemetry.decisions import Decisions
from anybatch.engine.update.bf16_weights import Bf16Weights
from anybatch.engine.update.clipping import ClipArgument
from anybatch.engine.update.optimizer_mode import evaluation_weights
from anybatch.engine.update.precision import OptimizerFunction, PrecisionName
from anybatch.engine.update.resident_tensors import ResidentTensors
from anybatch.engine.update.schedule import SchedulerFunction
from anybatch.engine.update.updater import Updated
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.errors import UserError
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World


class Engine:
    """Trains a model at a named effective batch size, exactly, on whatever hardware there is.

    One `step` is one optimizer update on one effective batch: cut into micro-batches that fit, dealt to ranks, summed,
    divided once by the whole batch's count, reduced once, clipped once.

    ```python
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=16)
    for batch in ab.batches(dataset, effective_batch_size=256, epochs=3):
        report = engine.step(batch)
    ```

    Args:
        model: the module to train, or a dict of named modules. The engine moves it to this rank's device and owns
            exactly its trainable parameters: it zeroes, clips and reduces these and no others.
        optimizer: a torch optimizer over those parameters, or a function `named_parameters -> optimizer`, which gets
            float32 master weights in the place of bf16 and fp16 parameters.
        loss: a declared loss (`ab.mean_over_samples(fn)` and its like), or a function of (model, batch): a mean over
            samples, one loss per item or `ab.LossSum`. A module trains its parameters too.
        effective_batch_size: samples of one step over all ranks; larger batches are refused, smaller ones warned of.
        micro_batch_size: most samples of one forward and backward. "auto" takes the fastest of a few on the first
            batch, an `Auto` knows more (docs/auto_size.md), an `ab.token_budget` cuts by length (docs/lengths.md).
        accumulation_steps: micro-batches per rank and step, of nearly equal size, or of the micro-batch size if named.
        deal: "balanced": shares are equal up to one sample; "fixed": micro-batches stay whole on any number of ranks.
        strategy: a name such as "ddp", a strategy object, or "auto": see docs/ranks.md.
        precision: "fp32" (as the model is), "bf16" or "fp16" autocast; "fp16" scales the loss.
        bf16_weights: kept beside weights in bf16: "copied" float32 ones, "split" lower bits, or "stochastic" nothing.
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`, stepped once per update that is made.
        clip: largest gradient norm of an effective batch, `ClipByNorm`, `ClipByValue`, or one of these for each group.
        measure_gradient_norm: report it, and look for gradients that are not finite; False saves a pass over them.
        noise: measure the gradient's noise scale, an estimate of the critical batch size; see docs/gradient_noise.md.
        average_decay: keep an exponential moving average of the weights, such as 0.999; see `evaluate(averaged=True)`.
        norms: what to do about BatchNorm in train mode: "keep", "sync", "freeze", "exact", or a policy of
            `anybatch.norms`; see docs/batch_norm.md. None is "keep", with a warning where the gradient depends on it.
        buffers: by name or pattern, what becomes of buffers that a forward updates and computes with (a queue, say):
            "mean" over samples, "first", a function, "keep". See docs/forward_state.md.
        rng: "micro_batch" keys random numbers by (seed, step, first sample of it), whatever the rank; "per_sample", or
            a `PerSample`, keys dropout by (seed, step, sample, call), whatever the cut; None keys nothing.
        check_loss: look in the first step, on a few samples, whether the loss is what it was declared to be.
        seed: first word of those keys; None takes the seed of `ab.batches`, and for other batches one that follows from
            torch's generator and the weights before the first step.
        spikes: where loss or gradient norm leave their course "warn", "lower" the rate or "roll_back", or a
            `SpikeWatch` of `anybatch.engine.spike_watch.watch`; None looks at neither. See docs/learning_rates.md.
        observer: looks in on micro-batches, reductions, phases and steps.
        world: the ranks; None asks the environment.

    Raises:
        UserError: with what was wrong, both values and what to do; nothing has been changed then.
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
        clip: ClipArgument = None,
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
        """Return the engine of what is trained, on some hardware; the same as passing each field by itself.

        Args:
            spec: what is trained.
            hardware: where, and in what pieces; None for what the environment has.
            observer: looks in on micro-batches, reductions, phases and steps.

        Raises:
            UserError: with what was wrong, both values and what to do; nothing has been changed then.
        """
        # Past `__init__`, whose arguments are the fields of the spec one by one.
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
        """Where the data stands that was stepped last: the epoch, and how many samples of it have made a step."""
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
        """The averaged weights, where `average_decay` was given."""
        return self._parts.updater.average

    @property
    def decisions(self) -> Decisions:
        """The engine's own decisions, in words, by name; more can be added."""
        return self._parts.decisions

    @property
    def resident_tensors(self) -> Callable[[], ResidentTensors]:
        """Function () -> the tensors that stay in memory from step to step, by what they are for."""
        return self._parts.resident_tensors

    def step(self, batch: Any) -> StepReport:  # noqa: ANN401 (any nested batch)
        """Make one optimizer update from one effective batch.

        Args:
            batch: what `ab.batches` or `ab.shares` yields, or any nested batch, which is then this rank's share. A dict
                or tuple holds fields; a list that could hold fields or samples is refused (`anybatch.data.SampleList`).

        Returns:
            What was done. Its numbers stay on the device until they are read.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            ParameterError: the model has other trainable parameters than when the engine was made.
            NonFiniteError: the loss or the gradient is NaN or infinite.
            MemoryExhaustedError: memory has run out, and smaller micro-batches cannot help.
            RankFailedError: another rank failed first; if it could say so in time, all may go on together.
            RanksDifferError: ranks do not mean the same step: other batches, settings or calls; it was not made.
            ReplicaError: weights have come to differ between ranks; compared every 100 steps.
            UpdateFailedError, UserError: the last update broke off and nothing was loaded since; the engine was closed.
        """
        parts = self._open_parts()
        with parts.failures_reported("engine.step", self.num_steps, needs_whole_update=True):
            # Before the first micro-batch: an update that runs out of memory half-way cannot be undone.
            parts.updater.allocate()
            progress = self._progress_of(batch)
            # Plans and runs, and both again in smaller micro-batches where memory runs out.
            summed = parts.runner.run(batch, self.num_steps, progress)
            updated = parts.updater.update(summed.gradients, summed.contributions, self.num_steps)
            self._progress.advance(progress, summed.planned.end)
            report = self._record(summed, updated)
        parts.behind_step(report, updated)
        return report

    def gradients(self, batch: Any) -> dict[str, torch.Tensor | None]:  # noqa: ANN401 (any nested batch)
        """Return the summed gradient of one effective batch by parameter name, and change nothing.

        None for a parameter that no rank used. The gradients are copies; parameters, optimizer and position stay.
        """
        parts = self._open_parts()
        with parts.failures_reported("engine.gradients", self.num_steps, needs_whole_update=True):
            summed = parts.runner.run(batch, self.num_steps, self._progress_of(batch))
            found = {
                name: None if gradient is None else parts.context.scaler.unscaled(gradient)
                for name, gradient in zip(parts.context.prepared.parameters, summed.gradients, strict=True)
            }
            parts.guard.run_hooks(tuple(found.values()))
            # Only after the copies are made: gradients may be views of buckets, which this sets to zero.
            parts.clear_gradients()
        return found

    def evaluate(
        self, batches: Iterable[Any], metric: Metric | None = None, *, averaged: bool = False
    ) -> dict[str, float]:
        """Return metrics over all samples of all batches and ranks, the same at any micro-batch and world size.

        Call it on every rank. The model is in evaluation mode meanwhile and back in its own mode afterwards.

        Args:
            batches: of `ab.batches(..., shuffle=False)`, `ab.shares`, or this rank's own; equally many on every rank.
            metric: a declared loss, or a function of (model, batch) that returns one value per sample,
                `ab.LossSum(total, count)`, or a dict of those; an `anybatch.metrics.OverWholeSet`. None: the loss.
            averaged: with the averaged weights, see `average_decay`.

        Raises:
            RanksDifferError, ReplicaError: ranks have called different things, or hold different weights.
        """
        average = self.average
        if averaged and average is None:
            message = "evaluate(averaged=True) needs averaged weights: build the engine with average_decay=0.999, say."
            raise UserError(message)
        parts = self._parts
        if averaged and (stale := stale_statistics(parts.modules)):
            parts.notifier.warn("statistics_are_not_averaged", stale)
        parts.updater.finite.settle()
        weights = average.in_place() if averaged and average is not None else nullcontext()
        own = evaluation_weights(self.optimizer)
        with evaluation_mode(parts.modules), parts.failures_reported("engine.evaluate", self.num_steps, barrier=True):
            parts.replicas.compare(self.num_steps)
            with torch.no_grad(), own, weights:
                found, num_samples = evaluate(
                    batches,
                    parts.context.loss if metric is None else metric,
                    context=parts.context,
                    placement=parts.sizes.placement,
                    world=parts.world,
                    on_halved=parts.notifier.halved,
                )
        parts.notifier.evaluate(self.num_steps, num_samples, found)
        return found

    def save(
        self,
        folder: str | Path,
        *,
        keep_last: int = 2,
        only_trainable: bool = False,
        sharded: bool | None = None,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint of everything a run needs to go on into `folder`, atomically; return its path.

        Call it on every rank.

        Args:
            folder: holds the run's checkpoints, one subfolder each.
            keep_last: how many are kept. To keep the best by a metric, save into a folder of its own with
                `keep_last=1` whenever the metric is better than before.
            only_trainable: leave out frozen parameters, such as the base of an adapter; whoever loads it builds the
                model with them.
            sharded: each rank writes what it has, without gathering, into a folder that all share; otherwise rank 0
                writes whole tensors. None: sharded where parameters are. `load` takes both, on any number of ranks.
            wait: until it is complete. False: only until each rank has copied what it writes into the host's memory;
                a thread writes while training goes on, and the next save, load or close waits for it.

        Raises:
            CheckpointError: it could not be written; older ones are untouched. Without `wait` the next step warns of
                it, and the next save or load or the end of the engine raises it.
            RanksDifferError, ReplicaError: ranks have called different things, or hold different weights.
            UpdateFailedError: the last update broke off, so that weights may be half updated.

        Warns:
            AnyBatchWarning: learning rates follow a scheduler that the engine does not know, so it is not saved.
        """
        form = SaveForm(keep_last=keep_last, only_trainable=only_trainable, sharded=sharded, wait=wait)
        return self._parts.save(checked_path("folder", folder), self.num_steps, self._progress, form)

    def load(self, path: str | Path) -> Position:
        """Go on from a checkpoint, or from the newest intact one in a folder of them; return where its data stands.

        On the world size it was saved on, the run goes on bit for bit; on another one with the same samples, up to
        rounding. Learning rates come from the checkpoint: to change them, set them in `engine.optimizer` afterwards.

        Raises:
            CheckpointError: none is there or intact, or it is of another model, optimizer or precision; nothing has
                changed then.

        Warns:
            UserWarning: a newer checkpoint is damaged, and an older one was taken; or the sizes are others than saved.
            AnyBatchWarning: the optimizer is of another class, the state of an object was not taken up, or random
                numbers that are not keyed cannot go on.
        """
        parts = self._parts
        with parts.failures_reported("engine.load", self.num_steps, barrier=True):
            loaded = parts.load(checked_path("path", path), self._restore)
        for skipped in loaded.skipped:
            parts.notifier.checkpoint("fell_back", self.num_steps, skipped.path, None, skipped.reason)
            warnings.warn(f"passed over the damaged checkpoint {skipped.path}: {skipped.reason}", stacklevel=2)
        parts.notifier.checkpoint("loaded", self.num_steps, loaded.path, None)
        return self.position

    def save_also(self, **objects: Stateful) -> None:
        """Keep the state of further objects in every checkpoint from now on, and let `load` put it back.

        For what belongs to the run and not to the engine: `engine.save_also(scheduler=one_that_i_step)`, a loader.
        Call it before `load`. What rank 0's objects return is saved, and put back on every rank.

        Args:
            objects: by the name to save under; each has `state_dict()` and `load_state_dict(state)`.

        Raises:
            UserError: one of them lacks these.
        """
        for name, found in objects.items():
            if not isinstance(found, Stateful):
                message = f"{name}={found!r} cannot be saved: it needs the methods state_dict and load_state_dict."
                raise UserError(message)
        self._parts.further_state.update(objects)

    def align_replicas(self) -> tuple[str, ...]:
        """Give every rank the state of rank 0: weights, optimizer, scheduler, counters; return what had differed.

        The repair behind a `ReplicaError`, where no checkpoint is to be loaded. Call it on every rank.

        Returns:
            Names of the weights that differed.
        """
        parts = self._parts
        with parts.failures_reported("engine.align_replicas", self.num_steps, barrier=True):
            names, state = parts.of_first_rank(self.num_steps, self._progress)
            if state is not None:
                parts.world.run_on_all_processes(lambda: self._restore(state))
        return names

    def _restore(self, state: Mapping[str, Any], path: Path | None = None) -> None:
        # First, because it raises before it changes anything; the engine's own numbers follow the parts.
        self._parts.restore(state, path)
        self.num_steps = int(state["num_steps"])
        self._progress.load_state_dict(state)

    def reschedule(self, scheduler: SchedulerFunction) -> None:
        """Continue with another schedule, from its beginning, in the place of the present one.

        Args:
            scheduler: function `optimizer -> scheduler`. Reset what the former one has left in the optimizer's
                parameter groups (`initial_lr`, and the rates themselves) before.

        Raises:
            UserError: it returned something that is no scheduler.
        """
        self._parts.updater.reschedule(scheduler)

    def close(self, error: BaseException | None = None) -> None:
        """Remove every hook from the model, tell the observer, and close a world that the engine has made itself.

        Args:
            error: what ended the run, if it did not end by itself.
        """
        self._is_closed = True
        self._parts.close(error, self.num_steps)
        self._parts.notifier.end(self.num_steps, error)
        try:
            # After an error a second one would hide the first.
            if error is None:
                self._parts.updater.finite.settle()
            self._parts.announce(self._parts.saver.close(failed=error is not None))
        finally:
            if self._made_world:
                self.world.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def observed_by(
        self, observer: Observer, on_micro_batch: Callable[[Any], None] = lambda _: None
    ) -> AbstractContextManager[None]:
        """Let one more observer look in for a while, and a function see every micro-batch on its device.

        Args:
            observer: gets the records that the engine's own observer gets, after it, while the context is entered.
            on_micro_batch: function (micro-batch), called before its forward; what it returns is not looked at.
        """
        return self._parts.notifier.also(observer, on_micro_batch)

    def _open_parts(self) -> Parts:
        """Return the parts, as long as the engine is open.

        Raises:
            UserError: it has been closed: what reduces gradients has gone from the model.
        """
        if self._is_closed:
            message = (
                f"the engine was closed after step {self.num_steps}, and trains no more: close() removes what sums "
                "gradients from the model. Close it behind the last step, or make a new engine."
            )
            raise UserError(message)
        return self._parts

    def _progress_of(self, batch: Any) -> DataProgress:  # noqa: ANN401 (any nested batch)
        """Return this engine's progress in the data of a batch, whose iteration continues there if possible."""
        progress = self._progress.of(batch)
        remark = progress.begin(batch)
        if remark is not None:
            self._parts.notifier.warn(*remark)
        return progress

    def _record(self, summed: SummedBatch, updated: Updated) -> StepReport:
        """Count the step, and return its report."""
        report = StepReport(
            step=self.num_steps,
            plan=summed.planned.plan,
            position=summed.planned.end,
            learning_rates=updated.learning_rates,
            skipped=updated.skipped,
            update=self._parts.updater.target.update,
            contributions=summed.contributions,
            weights=self._parts.context.loss.weights,
            counts=summed.counts,
            gradient_norm=updated.gradient_norm,
            too_large=summed.too_large,
            noise=self._parts.with_noise(summed),
        )
        self.num_steps += 1
        self._parts.updater.confirm()
        return report
