"""The parts of an engine as one object, and operations that use several parts, such as saving."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anybatch.checkpoints import LoadedCheckpoint, SavedCheckpoint, step_of
from anybatch.checkpoints.structure import read_stored
from anybatch.core.batch import Position
from anybatch.core.geometry import require
from anybatch.core.records import StepReport
from anybatch.core.torch_internals import refused_in_backward
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.batch_norm import BatchNormRunner
from anybatch.engine.checkpoint_saver import CheckpointSaver, loaded_on_all_ranks, num_processes
from anybatch.engine.checkpoint_state import (
    StateParts,
    collect_state,
    restore_state,
)
from anybatch.engine.data_progress import RunProgress
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.notifier import Notifier
from anybatch.engine.rank_comparison import ReplicaCheck, check_same_form
from anybatch.engine.schedule import Stateful, unsaved_scheduler
from anybatch.engine.step import StepPlanner, StepRunner
from anybatch.engine.step_guard import StepGuard
from anybatch.engine.updater import Updated, Updater
from anybatch.errors import AnyBatchError, CheckpointError, MemoryExhaustedError, NonFiniteError, UserError, WorldError
from anybatch.parallel.world import World

if TYPE_CHECKING:  # not imported at run time, since most runs need neither
    from anybatch.engine.gradient_noise import NoiseMeter
    from anybatch.engine.spike_watch import SpikeGuard

_RAISED_LATER = (
    "It was written in the background (engine.save(wait=False)), and training continues. The next engine.save "
    "or engine.load raises this error on every rank, engine.close on this rank."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForm:
    """The options of `Engine.save` for a checkpoint's form."""

    keep_last: int
    only_trainable: bool
    sharded: bool | None
    wait: bool

    def __post_init__(self) -> None:
        for name in ("only_trainable", "sharded", "wait"):
            value = getattr(self, name)
            is_valid = isinstance(value, bool) or (name == "sharded" and value is None)
            require(is_valid, name, value, "True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of an engine. No part references the engine, so `del engine` frees its memory immediately."""

    world: World
    modules: nn.Module
    context: LoopContext
    sizes: RunSizes
    check: LossCheck
    planner: StepPlanner
    guard: StepGuard
    runner: StepRunner
    updater: Updater
    noise: "NoiseMeter | None"
    replicas: ReplicaCheck
    batch_norm: BatchNormRunner
    decisions: dict[str, str]
    notifier: Notifier
    saver: CheckpointSaver
    spikes: "SpikeGuard | None"
    also_saved: dict[str, Stateful]
    loss_weights: Mapping[str, float]

    @property
    def state(self) -> StateParts:
        """The parts that change during training."""
        updater, randomness = self.updater, self.context.randomness
        return StateParts(
            modules=self.modules,
            layout=self.context.prepared.layout,
            target=updater.target,
            sharding=updater.sharding,
            scaler=updater.scaler,
            scheduler=updater.scheduler,
            average=updater.average,
            noise=self.noise,
            generators=tuple(randomness.generators) if randomness.advances else (),
            also_saved=self.also_saved,
        )

    def failures_reported(
        self, name: str, step: int | None, *, needs_whole_update: bool = False, barrier: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context of an engine call, see the function `failures_reported`.

        With `needs_whole_update`, raise an error if a step is running, or if the last update was interrupted.
        """
        if needs_whole_update and self.runner.is_running:
            message = (
                f"{name} was called during a step, by a loss function, hook or observer, or in another thread. "
                "Make these calls one after the other, in one thread."
            )
            raise UserError(message)
        check = None
        if self.saver.writing is not None or self.updater.interrupted_by:
            check = self._check_whole_update if needs_whole_update else self._check_saver
        return failures_reported(self.world, name, step, self.updater.undo, check=check, barrier=barrier)

    def _check_saver(self) -> None:
        """Report a background save that has completed or failed since the last call."""
        self.announce(self.saver.completed())
        if failure := self.saver.failure:
            self.notifier.warn("checkpoint_not_saved", f"{failure} {_RAISED_LATER}", everywhere=True)

    def _check_whole_update(self) -> None:
        self._check_saver()
        self.updater.check_not_interrupted()

    def collect(
        self, num_steps: int, progress: RunProgress, *, only_trainable: bool, in_parts: bool = False
    ) -> dict[str, Any]:
        """Return the complete state of the run; see `collect_state`."""
        saved = {
            "num_steps": num_steps,
            **progress.state_dict(),
            "seed": self.planner.seed,
            "sizes": asdict(self.sizes.original),
            "resized": self.sizes.resized(),
            "decisions": dict(self.decisions),
        }
        state = collect_state(self.state, saved, self.world, only_trainable=only_trainable, in_parts=in_parts)
        spikes = None if self.spikes is None else self.spikes.state_dict()
        return {**state, "own_seed": self.planner.user_seed, "spikes": spikes}

    def save(self, folder: Path, num_steps: int, progress: RunProgress, form: SaveForm) -> Path:
        """Write a checkpoint; see `Engine.save`."""
        updater = self.updater
        if unsaved := unsaved_scheduler(updater.target.optimizer, (updater.scheduler, *self.also_saved.values())):
            self.notifier.warn("scheduler_not_saved", unsaved)
        in_parts = self.context.prepared.layout.in_parts if form.sharded is None else form.sharded
        with self.failures_reported("engine.save", num_steps, needs_whole_update=True, barrier=True):
            check_same_form(form, self.world)
            if in_parts and not form.wait and num_processes(self.world) > 1:
                message = (
                    "engine.save(wait=False) writes whole checkpoints only, and this one is sharded. Use wait=True or "
                    "sharded=False."
                )
                raise UserError(message, code="background_in_parts")
            self.announce(self.saver.settle())
            # On an accelerator the last step's loss is still unchecked, and weights after a NaN must not be saved.
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
            # Together on all ranks: if one rank cannot restore the state, no rank may begin the next step.
            self.world.run_on_all_ranks(lambda: restore(loaded.state, loaded.path))
        return loaded

    def announce(self, saved: SavedCheckpoint | None) -> None:
        """Report a completed checkpoint."""
        if saved is not None:
            for message in saved.warnings:
                warnings.warn(message, stacklevel=4)
            self.notifier.checkpoint("saved", step_of(saved.path), saved.path, saved.num_bytes)

    def restore(self, state: Mapping[str, Any], path: Path | None) -> None:
        """Restore a collected state.

        Raises:
            CheckpointError: the state does not fit; nothing has changed.
        """
        try:
            remarks = restore_state(self.state, state, self.world)
        except CheckpointError as error:
            error.path = path
            raise
        for code, message in remarks:
            self.notifier.warn(code, message)
        self.planner.seed = state["seed"]
        self.planner.user_seed = state.get("own_seed", 0)  # earlier versions always used 0
        self.sizes.resume(state, self.decisions, self.notifier)
        self.check.resume(state["decisions"])
        saved = read_stored(state.get("spikes"))  # None also in checkpoints of versions without spike watch
        if self.spikes is not None:
            self.spikes.resume(saved)
        elif saved is not None and saved["factor"] != 1.0:
            message = (
                "the run continues at full learning rates, but its spike watch had lowered them to "
                f"{saved['factor']:.3g} of the schedule. To keep the lower rates, pass the same spikes= as before."
            )
            self.notifier.warn("rate_not_lowered", message)
        self.runner.restart_first_steps()
        self.updater.interrupted_by = ""
        self.updater.scheduled.forget()

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
        spike = self.spikes.detect(report)
        # All ranks see the same numbers, so they copy their state or react after the same steps.
        if spike is not None or self.spikes.should_copy(report.step):
            with self.failures_reported("engine.step", report.step):
                if spike is None:
                    self.spikes.keep(report.step)
                else:
                    self.spikes.react(spike, report.step)

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
        """End a step without an update: clear all gradients, and restore the buffers from before the step."""
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


@contextmanager
def failures_reported(
    world: World,
    name: str,
    step: int | None,
    undo: Callable[[], None],
    *,
    check: Callable[[], None] | None = None,
    barrier: bool = False,
) -> Iterator[None]:
    """Context of a call on all ranks: after an error, clean up and report the error to the other ranks.

    `check` runs first and may refuse the call; with `barrier`, the call begins when all ranks have made it.
    """
    call_tracker = world.call_tracker
    if call_tracker is not None:
        call_tracker.enter(name, step, barrier=barrier)
    try:
        if check is not None:
            check()
        if call_tracker is not None:
            call_tracker.wait_at_barrier()
        yield
    except BaseException as error:
        # Restore first, because the following lines may raise another error.
        _restore(error, undo)
        raised = _reported(error, world, step)
        if raised is not error:
            raise raised from error
        raise
    finally:
        if call_tracker is not None:
            call_tracker.leave()


def _restore(error: BaseException, undo: Callable[[], None]) -> None:
    """Restore the state from before the call; if that fails, add a note to the first error."""
    try:
        undo()
    except Exception as second:  # noqa: BLE001 (a broken device fails every call; the first error is the cause)
        error.add_note(
            f"anybatch: restoring the state from before the step failed too ({type(second).__name__}: {second}). "
            "Load the last checkpoint before you continue."
        )


def _reported(error: BaseException, world: World, step: int | None) -> BaseException:
    """Report an error to the other ranks, and return the error to raise."""
    if not isinstance(error, AnyBatchError):
        when = "between steps" if step is None else f"in step {step} (counted from 0)"
        error.add_note(f"anybatch: {when}, on rank {world.rank} of {world.size}.")
    _complete(error, world.rank, step)
    refused: AnyBatchError | None = refused_in_backward(error)
    # If another rank has left a collective, this rank gets a RuntimeError; the cause is the other rank's error.
    broken = isinstance(error, RuntimeError) and not isinstance(
        error, (WorldError, MemoryExhaustedError, torch.OutOfMemoryError)
    )
    call_tracker = world.call_tracker
    if refused is None and broken and call_tracker is not None and world.published_failure():
        refused = call_tracker.cause_of(error)  # most likely a collective in the user's module
    # After the last message of a step, the other ranks have already continued unless they raise the same error.
    ahead = call_tracker is not None and call_tracker.has_agreed and not isinstance(error, (NonFiniteError, WorldError))
    world.publish_failure(refused or error, step, ahead=ahead)
    if call_tracker is not None:
        call_tracker.fail(ahead=ahead)
    return refused or error


def _complete(error: BaseException, rank: int, step: int | None) -> None:
    """Set the step and rank of an error if they were unknown where it was raised."""
    if isinstance(error, (MemoryExhaustedError, NonFiniteError)) and error.step is None:
        error.step = step
    if isinstance(error, MemoryExhaustedError) and error.rank is None:
        error.rank = rank
