"""Clean up after an error and report it to the other ranks."""

from collections.abc import Callable
from types import TracebackType

import torch

from anybatch.engine.compatibility import refused_in_backward
from anybatch.errors import AnyBatchError, MemoryExhaustedError, NonFiniteError, WorldError
from anybatch.parallel.world import World


class failures_reported:  # noqa: N801 (used like the functions of contextlib)
    """Context of a call on all ranks: clean up after an error, and report it to the other ranks.

    A class, because a generator context is several times as slow, which is measurable in each step.

    Args:
        world: the ranks.
        name: of the call that every rank makes, such as "engine.step".
        step: its number; None between steps.
        undo: called after an error.
        check: called first; its errors are reported too.
        barrier: wait for all ranks first; for rare calls.

    Raises:
        RanksDifferError: another rank made a different call.
        RankFailedError: a collective failed because another rank has left it.
        CompositionError: the error comes from a combination that is known not to work.
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
