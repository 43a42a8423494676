"""Which samples make which step: one global order per epoch, cut into consecutive effective batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.core.batch import Position
from anybatch.core.geometry import ceil_div
from anybatch.core.randomness import order_seed
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.errors import DataError


def sample_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the ids of all samples in the order of `epoch`: int64 tensor (num_samples,).

    A function of its arguments only, so that every rank and every resumed run finds the same one.

    Args:
        num_samples: samples of the data set.
        seed: of the run.
        epoch: from 0 on; each has an order of its own.
        shuffle: False for the order of the data set.
    """
    if not shuffle:
        return torch.arange(num_samples)
    # A generator of its own, so that the order depends on the seed alone and the caller's is left as it is.
    generator = torch.Generator().manual_seed(order_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def sampled_order(sampler: Any, num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:  # noqa: ANN401 (torch's)
    """Return the ids that a sampler draws in `epoch`: int64 tensor (num_samples,); the same on every rank.

    Args:
        sampler: an iterable of indices; what it draws from the global generators is keyed by (seed, epoch).
        num_samples: its length.
        seed: of the run.
        epoch: from 0 on; handed to its `set_epoch`, if it has one.

    Raises:
        DataError: it yields something else than so many indices.
    """
    with preserved_random_state():
        seed_generators(order_seed(seed, epoch))
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        drawn = list(sampler)
    if len(drawn) != num_samples or not all(isinstance(index, (int, torch.Tensor)) for index in drawn):
        kinds = ", ".join(sorted({type(index).__name__ for index in drawn}))
        message = (
            f"the sampler yielded {len(drawn)} items ({kinds}), and its length is {num_samples}. It must yield as many "
            "indices of single samples: ab.batches makes the batches, so give the sampler inside a batch sampler."
        )
        raise DataError(message)
    return torch.tensor([int(index) for index in drawn], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class SampleSchedule:
    """How an epoch of `num_samples` is cut into steps. Batches do not cross epochs; the last one may be smaller.

    Any offset may be a step's start, not only multiples of the effective batch size: a run may be resumed with another.

    Args:
        num_samples: samples of an epoch.
        effective_batch_size: samples of one step.
        drop_last: leave out a last batch that is not full.
    """

    num_samples: int
    effective_batch_size: int
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch that is begun at its first sample."""
        return self._steps_from(0)

    def normalized(self, position: Position) -> Position:
        """Return where the next step starts: `position`, or the next epoch's start if no step is left in this one."""
        return position if self._steps_from(position.sample_offset) else Position(position.epoch + 1)

    def num_steps(self, start: Position, end_epoch: int | None, steps: int | None) -> int:
        """Return the number of steps from `start`: `steps`, or as many as there are before `end_epoch`."""
        if steps is not None:
            return steps
        if end_epoch is None or start.epoch >= end_epoch:
            return 0
        return self._steps_from(start.sample_offset) + (end_epoch - start.epoch - 1) * self.steps_per_epoch

    def end(self, start: Position, end_epoch: int | None, steps: int | None) -> Position:
        """Return the position of the first step that is not run: `steps` after `start`, or the start of `end_epoch`."""
        if steps is None:
            return Position(end_epoch or 0)
        left = self._steps_from(start.sample_offset)
        if steps < left:
            return Position(start.epoch, start.sample_offset + steps * self.effective_batch_size)
        num_epochs, rest = divmod(steps - left, self.steps_per_epoch)
        return Position(start.epoch + 1 + num_epochs, rest * self.effective_batch_size)

    def steps_of_epoch(self, position: Position) -> Iterator[tuple[int, int]]:
        """Yield the range of offsets of each step from `position` to the end of its epoch."""
        for number in range(self._steps_from(position.sample_offset)):
            start = position.sample_offset + number * self.effective_batch_size
            yield start, min(start + self.effective_batch_size, self.num_samples)

    def _steps_from(self, sample_offset: int) -> int:
        rest = max(0, self.num_samples - sample_offset)
        return rest // self.effective_batch_size if self.drop_last else ceil_div(rest, self.effective_batch_size)
