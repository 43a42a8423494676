"""The engine: name the batch, step exactly."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from anybatch.core.batch import Placement, Position
from anybatch.core.compatibility import remarks
from anybatch.core.dtypes import widest_dtype
from anybatch.core.geometry import Sizes
from anybatch.core.loss import Loss, LossFunction, declared
from anybatch.core.records import Observer
from anybatch.core.reports import StepReport
from anybatch.core.splitting import Deal
from anybatch.engine.accumulation.accumulate import Machine
from anybatch.engine.accumulation.planned_batch import (
    OpenBatch,
    Workload,
    make_workload,
    open_batch,
    refuse_disagreement,
)
from anybatch.engine.accumulation.sums import divide_late
from anybatch.engine.batch_norm.runner import Normalisation, policy_features, policy_for
from anybatch.engine.checkpoint_state import (
    Parts,
    Progress,
    Scheduler,
    collect_state,
    load_on_all_ranks,
    restore_state,
    save_on_first_rank,
)
from anybatch.engine.compatibility import features_of_choices, features_of_training, refuse_features
from anybatch.engine.evaluation import MetricFunction, evaluate
from anybatch.engine.executors import choose_executor
from anybatch.engine.failure import told
from anybatch.engine.holdings import Holdings
from anybatch.engine.inputs import Model, collect_modules, move_modules, world_of
from anybatch.engine.loss_check.check import DeclarationCheck
from anybatch.engine.micro_batch_size.backoff import Resizing
from anybatch.engine.micro_batch_size.oom_retry import Recovery, why_not_anew
from anybatch.engine.micro_batch_size.sizes import MicroBatchSize, Sizing, Trying
from anybatch.engine.rng.generators import Rng, choose_randomness
from anybatch.engine.spec import Hardware, SchedulerFunction, TrainSpec, scheduler_of
from anybatch.engine.telemetry.decisions import first_decisions
from anybatch.engine.telemetry.notifier import Watch, start_record
from anybatch.engine.update.clipping import (
    ClipArgument,
    ClipByNorm,
    clip_gradients,
    clip_policy,
    refuse_groups,
    total_norm,
)
from anybatch.engine.update.finite_check import FiniteCheck
from anybatch.engine.update.optimizer_state import UpdateMemory
from anybatch.engine.update.precision import LossScaler, OptimizerFunction, PrecisionName, autocast, make_target
from anybatch.engine.update.resident_tensors import held_tensors
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.errors import UserError
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.registry import choose_strategy
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
        loss: a declared loss (`ab.mean_over_samples(fn)` and its like), or a function of (model, batch) that returns a
            mean over samples, one loss per item or `ab.LossSum`. A module trains its parameters too.
        effective_batch_size: samples of one step over all ranks; checked against the batches. None: as they come.
        micro_batch_size: most samples of one forward and backward. "auto" tries a few sizes on the first batch and
            takes the fastest; an `Auto` of `anybatch.engine.micro_batch_size.search` knows more beforehand.
            See docs/auto_size.md.
        accumulation_steps: micro-batches per rank and step, of nearly equal size, instead of a micro-batch size.
        deal: "balanced" gives ranks the same number of samples up to one; "fixed" keeps micro-batches whole, so that
            the cut does not depend on the number of ranks.
        strategy: "auto" (one rank: "single", several: "all_reduce"), "ddp", or a strategy object.
        precision: "fp32" (as the model is), "bf16" or "fp16" autocast; "fp16" scales the loss.
        scheduler: a torch scheduler, or a function `optimizer -> scheduler`, stepped once per update, not on a skipped
            one.
        clip: largest gradient norm, `ClipByNorm` or `ClipByValue`, or a sequence of these and None with one for each
            parameter group of the optimizer; once per effective batch.
        measure_gradient_norm: report the gradient norm, and look for gradients that are not finite. False saves one
            pass over the gradients; the loss is still looked at.
        average_decay: keep an exponential moving average of the weights, such as 0.999; see `evaluate(averaged=True)`.
        norms: what to do about BatchNorm in train mode: "keep", "sync", "freeze", "exact", or a policy of
            `anybatch.norms`, such as `Ghost(group_size=32)`; see docs/batch_norm.md.
        rng: "micro_batch" keys torch's random numbers by (seed, step, first sample of the micro-batch), whatever rank
            runs it; "per_sample", or a `PerSample`, keys dropout by (seed, step, sample, call), whatever the cut; None
            leaves them as they come.
        check_loss: look in the first step, on a few samples, whether the loss is what it was declared to be.
        seed: first word of those keys; None takes the data's seed.
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
        scheduler: Scheduler | SchedulerFunction | None = None,
        clip: ClipArgument = None,
        measure_gradient_norm: bool = True,
        average_decay: float | None = None,
        norms: Policy | PolicyName = "keep",
        rng: Rng = "micro_batch",
        check_loss: bool = True,
        seed: int | None = None,
        observer: Observer | None = None,
        world: World | None = None,
    ) -> None:
        self.model = model
        self.position = Position()
        self.num_steps = 0
        self._started = False
        self._placed: tuple[Sizes, Placement] | None = None
        self._gradients: list[torch.Tensor | None] = []
        self._loss = declared(loss)
        self._modules = collect_modules(model, self._loss)
        self.world = world or world_of(self._modules)
        self._strategy = choose_strategy(strategy, self.world)
        self._sizing = Sizing(
            self.world,
            effective_batch_size=effective_batch_size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            deal=deal,
        )
        self._clip = clip_policy(clip)
        self._measures_norm = measure_gradient_norm or isinstance(self._clip, ClipByNorm)
        self._seed = seed
        autocasting = autocast(precision, self.world.device)
        randomness = choose_randomness(rng, self._modules, self.world.device)
        features = features_of_training(self._modules, self._loss, optimizer, rng=rng)
        features |= features_of_choices(precision=precision, deal=deal, sizes=self._sizing.sizes, clip=self._clip)
        policy = policy_for(norms, self._modules, self.world)
        features |= policy_features(policy)
        refuse_features(features, optimizer, self._strategy.capabilities, self.world)
        self._check = DeclarationCheck(self._loss, model, self._modules, self.world, enabled=check_loss)
        self._loss = self._check.loss
        move_modules(self._modules, self.world.device)
        self._watch = Watch(observer, self.world.rank, self._loss, self._clip)
        prepared = self._strategy.prepare(self._modules, model, self.world, self._watch.reduction)
        try:
            self._target = make_target(optimizer, prepared.parameters)
            refuse_groups(self._clip, self._target.optimizer)
            self._norms = Normalisation(policy, self._modules, self._strategy, self.world, self._sizing)
        except Exception:
            self._strategy.close()  # no hook stays on a model that is not going to be trained
            raise
        self.optimizer = self._target.optimizer
        self.scheduler = scheduler_of(scheduler, self.optimizer)
        self.average = None if average_decay is None else WeightAverage(prepared.parameters, average_decay)
        self._finite = FiniteCheck(self.world.device)
        self._machine = Machine(
            loss=self._loss,
            strategy=self._strategy,
            prepared=prepared,
            scaler=LossScaler(precision, self._target, self.world.device),
            autocast=autocasting,
            randomness=randomness,
            before=self._watch.before,
            after=self._watch.after,
        )
        # Not a method: the engine would be in a cycle, and its memory would stay until that is collected.
        self.held = partial(held_tensors, self._modules, prepared, self._target, self.average)
        self._watch.measure_memory(self.world, self._target.parameters, self.held)
        self._execute = choose_executor(self._machine, self._modules, self.world, self._watch, self._norms)
        self._precision = precision
        self._resizing = Resizing(self._sizing, grows=self._sizing.is_auto, whole=self._norms.is_whole)
        holdings = Holdings(self.held, self._target, precision)
        self._update_memory = UpdateMemory(self._target, self.world, holdings)
        self._recovery: Recovery[tuple[torch.Tensor, torch.Tensor]] = Recovery(
            modules=self._modules,
            randomness=randomness,
            world=self.world,
            resizing=self._resizing,
            watch=self._watch,
            holdings=holdings,
            clear=self._strategy.clear_gradients,
            cannot=why_not_anew(prepared, self._strategy.capabilities, self._norms, self.world),
        )
        self.decisions = first_decisions(
            update=self._target.update,
            strategy=self._strategy.capabilities.name if strategy == "auto" else None,
            world_size=self.world.size,
            differed=prepared.differed,
            remarks=remarks(features),
        )
        self.decisions |= self._norms.decisions | self._recovery.decisions
        self._strategy.clear_gradients()

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
        hardware = Hardware() if hardware is None else hardware
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        values |= {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
        del values["order"]
        return cls(observer=observer, **values)

    def step(self, batch: Any) -> StepReport:  # noqa: ANN401 (any nested batch)
        """Make one optimizer update from one effective batch.

        Args:
            batch: what `ab.batches` or `ab.shares` yields, or any nested batch, which is then this rank's share.

        Returns:
            What was done. Its numbers stay on the device until they are read.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
            NonFiniteError: the loss or the gradient is NaN or infinite.
            RankFailedError: another rank failed first.
        """
        with self._told():
            self._update_memory.secure()
            workload, contributions, counts = self._accumulate(batch)
            with self._watch.phase("clip"), self._recovery.clipping:
                norm = self._clip_gradients(contributions)
            rates = tuple(group["lr"] for group in self.optimizer.param_groups)
            with self._watch.phase("update"), self._recovery.updating:
                stepped = self._update()
                self._norms.update()
            self.position = workload.opened.end
            report = StepReport(
                step=self.num_steps,
                plan=workload.opened.plan,
                position=self.position,
                learning_rates=rates,
                skipped=not stepped,
                update=self._target.update,
                contributions=contributions,
                weights=self._loss.weights,
                counts=counts,
                gradient_norm=norm,
                too_large=self._recovery.too_large,
            )
            self.num_steps += 1
        self._watch.step(report)
        return report

    def gradients(self, batch: Any) -> dict[str, torch.Tensor | None]:  # noqa: ANN401 (any nested batch)
        """Return the summed gradient of one effective batch by parameter name, and change nothing.

        None for a parameter that no rank used. The gradients are copies; parameters, optimizer and position stay.
        """
        with self._told():
            self._accumulate(batch)
            found = {
                name: None if gradient is None else self._machine.scaler.unscaled(gradient)
                for name, gradient in zip(self._machine.prepared.parameters, self._gradients, strict=True)
            }
            self._forget_gradients()
        return found

    def evaluate(
        self, batches: Iterable[Any], metric: "Loss | MetricFunction | None" = None, *, averaged: bool = False
    ) -> dict[str, float]:
        """Return metrics over all samples of all batches and ranks, the same at any micro-batch and world size.

        The model is in evaluation mode meanwhile and back in its own mode afterwards.

        Args:
            batches: what `ab.batches(..., shuffle=False)` or `ab.shares` yields, or nested batches of this rank; every
                rank must pass equally many.
            metric: a declared loss, or a function of (model, batch) that returns one value per sample,
                `ab.LossSum(total, count)`, or a dict of those. None: the loss.
            averaged: with the averaged weights, see `average_decay`.
        """
        if averaged and self.average is None:
            message = "evaluate(averaged=True) needs averaged weights: build the engine with average_decay=0.999, say."
            raise UserError(message)
        self._finite.settle()
        modes = {module: module.training for module in self._modules.modules()}
        self._modules.eval()
        try:
            weights = self.average.in_place() if averaged and self.average is not None else nullcontext()
            with self._told(), torch.no_grad(), weights:
                found, num_samples = evaluate(
                    batches,
                    self._loss if metric is None else metric,
                    machine=self._machine,
                    placement=self._placement,
                    world=self.world,
                    halved=self._watch.halved,
                )
        finally:
            for module, training in modes.items():
                module.training = training
        self._watch.evaluate(self.num_steps, num_samples, found)
        return found

    def save(self, folder: str | Path, *, keep_last: int = 2) -> Path:
        """Write a checkpoint of everything a run needs to go on into `folder`, atomically; return its path.

        Rank 0 writes, all ranks wait. Call it on every rank.

        Args:
            folder: holds the run's checkpoints, one subfolder each.
            keep_last: how many are kept.

        Raises:
            CheckpointError: it could not be written; older ones are untouched.
        """
        self._finite.settle()
        state = collect_state(self._parts, self._progress)
        saved = save_on_first_rank(Path(folder), self.num_steps, state, self.world, keep_last=keep_last)
        for message in saved.warnings:
            warnings.warn(message, stacklevel=2)
        self._watch.checkpoint("saved", self.num_steps, saved.path, saved.num_bytes)
        return saved.path

    def load(self, path: str | Path) -> Position:
        """Go on from a checkpoint, or from the newest intact one in a folder of them; return where its data stands.

        On the world size it was saved on, the run goes on bit for bit; on another one with the same samples, up to
        rounding. Learning rates come from the checkpoint: to change them, set them in `engine.optimizer` afterwards.

        Raises:
            CheckpointError: none is there or intact, or it is of another model, optimizer or precision; nothing has
                changed then.

        Warns:
            UserWarning: a newer checkpoint is damaged, and an older one was taken; or the sizes are others than saved.
        """
        loaded = load_on_all_ranks(Path(path), self.world)
        restore_state(self._parts, loaded.state)
        for skipped in loaded.skipped:
            self._watch.checkpoint("fell_back", self.num_steps, skipped.path, None, skipped.reason)
            warnings.warn(f"passed over the damaged checkpoint {skipped.path}: {skipped.reason}", stacklevel=2)
        self.num_steps = int(loaded.state["num_steps"])
        self.position = Position(**loaded.state["position"])
        self._seed = loaded.state["seed"]
        self.decisions |= self._resizing.resume(loaded.state, self._watch)
        self._check.take(loaded.state["decisions"])
        self._watch.checkpoint("loaded", self.num_steps, loaded.path, None)
        return self.position

    def close(self, error: BaseException | None = None) -> None:
        """Let go of the model: remove every hook, tell the observer. The model and optimizer stay as they are.

        Args:
            error: what ended the run, if it did not end by itself.
        """
        self._forget_gradients()
        self._strategy.close()
        self._norms.close()
        self._machine.scaler.close()
        self._watch.end(self.num_steps, error)
        if error is None:
            self._finite.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def observed_by(
        self, observer: Observer, on_micro_batch: Callable[[Any], None] = lambda _: None
    ) -> AbstractContextManager[None]:
        """Let one more observer look in for a while, and a function see every micro-batch on its device."""
        return self._watch.also(observer, on_micro_batch)

    @property
    def _placement(self) -> Placement:
        sizes = self._sizing.sizes
        if self._placed is None or self._placed[0] is not sizes:
            placement = self._sizing.placement(lockstep=self._strategy.capabilities.lockstep)
            self._placed = sizes, self._norms.place(placement)
        return self._placed[1]

    def _accumulate(self, batch: Any) -> tuple[Workload, torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Add the gradient of the effective batch up over micro-batches and ranks, and divide it."""
        if self._sizing.searches:
            trying = Trying(
                machine=self._check.provisional(self._machine),
                modules=self._modules,
                execute=self._norms.alone,
                clear=self._forget_gradients,
                optimizer_is_new=not self.optimizer.state,
                precision=self._precision,
            )
            self._sizing.settle(batch, trying, self.position, decisions=self.decisions, tell=self._watch.diagnosis)
        workload, (totals, counts) = self._recovery.run(
            self.num_steps, lambda: self._workload(batch), self._add_up, self._execute, self.decisions
        )
        self._target.attach(self._gradients)
        if self._loss.terms is None:
            totals, counts = divide_late(self._present, totals, workload.divisors[0])
        return workload, totals, counts

    def _add_up(self, workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
        """Add gradients up over micro-batches and ranks; all that can run out of memory and be begun anew is here."""
        self._watch.begin_step(self.num_steps, workload)
        counts = torch.tensor(workload.divisors, dtype=widest_dtype(self.world.device))
        with self._machine.randomness, self._watch.phase("forward_backward"):
            sums = self._execute(workload)
        self._recovery.phase = "reduce"
        with self.world.collective(), self._watch.phase("reduce"):
            self._gradients, totals = self._strategy.finish_gradients(sums.totals(self._loss, self.world.device))
            self._watch.reduced()
        return totals, counts

    def _workload(self, batch: Any) -> Workload:  # noqa: ANN401 (any nested batch)
        opened = open_batch(batch, self._placement, self.world, self.position)
        if self._seed is not None:
            opened = dataclasses.replace(opened, seed=self._seed)
        self._sizing.refuse_larger(opened.plan.num_samples)
        if not self._started:
            refuse_disagreement(batch, opened, self.world)
            self._tell_start(opened)
        if self._check.pending and not self._recovery.too_large:
            opened = self._check.look(opened, self._machine, self.decisions, self._watch.diagnosis)
        norms = self._norms
        return make_workload(
            opened, self._loss, self.world, step=self.num_steps, lockstep=norms.lockstep, every_unit=norms.every_unit
        )

    def _clip_gradients(self, contributions: torch.Tensor) -> torch.Tensor | None:
        """Unscale, measure, look and clip; return the norm from before clipping."""
        self._machine.scaler.unscale()
        gradients = self._present
        norm = total_norm(gradients) if self._measures_norm and gradients else None
        if not self._machine.scaler.enabled:  # overflow is fp16's daily bread: the scaler skips the step
            loss = contributions.sum()
            self._finite.check(loss if norm is None else loss + norm, self.num_steps)
        clip_gradients(self._gradients, norm, self._clip, self._target.in_groups)
        self._target.cast(self._gradients)
        return norm

    def _update(self) -> bool:
        """Step optimizer and scheduler, unless fp16 has overflowed; return whether they stepped."""
        self._update_memory.drop_unused(self._gradients)
        stepped = self._machine.scaler.step()
        if stepped:
            self._target.copy_back()
            if self.average is not None:
                self.average.update()
            if self.scheduler is not None:
                self.scheduler.step()
        self._forget_gradients()
        return stepped

    @property
    def _present(self) -> list[torch.Tensor]:
        return [gradient for gradient in self._gradients if gradient is not None]

    def _forget_gradients(self) -> None:
        self._gradients = []
        self._strategy.clear_gradients()

    def _told(self) -> AbstractContextManager[None]:
        return told(self.world, lambda: self.num_steps, self._forget_gradients, self._update_memory.undo)

    def _tell_start(self, opened: OpenBatch) -> None:
        self._started = True
        if self._watch.watching:
            record = start_record(
                world=self.world,
                opened=opened,
                parameters=list(self._machine.prepared.parameters.values()),
                strategy=self._strategy.capabilities.name,
                precision=self._precision,
                first_step=self.num_steps,
                decisions=self.decisions,
            )
            self._watch.start(record)

    @property
    def _parts(self) -> Parts:
        scaler, scheduler, average = self._machine.scaler, self.scheduler, self.average
        return Parts(modules=self._modules, target=self._target, scaler=scaler, scheduler=scheduler, average=average)

    @property
    def _progress(self) -> Progress:
        steps, position, seed, decisions = self.num_steps, self.position, self._seed, self.decisions
        sizes, resized = self._resizing.named, self._resizing.state()
        return Progress(
            num_steps=steps, position=position, seed=seed, sizes=sizes, resized=resized, decisions=decisions
        )
