"""The state that a step changes before its update: restored whenever the step ends without one."""

from collections.abc import Sequence

import torch

from anybatch.core.buffers import BufferKeeper


class StepState:
    """A copy of buffers and generators from before the current step.

    Every way of leaving an unfinished step restores them: a retry after out of memory, an exception, a loss that is not
    finite, another rank's failure, Ctrl-C. Gradients are cleared elsewhere; parameters and optimizer do not change
    before the update.

    Python state that the loss reaches is not restored: other threads may change it at any time.

    Args:
        buffers: the buffers of everything that trains.
        generators: generators that the forward advances; empty where random numbers are keyed.
    """

    def __init__(self, buffers: BufferKeeper, generators: Sequence[torch.Generator]) -> None:
        self._buffers = buffers
        self._generators = generators
        self._states: list[torch.Tensor] = []
        self._is_kept = False

    def keep(self) -> None:
        """Copy the state at the beginning of a step, into the memory of the last copy."""
        self._is_kept = False  # while the copy is incomplete
        self._buffers.keep()
        self._states = [generator.get_state() for generator in self._generators]
        self._is_kept = True

    def restore(self) -> None:
        """Restore the copy, as often as needed; do nothing if the step has ended or not begun."""
        if self._is_kept:
            self._buffers.restore()
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)

    def restore_buffers(self) -> None:
        """Restore the copy of the buffers alone."""
        if self._is_kept:
            self._buffers.restore()

    def skip(self) -> None:
        """End the step without an update: restore buffers. Its samples count, so generators continue."""
        if self._is_kept:
            self._buffers.restore()
            self._is_kept = False

    def release(self) -> None:
        """End the step and discard the copy."""
        self._is_kept = False
