"""After an out-of-memory error, undo the step on all ranks, and repeat it with smaller micro-batches.

Repeating only the failed micro-batch would give wrong gradients without an error, since an interrupted backward has
already added to some gradients. So all ranks undo every change of the step and run the whole effective batch again, as
if it had been split into the smaller micro-batches from the start. The loop is in `engine/step.py`.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch

from anybatch.core.geometry import ceil_div
from anybatch.core.records import PhaseName
from anybatch.core.splitting import BatchPlan, SplitConstraints
from anybatch.core.torch_internals import num_changes
from anybatch.core.tree import tensors_of
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import RankShare
from anybatch.engine.notifier import Notifier
from anybatch.engine.optimizer_memory import ResidentMemory
from anybatch.engine.updater import StepState
from anybatch.errors import CannotRedoError, DoesNotFitError
from anybatch.parallel.strategy import Capabilities, Prepared
from anybatch.parallel.world import World

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class OomHalving:
    """Runs samples in pieces; after an out-of-memory error, halves the size of this and later pieces.

    Correct only if a piece that fails has changed nothing, and no other rank waits for this rank (`alone`).
    """

    device: torch.device
    notify: Callable[[int, int], None]
    _: KW_ONLY
    alone: bool

    def __post_init__(self) -> None:
        self._max_size: int | None = None

    def run(self, num_samples: int, piece: Callable[[int, int], T]) -> Iterator[T]:
        """Yield the results of `piece(start, stop)`, for pieces that cover all samples."""
        start = 0
        while start < num_samples:
            size = min(self._max_size or num_samples, num_samples - start)
            try:
                result = piece(start, start + size)
            except torch.OutOfMemoryError as error:
                if not self.alone:
                    raise
                if size == 1:
                    message = f"not even 1 sample at a time fits into memory. torch says: {error}"
                    raise DoesNotFitError(message, micro_batch_size=1) from error
                # The failed frames still reference the tensors that filled the memory.
                release_frames(error)
            else:
                start += size
                yield result
                continue
            free_cached_memory(self.device)  # outside the handler, after the failed frames are freed
            self._max_size = ceil_div(size, 2)
            self.notify(size, self._max_size)


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes, to free the tensors in them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_cached_memory(device: torch.device) -> None:
    """Collect reference cycles, and return torch's cached memory to the device."""
    gc.collect()  # first, because tensors in reference cycles still use memory
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


_DETECTION = "Detecting changes of a batch before its step is repeated"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An attempt of a step that ended because a rank ran out of memory; `phase` is None if another rank did."""

    phase: PhaseName | None = None
    message: str | None = None


@dataclass(eq=False, repr=False)
class OomRetry:
    """Prepares a step to run again with smaller micro-batches."""

    _: KW_ONLY
    state: StepState
    world: World
    sizes: RunSizes
    decisions: dict[str, str]
    notifier: Notifier
    resident: ResidentMemory
    clear: Callable[[], None]
    abort: Callable[[], None]  # `Executor.abort`: joins the collectives that other ranks wait in
    impossible: str

    def retry_smaller_or_raise(self, failed: OutOfMemory, plan: BatchPlan, step: int, tried: tuple[int, ...]) -> int:
        """Undo the failed attempt on all ranks, reduce the sizes from now on, and return the failed size, or raise."""
        free_cached_memory(self.world.device)
        # If another rank failed, this rank has already taken part in all collectives.
        if failed.phase is not None:
            self._abort(failed, plan, step)
        self.clear()
        self.state.restore()
        before, after = self.sizes.shrink(plan)
        if after is not None:
            self.decisions["micro_batch_size"] = (
                f"{self.sizes.description}, because {before} ran out of memory in step {step}"
            )
        self.notifier.out_of_memory(failed.phase, failed.message, before, after)
        if after is None:
            # On all ranks, so that ranks with enough memory also stop, with the same reason.
            self.world.run_on_all_ranks(lambda: self._raise_does_not_fit(failed, (*tried, before), step))
        return before

    def _abort(self, failed: OutOfMemory, plan: BatchPlan, step: int) -> None:
        reason = self.impossible
        if not reason:
            try:
                self.abort()
            # A strategy has no step and phase for the message, so it gives the reason, and the error is raised below.
            except CannotRedoError as error:
                reason = str(error)
        if reason:
            message = (
                f"out of memory in step {step} (counted from 0). It cannot be repeated with smaller micro-batches, "
                f"because {reason}. Resume from the last checkpoint with a smaller micro_batch_size. "
                f"torch says: {failed.message}"
            )
            raise CannotRedoError(
                message,
                rank=self.world.rank,
                step=step,
                phase=failed.phase,
                micro_batch_size=max(unit.num_samples for unit in plan.units),
                smaller_micro_batch_size=self.sizes.smaller_sizes(plan)[1],
            )

    def too_large_to_plan(self, error: torch.OutOfMemoryError, step: int) -> DoesNotFitError:
        """Return the error for a step that ran out of memory while its samples were loaded, before any forward."""
        notes = "".join(f" ({note.removeprefix('anybatch: ')})" for note in getattr(error, "__notes__", ()))
        message = (
            f"out of memory in phase 'load' of step {step} (counted from 0), while loading samples to plan it. "
            f"Parameters and optimizer are as before the step. {self.resident.remedy()} A smaller micro_batch_size "
            f"loads fewer samples together. torch says: {error}{notes}"
        )
        return DoesNotFitError(message, rank=self.world.rank, step=step, phase="load")

    def _raise_does_not_fit(self, failed: OutOfMemory, tried: tuple[int, ...], step: int) -> None:
        """If this rank ran out of memory, raise a `DoesNotFitError` with the sizes that failed."""
        if failed.phase is None:
            return
        *larger, size = tried
        after = f" (after {', '.join(map(str, larger))})" if larger else ""
        message = (
            f"out of memory in phase {failed.phase!r} of step {step} (counted from 0), at micro-batches of "
            f"{size} sample{'s' * (size != 1)}{after}, and {self.sizes.why_not_smaller}. Parameters and optimizer "
            f"are as before the step. {self.resident.remedy()} torch says: {failed.message}"
        )
        raise DoesNotFitError(message, rank=self.world.rank, step=step, phase=failed.phase, micro_batch_size=size)


class InputVersions:
    """Version counters of a batch's tensors, to detect that a step has changed its batch before it is repeated."""

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        batch = batch.batch if isinstance(batch, RankShare) else batch
        self._tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
        self._before = num_changes(self._tensors, _DETECTION)

    def check_unchanged(self, step: int, world: World) -> None:
        """Refuse to repeat a step whose first attempt has changed its batch."""

        def refuse() -> None:
            if num_changes(self._tensors, _DETECTION) != self._before:
                message = (
                    f"out of memory in step {step} (counted from 0). It cannot be repeated with smaller micro-batches, "
                    "because the loss function changed its batch in place (batch['x'].div_(255)?). Work on a copy "
                    "(batch['x'] / 255), and resume from the last checkpoint."
                )
                raise CannotRedoError(message, rank=world.rank, step=step, code="batch_changed_in_place")

        world.run_on_all_ranks(refuse)


def why_impossible(prepared: Prepared, capabilities: Capabilities, constraints: SplitConstraints, world: World) -> str:
    """Return why a step cannot be repeated after an out-of-memory error, as a clause; empty if it can be."""
    if prepared.abort is None:
        return f"strategy {capabilities.name!r} cannot abort a step (strategy='all_reduce' can)"
    if world.size > 1 and constraints.syncs_in_forward:
        return (
            "BatchNorm layers with statistics over all ranks make ranks wait for each other in every forward (with "
            "norms='keep' or Ghost(group_size) they do not)"
        )
    return ""
