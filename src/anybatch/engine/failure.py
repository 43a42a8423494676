"""Behind an error nothing stays half-done, and the other ranks learn the reason."""

from collections.abc import Callable
from types import TracebackType

import torch

from anybatch.engine.compatibility import refused_in_backward
from anybatch.errors import AnyBatchError, MemoryExhaustedError, NonFiniteError, WorldError
from anybatch.parallel.world import World


class failures_reported:  # noqa: N801 (entered where it is called, as the functions of contextlib are)
    """Leave nothing half-done behind an error, and report to the other ranks why this one stopped.

    A class, because a generator's context takes several times as long, which shows in each step.

    Args:
        world: the ranks.
        name: of what every rank has called, such as "engine.step".
        step: its number; None between steps.
        undo: called behind an error.
        check: called first; what it raises is reported too.
        barrier: wait for all ranks before anything else; for what is called now and then.

    Raises:
        RanksDifferError: another rank has called something else.
        RankFailedError: what broke was a collective that another rank has left.
        CompositionError: what broke is known not to compose.
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
        world = self._world
        world.enter(self._name, self._step, barrier=self._barrier)
        try:
            if self._check is not None:
                self._check()
            if world.roll_call is not None:
                world.roll_call.wait_at_barrier()
        except BaseException as error:
            self._leave_behind(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave_behind(error)
        elif self._world.roll_call is not None:
            self._world.roll_call.leave()

    def _leave_behind(self, error: BaseException) -> None:
        """Undo, tell the other ranks, and raise what is to be raised in the place of an error, if anything is."""
        try:
            # First, because every path from here raises.
            self._restore_state(error)
            raised = _told(error, self._world, self._step)
            if raised is not error:
                raise raised from error
        finally:
            if self._world.roll_call is not None:
                self._world.roll_call.leave()

    def _restore_state(self, error: BaseException) -> None:
        try:
            self._undo()
        except Exception as second:  # noqa: BLE001 (as on a device that fails every call: the first error is the cause)
            error.add_note(
                f"anybatch: restoring the state from before the step failed too ({type(second).__name__}: {second}). "
                "Load the last checkpoint before you continue."
            )


def _told(error: BaseException, world: World, step: int | None) -> BaseException:
    """Tell the other ranks about an error, and return what to raise for it."""
    if not isinstance(error, AnyBatchError):
        place = "between steps" if step is None else f"in step {step} (counted from 0)"
        error.add_note(f"anybatch: {place}, on rank {world.process} of {world.num_processes}.")
    _complete(error, world.process, step)
    refused: AnyBatchError | None = refused_in_backward(error)
    # A collective that another rank has left raises a RuntimeError here; the cause is that rank's own error.
    broken = isinstance(error, RuntimeError) and not isinstance(
        error, (WorldError, MemoryExhaustedError, torch.OutOfMemoryError)
    )
    roll_call = world.roll_call
    if refused is None and broken and roll_call is not None and (world.published_failure() or roll_call.next_has_ended):
        refused = roll_call.cause_of(error)  # a collective of the user's module, most likely
    # Behind the last message of a step the others have gone on, unless they raise the same.
    ahead = roll_call is not None and roll_call.has_agreed and not isinstance(error, (NonFiniteError, WorldError))
    world.publish_failure(refused or error, step, ahead=ahead)
    if roll_call is not None:
        roll_call.fail(ahead=ahead)
    return refused or error


def _complete(error: BaseException, rank: int, step: int | None) -> None:
    """Fill in the fields that the place which raised could not know."""
    if isinstance(error, (MemoryExhaustedError, NonFiniteError)) and error.step is None:
        error.step = step
    if isinstance(error, MemoryExhaustedError) and error.rank is None:
        error.rank = rank
