"""Out of memory in the middle of a step: agree, go back to its beginning, take smaller micro-batches.

Repeating the failed micro-batch alone would give wrong gradients and no error, since a backward that fails half-way has
added to some of them already. So everything that a step has changed goes back, on all ranks, and the whole effective
batch is run again, as if it had been cut so from the start. The loop is in `engine/step_runner.py`; this file holds the
part between two tries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from anybatch.core.records import PhaseName
from anybatch.core.splitting import BatchPlan, CutConstraints
from anybatch.core.torch_internals import num_changes
from anybatch.core.tree import tensors_of
from anybatch.engine.accumulation.planned_batch import RankShare
from anybatch.engine.micro_batch_size.backoff import SizeBackoff
from anybatch.engine.micro_batch_size.oom_halving import free_cached_memory
from anybatch.engine.step_state import StepState
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.engine.update.resident_tensors import ResidentMemory
from anybatch.errors import CannotRedoError, DoesNotFitError
from anybatch.parallel.strategy import Capabilities, Prepared
from anybatch.parallel.world import World

_BEGUN_AGAIN = "Seeing that a step to be begun again has changed its batch"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A try of a step that ended because some rank ran out of memory.

    Attributes:
        phase: where in the step this rank ran out; None if it was another rank.
        message: what torch said.
    """

    phase: PhaseName | None = None
    message: str | None = None


class Abortable(Protocol):
    """Runs the micro-batches of an effective batch, and can leave in the middle."""

    def abort(self, *, failed: bool) -> None:
        """Serve the collectives that other ranks wait in, and tell them; see `Prepared.abort`."""
        ...


class OomRetry:
    """Makes a step ready to be run again in smaller micro-batches.

    Args:
        state: buffers and generators, copied at the beginning of each step.
        world: the ranks.
        backoff: finds the smaller size.
        notifier: reports each time.
        resident: what stays in memory, for the error where nothing helps.
        clear: clears gradients.
        executor: what ran out of memory.
        impossible: why a step cannot be repeated, a clause; empty if it can.
    """

    def __init__(
        self,
        *,
        state: StepState,
        world: World,
        backoff: SizeBackoff,
        notifier: Notifier,
        resident: ResidentMemory,
        clear: Callable[[], None],
        executor: Abortable,
        impossible: str,
    ) -> None:
        self._state = state
        self._world = world
        self._backoff = backoff
        self._notifier = notifier
        self._resident = resident
        self._clear = clear
        self._executor = executor
        self._impossible = impossible

    def begin_step(self, step: int) -> None:
        """Copy the state that a retry begins from."""
        self._state.keep()
        self._backoff.begin_step(step)

    def retry_smaller_or_raise(self, failed: OutOfMemory, plan: BatchPlan, step: int, tried: tuple[int, ...]) -> int:
        """Undo what the failed try has done, on all ranks, and take smaller micro-batches from now on.

        Args:
            failed: what happened on this rank.
            plan: what did not fit.
            step: its number.
            tried: sizes that had not fitted before.

        Returns:
            The size of micro-batches that did not fit.

        Raises:
            DoesNotFitError: the smallest micro-batches do not fit on this rank; parameters are as before.
            RankFailedError: they do not fit on another one.
            CannotRedoError: the ranks cannot repeat this step.
        """
        free_cached_memory(self._world.device)
        # A rank that another one has informed has taken part in all collectives already.
        if failed.phase is not None:
            self._abort(failed, plan, step)
        self._clear()
        self._state.restore()
        before, after = self._backoff.shrink(plan, step)
        self._notifier.out_of_memory(failed.phase, failed.message, before, after)
        if after is None:
            # On all ranks, so that those with enough memory stop too, and name the reason.
            self._world.run_on_all_ranks(lambda: self._raise_does_not_fit(failed, (*tried, before), step))
        return before

    def too_large_to_plan(self, said: str, step: int) -> DoesNotFitError:
        """Return the error of a step that ran out of memory before its first micro-batch, when samples were looked at.

        Args:
            said: what torch said.
            step: its number.
        """
        message = (
            f"out of memory in phase 'load' of step {step} (counted from 0), before its first micro-batch, when its "
            f"samples were loaded to plan it. Parameters and optimizer are as before the step. "
            f"{self._resident.remedy()} A smaller micro_batch_size loads fewer samples at once. torch says: {said}"
        )
        return DoesNotFitError(message, rank=self._world.process, step=step, phase="load")

    def _abort(self, failed: OutOfMemory, plan: BatchPlan, step: int) -> None:
        reason = self._impossible
        if not reason:
            try:
                self._executor.abort(failed=False)
            # A strategy knows neither step nor phase: it gives the reason, and the whole error is made below.
            except CannotRedoError as error:
                reason = str(error)
        if reason:
            message = (
                f"out of memory in step {step} (counted from 0), which cannot be repeated in smaller micro-batches, "
                f"because {reason}. Resume from the last checkpoint with a smaller micro_batch_size. "
                f"torch says: {failed.message}"
            )
            raise CannotRedoError(
                message,
                rank=self._world.process,
                step=step,
                phase=failed.phase,
                micro_batch_size=max(unit.num_samples for unit in plan.units),
                smaller_micro_batch_size=self._backoff.smaller(plan),
            )

    def _raise_does_not_fit(self, failed: OutOfMemory, tried: tuple[int, ...], step: int) -> None:
        """Raise on a rank that ran out of memory itself.

        Raises:
            DoesNotFitError: with the sizes.
        """
        if failed.phase is None:
            return
        *larger, size = tried
        after = f" (after {', '.join(map(str, larger))})" if larger else ""
        message = (
            f"out of memory in phase {failed.phase!r} of step {step} (counted from 0), at micro-batches of "
            f"{size} sample{'s' * (size != 1)}{after}, and {self._backoff.why_not_smaller}. Parameters and optimizer "
            f"are as before the step. {self._resident.remedy()} torch says: {failed.message}"
        )
        raise DoesNotFitError(message, rank=self._world.process, step=step, phase=failed.phase, micro_batch_size=size)


class InputVersions:
    """How often the tensors of a batch have been written to, so that a step is not begun again on other numbers.

    A batch that is loaded anew for each try has none: its tensors are made when they are asked for.

    Args:
        batch: what `Engine.step` takes.
    """

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        batch = batch.batch if isinstance(batch, RankShare) else batch
        self._tensors = [] if hasattr(batch, "feed") else [one for one in tensors_of(batch) if not one.is_inference()]
        self._before = num_changes(self._tensors, _BEGUN_AGAIN)

    def refuse_changed(self, step: int, world: World) -> None:
        """Refuse to begin a step again whose first try has written to its inputs.

        Raises:
            CannotRedoError: on the rank whose inputs have changed.
            RankFailedError: on the others.
        """

        def refuse() -> None:
            if num_changes(self._tensors, _BEGUN_AGAIN) != self._before:
                message = (
                    f"out of memory in step {step} (counted from 0), which cannot be repeated in smaller "
                    "micro-batches, because the loss function has changed its batch in place (batch['x'].div_(255)?), "
                    "so that the second try would begin with other numbers. Work on a copy (batch['x'] / 255), and "
                    "resume from the last checkpoint."
                )
                raise CannotRedoError(message, rank=world.process, step=step)

        world.run_on_all_ranks(refuse)


def why_impossible(prepared: Prepared, needs: Capabilities, constraints: CutConstraints, world: World) -> str:
    """Return why a step cannot be repeated once a rank has run out of memory in it, a clause; empty if it can.

    Args:
        prepared: what the strategy has made of the model.
        needs: what the strategy can do and what it demands.
        constraints: what a policy about BatchNorm demands.
        world: the ranks.
    """
    if prepared.abort is None:
        return f"strategy {needs.name!r} cannot leave a step half-way (strategy='all_reduce' can)"
    if world.size > 1 and constraints.joins_ranks:
        return (
            "BatchNorm layers that are normalised over ranks wait for each other in the middle of each forward (under "
            "norms='keep' or Ghost(group_size) they do not)"
        )
    return ""
