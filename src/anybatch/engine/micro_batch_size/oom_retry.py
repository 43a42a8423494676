"""Out of memory in a step: undo the step on all ranks, and repeat it with smaller micro-batches.

Repeating only the failed micro-batch would give wrong gradients without an error, since an interrupted backward has
already added to some of them. So all ranks undo every change of the step and run the whole effective batch again, as if
it had been cut that way from the start. The loop is in `engine/step.py`; this file prepares each retry.
"""

import dataclasses
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeVar

import torch

from anybatch.core.geometry import Sizes, ceil_div
from anybatch.core.records import PhaseName
from anybatch.core.splitting import BatchPlan, CutConstraints
from anybatch.core.torch_internals import num_changes
from anybatch.core.tree import tensors_of
from anybatch.engine.decisions import Decisions
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import RankShare
from anybatch.engine.notifier import Notifier
from anybatch.engine.optimizer_memory import ResidentMemory
from anybatch.engine.updater import StepState
from anybatch.errors import CannotRedoError, DoesNotFitError
from anybatch.parallel.strategy import Capabilities, Prepared
from anybatch.parallel.world import World

FIRST_WAIT = 100
"""Steps until a former size is tried again; doubled after each failed retry."""


@dataclass(eq=False, repr=False)
class SizeBackoff:
    """Reduces the sizes of a run after out of memory. All ranks decide alike, from step counts only.

    A size given by the user stays reduced, so the run equals, bit for bit, a run with the smaller size. Under "auto"
    the engine chooses the size, and tries the former one again later.
    """

    sizes: RunSizes
    decisions: Decisions
    notifier: Notifier

    def __post_init__(self) -> None:
        self.former_sizes: list[Sizes] = []
        self._steps_to_wait = FIRST_WAIT
        self._next_try = 0
        self._reduced: Sizes | None = None
        self.why_not_smaller = ""

    @property
    def named(self) -> Sizes:
        """The sizes before the first reduction."""
        return self.former_sizes[0] if self.former_sizes else self.sizes.sizes

    def begin_step(self, step: int) -> None:
        """End a successful retry, and start a retry of a former size if it is due; requires a former size."""
        if self._reduced is not None and step > self._next_try:  # the retry succeeded
            self._reduced = None
            self.former_sizes.pop()
            self._next_try = step - 1 + self._steps_to_wait
        # Another process may have used the memory only temporarily, so "auto" does not stay reduced forever.
        if self.sizes.is_auto and self.former_sizes and self._reduced is None and step >= self._next_try:
            self._reduced, self._next_try = self.sizes.sizes, step
            self.sizes.sizes = self.former_sizes[-1]
            retry = (
                f"the larger size again from step {step} on, after {self._steps_to_wait} steps with "
                f"{_in_words(self._reduced)}"
            )
            self.decisions.add("micro_batch_size", retry)
            self.notifier.diagnosis("micro_batch_size_grows", f"trying {retry}")

    def shrink(self, plan: BatchPlan, step: int) -> tuple[int, int | None]:
        """Reduce the sizes from now on."""
        before = max(unit.num_samples for unit in plan.units)
        if self._reduced is not None:  # the retry failed
            smaller: Sizes | None = self._reduced
            self._reduced = None
            self._steps_to_wait *= 2
        else:
            smaller = self._smaller(plan, before)
            if smaller is not None:
                self.former_sizes.append(self.sizes.sizes)
        if smaller is None:
            return before, None
        self.sizes.sizes = smaller
        self._next_try = step + self._steps_to_wait
        reason = f"{_in_words(smaller)}, because {before} ran out of memory in step {step}"
        self.decisions.add("micro_batch_size", reason)
        return before, _largest(smaller, plan)

    def smaller(self, plan: BatchPlan) -> int | None:
        """Return the micro-batch size to use after a cut that did not fit; None if it cannot be smaller."""
        smaller = self._smaller(plan, max(unit.num_samples for unit in plan.units))
        return None if smaller is None else _largest(smaller, plan)

    def state(self) -> dict[str, Any] | None:
        """Return the state for a resumed run; None if no size was reduced."""
        if not self.former_sizes:
            return None
        return {
            "sizes": dataclasses.asdict(self._reduced or self.sizes.sizes),
            "formers": [dataclasses.asdict(sizes) for sizes in self.former_sizes],
            "wait": self._steps_to_wait,
            "next_try": self._next_try,
            "is_trying": self._reduced is not None,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore sizes that the saved run found by a search or reduced, and report other changes.

        Warns:
            UserWarning: the effective batch size has changed.
        """
        saved: Mapping[str, int | None] = state["sizes"]
        for name, taken in self.sizes.take(saved, state["decisions"]).items():
            self.decisions.add(name, taken)
        changed = self.sizes.changes(saved)
        if changed:
            self.decisions.add("resumed with changes", changed)
            self.notifier.diagnosis("resumed_with_changes", f"resumed with changes: {changed}")
        if self.sizes.sizes.effective_batch_size != saved["effective_batch_size"]:
            warnings.warn(f"resumed with changes: {changed}", stacklevel=3)
        if (restored := self._restore(state.get("resized"))) is not None:
            self.decisions.add("micro_batch_size", restored)

    def _restore(self, saved: Mapping[str, Any] | None) -> str | None:
        """Restore reduced sizes if the initial sizes are the same, and return the decision in words."""
        if saved is None or Sizes(**saved["formers"][0]) != self.named:
            return None
        self.former_sizes = [Sizes(**sizes) for sizes in saved["formers"]]
        self._steps_to_wait, self._next_try = saved["wait"], saved["next_try"]
        sizes = Sizes(**saved["sizes"])
        self._reduced = sizes if saved["is_trying"] else None
        self.sizes.sizes = self.former_sizes[-1] if saved["is_trying"] else sizes
        return f"{_in_words(self.sizes.sizes)}, as in the checkpoint, because more ran out of memory"

    def _smaller(self, plan: BatchPlan, before: int) -> Sizes | None:
        """Return sizes that double the number of micro-batches, in nearly equal parts."""
        smallest = min(plan.cut.group or 1, before)
        if self.sizes.constraints.whole:
            self.why_not_smaller = "norms=Exact(method='checkpoint') runs each rank share as one micro-batch"
            return None
        if before <= smallest + (plan.cut.group is not None):  # a group may hold one sample more
            self.why_not_smaller = (
                "they cannot be smaller than one sample"
                if plan.cut.group is None
                else f"they cannot be smaller than a group of {plan.cut.group}"
            )
            return None
        # All ranks use the same size, so the rank with most micro-batches determines it.
        share = max(plan.shares, key=lambda units: sum(unit.weight for unit in units))
        counting = [unit for unit in share if unit.weight]
        sizes = self.sizes.sizes
        if sizes.micro_batch_tokens is not None:
            # A sample with more tokens is run alone.
            return dataclasses.replace(sizes, micro_batch_tokens=ceil_div(sizes.micro_batch_tokens, 2))
        if sizes.micro_batch_size is None and sizes.accumulation_steps is not None:
            return dataclasses.replace(sizes, accumulation_steps=2 * sizes.accumulation_steps)
        after = ceil_div(sum(unit.num_samples for unit in counting), 2 * len(counting))
        if plan.cut.group is not None:
            after = max(plan.cut.group, after // plan.cut.group * plan.cut.group)
        # At most `before - 1`: rounding up, or to whole groups, may return the size that did not fit.
        return dataclasses.replace(sizes, micro_batch_size=min(after, before - 1), accumulation_steps=None)


def _in_words(sizes: Sizes) -> str:
    if sizes.micro_batch_tokens is not None:
        return f"at most {sizes.micro_batch_tokens:,} tokens"
    if sizes.micro_batch_size is not None:
        return f"at most {sizes.micro_batch_size} samples"
    return f"{sizes.accumulation_steps} accumulation steps"


def _largest(sizes: Sizes, plan: BatchPlan) -> int:
    if sizes.micro_batch_size is not None:
        return sizes.micro_batch_size
    if sizes.micro_batch_tokens is not None:  # the number of samples depends on their lengths: about half
        return ceil_div(max(unit.num_samples for unit in plan.units), 2)
    assert sizes.accumulation_steps is not None
    share = max(sum(unit.num_samples for unit in units if unit.weight) for units in plan.shares)
    return ceil_div(share, sizes.accumulation_steps)


T = TypeVar("T")


@dataclass(eq=False, repr=False)
class OomHalving:
    """Runs samples in pieces, and halves the pieces after out of memory; a reduced size is kept.

    Correct only if a piece that fails has changed nothing, and no other rank waits for it.
    """

    device: torch.device
    notify: Callable[[int, int], None]
    _: KW_ONLY
    alone: bool

    def __post_init__(self) -> None:
        self._most: int | None = None

    def run(self, num_samples: int, piece: Callable[[int, int], T]) -> Iterator[T]:
        """Yield the results of `piece(start, stop)`, for pieces that cover all samples.

        Raises:
            DoesNotFitError: a single sample does not fit.
        """
        start = 0
        while start < num_samples:
            size = min(self._most or num_samples, num_samples - start)
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
            self._most = ceil_div(size, 2)
            self.notify(size, self._most)


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes, to free the tensors in them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_cached_memory(device: torch.device) -> None:
    """Collect reference cycles, and return torch's cached memory to the device."""
    # First, since tensors in cycles are not free yet.
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


_REPEATED = "Detecting changes of a batch before its step is repeated"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An attempt of a step that ended because a rank ran out of memory."""

    phase: PhaseName | None = None
    message: str | None = None


class Abortable(Protocol):
    """Runs the micro-batches of an effective batch, and can stop in the middle."""

    def abort(self, *, failed: bool) -> None:
        """Join the collectives that other ranks wait in, and signal the abort; see `Prepared.abort`."""
        ...


@dataclass(eq=False, repr=False)
class OomRetry:
    """Prepares a step to run again with smaller micro-batches."""

    _: KW_ONLY
    state: StepState
    world: World
    backoff: SizeBackoff
    notifier: Notifier
    resident: ResidentMemory
    clear: Callable[[], None]
    executor: Abortable
    impossible: str

    def retry_smaller_or_raise(self, failed: OutOfMemory, plan: BatchPlan, step: int, tried: tuple[int, ...]) -> int:
        """Undo the failed attempt on all ranks, and reduce the micro-batches from now on.

        Raises:
            DoesNotFitError: the smallest micro-batches do not fit on this rank; parameters are unchanged.
            RankFailedError: they do not fit on another rank.
            CannotRedoError: the ranks cannot repeat this step.
        """
        free_cached_memory(self.world.device)
        # If another rank failed, this rank has already taken part in all collectives.
        if failed.phase is not None:
            self._abort(failed, plan, step)
        self.clear()
        self.state.restore()
        before, after = self.backoff.shrink(plan, step)
        self.notifier.out_of_memory(failed.phase, failed.message, before, after)
        if after is None:
            # On all ranks, so that ranks with enough memory stop too, with the reason.
            self.world.run_on_all_ranks(lambda: self._raise_does_not_fit(failed, (*tried, before), step))
        return before

    def too_large_to_plan(self, torch_message: str, step: int) -> DoesNotFitError:
        """Return the error for a step that ran out of memory while its samples were loaded to plan it."""
        message = (
            f"out of memory in phase 'load' of step {step} (counted from 0), while loading samples to plan it. "
            f"Parameters and optimizer are as before the step. {self.resident.remedy()} A smaller micro_batch_size "
            f"loads fewer samples together. torch says: {torch_message}"
        )
        return DoesNotFitError(message, rank=self.world.process, step=step, phase="load")

    def _abort(self, failed: OutOfMemory, plan: BatchPlan, step: int) -> None:
        reason = self.impossible
        if not reason:
            try:
                self.executor.abort(failed=False)
            # Strategies have neither step nor phase: they give the reason, and the full error is raised below.
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
                rank=self.world.process,
                step=step,
                phase=failed.phase,
                micro_batch_size=max(unit.num_samples for unit in plan.units),
                smaller_micro_batch_size=self.backoff.smaller(plan),
            )

    def _raise_does_not_fit(self, failed: OutOfMemory, tried: tuple[int, ...], step: int) -> None:
        """Raise a `DoesNotFitError` with the sizes if this rank ran out of memory."""
        if failed.phase is None:
            return
        *larger, size = tried
        after = f" (after {', '.join(map(str, larger))})" if larger else ""
        message = (
            f"out of memory in phase {failed.phase!r} of step {step} (counted from 0), at micro-batches of "
            f"{size} sample{'s' * (size != 1)}{after}, and {self.backoff.why_not_smaller}. Parameters and optimizer "
            f"are as before the step. {self.resident.remedy()} torch says: {failed.message}"
        )
        raise DoesNotFitError(message, rank=self.world.process, step=step, phase=failed.phase, micro_batch_size=size)


class InputVersions:
    """Version counters of a batch's tensors, to detect writes to the batch before a step is repeated.

    Effective batches that load their samples for each attempt have no tensors to track.
    """

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        batch = batch.batch if isinstance(batch, RankShare) else batch
        self._tensors = [] if hasattr(batch, "feed") else [t for t in tensors_of(batch) if not t.is_inference()]
        self._before = num_changes(self._tensors, _REPEATED)

    def refuse_changed(self, step: int, world: World) -> None:
        """Refuse to repeat a step whose first attempt wrote to its inputs.

        Raises:
            CannotRedoError: on the rank whose inputs have changed.
            RankFailedError: on the others.
        """

        def refuse() -> None:
            if num_changes(self._tensors, _REPEATED) != self._before:
                message = (
                    f"out of memory in step {step} (counted from 0). It cannot be repeated with smaller micro-batches, "
                    "because the loss function changed its batch in place (batch['x'].div_(255)?). Work on a copy "
                    "(batch['x'] / 255), and resume from the last checkpoint."
                )
                raise CannotRedoError(message, rank=world.process, step=step, code="batch_changed_in_place")

        world.run_on_all_ranks(refuse)


def why_impossible(prepared: Prepared, needs: Capabilities, constraints: CutConstraints, world: World) -> str:
    """Return why a step cannot be repeated after out of memory, as a clause; empty if it can."""
    if prepared.abort is None:
        return f"strategy {needs.name!r} cannot abort a step (strategy='all_reduce' can)"
    if world.size > 1 and constraints.joins_ranks:
        return (
            "BatchNorm layers with statistics over all ranks make ranks wait for each other in every forward (with "
            "norms='keep' or Ghost(group_size) they do not)"
        )
    return ""
