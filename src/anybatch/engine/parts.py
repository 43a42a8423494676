"""The parts of an engine as one value, with the operations that combine them, such as saving."""

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from anybatch.checkpoints import LoadedCheckpoint, SavedCheckpoint, step_of
from anybatch.checkpoints.structure import read_stored
from anybatch.core.batch import Position
from anybatch.core.geometry import refuse_unless
from anybatch.core.gradient_noise import NoiseEstimate
from anybatch.core.records import StepReport
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.batch_norm import BatchNormRunner
from anybatch.engine.checkpoint_saver import CheckpointSaver, loaded_on_all_ranks
from anybatch.engine.checkpoint_state import (
    Progress,
    StateParts,
    collect_state,
    restore_state,
    state_of_first_rank,
)
from anybatch.engine.data_progress import RunProgress
from anybatch.engine.decisions import Decisions
from anybatch.engine.gradient_noise import NoiseMeter
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.micro_batch_size.oom_retry import SizeBackoff
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.notifier import Notifier, ResidentTensors
from anybatch.engine.rank_comparison import ReplicaCheck, refuse_other_forms
from anybatch.engine.rng import advancing_generators
from anybatch.engine.schedule import Stateful, unsaved_scheduler
from anybatch.engine.spike_watch import SCHEDULED, SpikeGuard
from anybatch.engine.step import StepPlanner, StepRunner, SummedBatch
from anybatch.engine.step_guard import StepGuard
from anybatch.engine.torch_internals import refused_in_backward
from anybatch.engine.updater import Updated, Updater
from anybatch.errors import AnyBatchError, CheckpointError, MemoryExhaustedError, NonFiniteError, UserError, WorldError
from anybatch.parallel.world import World

_RAISED_LATER = (
    "It was written in the background (engine.save(wait=False)), and training continues. The next engine.save "
    "or engine.load raises this error on every rank, engine.close on this one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForm:
    """How a checkpoint is written; see `Engine.save`."""

    keep_last: int
    only_trainable: bool
    sharded: bool | None
    wait: bool

    def __post_init__(self) -> None:
        for name in ("only_trainable", "sharded", "wait"):
            value = getattr(self, name)
            is_valid = isinstance(value, bool) or (name == "sharded" and value is None)
            refuse_unless(is_valid, name, value, "True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of an engine. No part references the engine, so it is freed immediately when it is dropped."""

    world: World
    modules: nn.Module
    context: LoopContext
    sizes: RunSizes
    backoff: SizeBackoff
    check: LossCheck
    planner: StepPlanner
    guard: StepGuard
    runner: StepRunner
    updater: Updater
    noise: NoiseMeter | None
    replicas: ReplicaCheck
    batch_norm: BatchNormRunner
    decisions: Decisions
    notifier: Notifier
    saver: CheckpointSaver
    spikes: SpikeGuard | None
    further_state: dict[str, Stateful]
    loss_weights: Mapping[str, float]

    @property
    def resident_tensors(self) -> Callable[[], ResidentTensors]:
        """Function () -> the tensors that stay in memory between steps."""
        return self.updater.resident.tensors

    @property
    def state(self) -> StateParts:
        """The parts that change during training."""
        updater = self.updater
        return StateParts(
            modules=self.modules,
            layout=self.context.prepared.layout,
            target=updater.target,
            sharding=updater.sharding,
            scaler=updater.scaler,
            scheduler=updater.scheduler,
            average=updater.average,
            noise=self.noise,
            generators=tuple(advancing_generators(self.context.randomness)),
            further=self.further_state,
        )

    def failures_reported(
        self, name: str, step: int | None, *, needs_whole_update: bool = False, barrier: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context of an engine call; see `failures_reported`."""
        if needs_whole_update and self.runner.is_running:
            message = (
                f"{name} was called during a step, by a loss function, hook or observer, or in another thread. "
                "Make these calls one after the other, in one thread."
            )
            raise UserError(message)
        check = None
        if self.saver.writing is not None or self.updater.broken_off:
            check = self._check_whole_update if needs_whole_update else self._check_saver
        return failures_reported(self.world, name, step, self.updater.undo, check=check, barrier=barrier)

    def _check_saver(self) -> None:
        """Report a background save that has completed or failed since the last call."""
        self.announce(self.saver.completed())
        if failure := self.saver.failure:
            self.notifier.warn("checkpoint_not_saved", f"{failure} {_RAISED_LATER}", everywhere=True)

    def _check_whole_update(self) -> None:
        self._check_saver()
        self.updater.refuse_broken_off()

    def collect(
        self, num_steps: int, progress: RunProgress, *, only_trainable: bool, in_parts: bool = False
    ) -> dict[str, Any]:
        """Return the complete state of the run; see `collect_state`."""
        saved = Progress(
            num_steps=num_steps,
            data=progress.state_dict(),
            seed=self.planner.seed,
            sizes=self.backoff.named,
            resized=self.backoff.state(),
            decisions=self.decisions,
        )
        state = collect_state(self.state, saved, self.world, only_trainable=only_trainable, in_parts=in_parts)
        spikes = None if self.spikes is None else self.spikes.state_dict()
        return {**state, "own_seed": self.planner.own_seed, "spikes": spikes}

    def save(self, folder: Path, num_steps: int, progress: RunProgress, form: SaveForm) -> Path:
        """Write a checkpoint; see `Engine.save`."""
        updater = self.updater
        if unsaved := unsaved_scheduler(updater.target.optimizer, (updater.scheduler, *self.further_state.values())):
            self.notifier.warn("scheduler_not_saved", unsaved)
        in_parts = self.context.prepared.layout.in_parts if form.sharded is None else form.sharded
        with self.failures_reported("engine.save", num_steps, needs_whole_update=True, barrier=True):
            refuse_other_forms(form, self.world)
            self.announce(self.saver.settle())
            # On an accelerator the last step's loss has not been checked yet; weights after a NaN must not be saved.
            updater.finite.settle()
            self.replicas.compare(num_steps)
            state = self.collect(num_steps, progress, only_trainable=form.only_trainable, in_parts=in_parts)
            path, saved = self.saver.save(
                folder, num_steps, state, keep_last=form.keep_last, in_parts=in_parts, wait=form.wait
            )
        self.announce(saved)
        return path

    def load(self, path: Path, restore: Callable[[Mapping[str, Any], Path], None]) -> LoadedCheckpoint:
        """Find a checkpoint and restore it; see `Engine.load`."""
        self.announce(self.saver.settle())
        with loaded_on_all_ranks(path, self.world) as loaded:
            # On all ranks together: a rank that cannot restore must not let the others begin the next step.
            self.world.run_on_all_processes(lambda: restore(loaded.state, loaded.path))
        return loaded

    def announce(self, saved: SavedCheckpoint | None) -> None:
        """Report a completed checkpoint."""
        if saved is not None:
            for message in saved.warnings:
                warnings.warn(message, stacklevel=4)
            self.notifier.checkpoint("saved", step_of(saved.path), saved.path, saved.num_bytes)

    def of_first_rank(self, num_steps: int, progress: RunProgress) -> tuple[tuple[str, ...], dict[str, Any] | None]:
        """Return the names of the weights that differ between ranks, and rank 0's state; None with a single rank."""
        names, _ = self.replicas.differing()
        self.updater.finite.settle()
        if self.world.roll_call is None:
            return names, None
        return names, state_of_first_rank(self.collect(num_steps, progress, only_trainable=False), self.world)

    def restore(self, state: Mapping[str, Any], path: Path | None) -> None:
        """Restore a collected state.

        Raises:
            CheckpointError: it does not fit; nothing has changed then.
        """
        try:
            remarks = restore_state(self.state, state, self.world)
        except CheckpointError as error:
            error.path = path
            raise
        for code, message in remarks:
            self.notifier.warn(code, message)
        self.planner.seed = state["seed"]
        self.planner.own_seed = state.get("own_seed", 0)  # earlier versions always used 0
        self.backoff.resume(state)
        self.check.resume(state["decisions"])
        watched = read_stored(state.get("spikes"))  # None also in checkpoints of versions without spike watch
        if self.spikes is not None:
            self.spikes.resume(watched)
        elif watched is not None and watched["factor"] != 1.0:
            message = (
                "the run continues at full learning rates, but its spike watch had lowered them to "
                f"{watched['factor']:.3g} of the schedule. To keep the lower rates, pass the same spikes= as before."
            )
            self.notifier.warn("rate_not_lowered", message)
        self.runner.restart_first_steps()
        self.updater.broken_off = ""
        self.updater.scheduled.forget()

    def with_noise(self, summed: SummedBatch) -> NoiseEstimate | None:
        """Add a step's gradient noise to the averages, and return the estimate; None if it was not measured."""
        return None if self.noise is None or summed.noise is None else self.noise.add(summed.noise)

    def finish_step(self, report: StepReport, updated: Updated) -> None:
        """Report a step, advance the schedule, and watch for spikes; called only if any of these is needed."""
        try:
            self.notifier.step(report)
            self.updater.advance_schedule(updated)
        except BaseException as error:
            self.world.fail_between_calls(error, report.step)
            raise
        if self.spikes is None:
            return
        spike = self.spikes.look(report)
        # All ranks see the same numbers, so they save or act after the same steps.
        if spike is not None or self.spikes.should_copy(report.step):
            with self.failures_reported("engine.step", report.step):
                if spike is None:
                    self.spikes.keep(report.step)
                else:
                    self.spikes.act(spike, report.step, self._load_weights)

    def _load_weights(self, folder: Path) -> Path:
        """Load weights, buffers and optimizer state from a checkpoint, and keep scheduled values."""
        optimizer, scheduler = self.updater.target.optimizer, self.updater.scheduler
        groups = [{name: group[name] for name in SCHEDULED & group.keys()} for group in optimizer.param_groups]
        scheduled = copy.deepcopy(scheduler.state_dict()) if isinstance(scheduler, Stateful) else None
        self.announce(self.saver.settle())
        with loaded_on_all_ranks(folder, self.world) as loaded:

            def restore() -> None:
                restore_state(self.state, loaded.state, self.world)

            self.world.run_on_all_processes(restore)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        if isinstance(scheduler, Stateful):
            scheduler.load_state_dict(scheduled)
        return loaded.path

    def describe(self, num_steps: int, position: Position) -> str:
        """Return a summary of the engine in one line."""
        world, sizes = self.world, self.sizes.sizes
        num_weights = sum(parameter.numel() for parameter in self.context.prepared.parameters.values())
        ranks = f"{world.size} rank{'s' * (world.size > 1)} ({world.device})"
        parts = (
            f"{num_weights:,} trainable weights",
            f"loss: {self.context.loss}",
            f"optimizer: {type(self.updater.target.optimizer).__name__}",
            f"strategy: {self.context.strategy.capabilities.name} on {ranks}",
            f"micro-batches of at most {sizes.micro_batch_size} samples" if sizes.micro_batch_size else "",
            f"{num_steps} step{'s' * (num_steps != 1)} made",
            f"next: epoch {position.epoch}, sample {position.sample_offset}",
        )
        return f"Engine: {', '.join(filter(None, parts))}"

    def clear_gradients(self) -> None:
        """Clear all gradients, and end a step without an update: restore its buffers."""
        self.context.strategy.clear_gradients()
        self.updater.state.skip()

    def close(self, error: BaseException | None, num_steps: int) -> None:
        """Remove every hook from the model and the optimizer, and report an error to the other ranks."""
        if error is not None:
            self.world.fail_between_calls(error, num_steps)
        self.clear_gradients()
        self.context.strategy.close()
        self.batch_norm.close()
        self.updater.scaler.close()


class failures_reported:  # noqa: N801 (used like the functions of contextlib)
    """Context of a call on all ranks: clean up after an error, and report it to the other ranks.

    A class, because a generator context is several times as slow, which is measurable in each step.
    """

    __slots__ = ("_barrier", "_check", "_name", "_step", "_undo", "_world")

    def __init__(
        self,
        world: World,
        name: str,
        step: int | None,
        undo: Callable[[], None],
        *,
        check: Callable[[], None] | None = None,
        barrier: bool = False,
    ) -> None:
        self._world = world
        self._name = name
        self._step = step
        self._undo = undo
        self._check = check
        self._barrier = barrier

    def __enter__(self) -> None:
        roll_call = self._world.roll_call
        if roll_call is not None:
            self._world.enter(self._name, self._step, barrier=self._barrier)
        try:
            if self._check is not None:
                self._check()
            if roll_call is not None:
                roll_call.wait_at_barrier()
        except BaseException as error:
            self._handle(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._handle(error)
        elif self._world.roll_call is not None:
            self._world.roll_call.leave()

    def _handle(self, error: BaseException) -> None:
        """Undo, report the error to the other ranks, and raise a replacement for it, if there is one."""
        try:
            # First, because the following lines may raise.
            self._restore_state(error)
            raised = _reported(error, self._world, self._step)
            if raised is not error:
                raise raised from error
        finally:
            if self._world.roll_call is not None:
                self._world.roll_call.leave()

    def _restore_state(self, error: BaseException) -> None:
        try:
            self._undo()
        except Exception as second:  # noqa: BLE001 (a broken device fails every call; the first error is the cause)
            error.add_note(
                f"anybatch: restoring the state from before the step failed too ({type(second).__name__}: {second}). "
                "Load the last checkpoint before you continue."
            )


def _reported(error: BaseException, world: World, step: int | None) -> BaseException:
    """Report an error to the other ranks, and return the error to raise."""
    if not isinstance(error, AnyBatchError):
        place = "between steps" if step is None else f"in step {step} (counted from 0)"
        error.add_note(f"anybatch: {place}, on rank {world.process} of {world.num_processes}.")
    _complete(error, world.process, step)
    refused: AnyBatchError | None = refused_in_backward(error)
    # A collective that another rank has left raises a RuntimeError here; the cause is the other rank's error.
    broken = isinstance(error, RuntimeError) and not isinstance(
        error, (WorldError, MemoryExhaustedError, torch.OutOfMemoryError)
    )
    roll_call = world.roll_call
    if refused is None and broken and roll_call is not None and (world.published_failure() or roll_call.ended_ranks):
        refused = roll_call.cause_of(error)  # most likely a collective in the user's module
    # After the last message of a step the other ranks have continued, unless they raise the same error.
    ahead = roll_call is not None and roll_call.has_agreed and not isinstance(error, (NonFiniteError, WorldError))
    world.publish_failure(refused or error, step, ahead=ahead)
    if roll_call is not None:
        roll_call.fail(ahead=ahead)
    return refused or error


def _complete(error: BaseException, rank: int, step: int | None) -> None:
    """Fill in fields that were unknown where the error was raised."""
    if isinstance(error, (MemoryExhaustedError, NonFiniteError)) and error.step is None:
        error.step = step
    if isinstance(error, MemoryExhaustedError) and error.rank is None:
        error.rank = rank
