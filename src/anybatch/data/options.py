"""The arguments of `batches`, and the global order of samples that they give."""

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, DistributedSampler, Subset

from anybatch.core.batch import Position
from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.randomness import order_seed
from anybatch.core.schedules import BatchRamp
from anybatch.data.collate import Collate, Lengths
from anybatch.data.loading import OverEffectiveBatch
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.errors import BatchSizeError, DataError


@dataclass(frozen=True, slots=True)
class RunRange:
    """The range of a run: from `start` to the beginning of `end_epoch`, or over a number of `steps`."""

    start: Position
    end_epoch: int | None
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The arguments of `batches`, with defaults filled in."""

    effective_batch_size: int | BatchRamp
    shuffle: bool
    sampler: Any
    seed: int
    drop_last: bool
    start: Position | None
    epochs: int | None
    steps: int | None
    collate: Collate
    num_workers: int
    pin_memory: bool
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        """Check each value, and the values together.

        Raises:
            BatchSizeError: the effective batch size is not a whole number of at least 1.
            DataError: any other value that cannot be used, or values that contradict.
        """
        if not isinstance(self.effective_batch_size, BatchRamp):  # a ramp checks its own sizes
            checked_int("effective_batch_size", self.effective_batch_size, error=BatchSizeError)
        checked_int("num_workers", self.num_workers, least=0, error=DataError)
        checked_int("seed", self.seed, least=None, error=DataError)
        if not callable(self.collate):
            message = f"collate={self.collate!r} must be a function of a list of samples, or None for torch's own."
            raise DataError(message, code="not_a_function")
        if self.lengths is not None and isinstance(self.collate, OverEffectiveBatch):
            message = (
                "lengths= cuts a batch into micro-batches with little padding, but OverEffectiveBatch pads the whole "
                "batch before it is cut. Leave one of them out."
            )
            raise DataError(message)
        if self.sampler is not None:
            _check_sampler(self.sampler)
        _check_length(self.epochs, self.steps, self.start)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Effective batch sizes, in the order of the stages."""
        size = self.effective_batch_size
        return (size,) if isinstance(size, int) else size.sizes

    @property
    def span(self) -> RunRange:
        """Range of the run from `start`, or from the beginning without a start."""
        return self.span_from(self.start or Position(), resumed=True)

    def span_from(self, position: Position, *, resumed: bool = False) -> RunRange:
        """Return the range of a run that begins at a position.

        If `resumed`, epochs count from epoch 0, as before the resume, and a run at or after its end gets the same
        number of epochs again. Otherwise epochs count from the position's epoch.
        """
        if self.steps is not None:
            return RunRange(position, None, self.steps)
        epochs = self.epochs or 1
        is_within = resumed and (position < Position(epochs) or self.start is not None)
        return RunRange(position, epochs if is_within else position.epoch + epochs, None)


def _check_sampler(sampler: Any) -> None:  # noqa: ANN401 (torch's)
    if isinstance(sampler, BatchSampler):
        message = (
            f"sampler is a {type(sampler).__name__}, which makes batches; ab.batches makes them itself, of "
            "effective_batch_size. Give the sampler inside it."
        )
        raise DataError(message, code="sampler_of_batches")
    if isinstance(sampler, DistributedSampler):
        message = (
            "sampler is a DistributedSampler, and ab.batches gives each rank its share of every batch itself, so "
            "samples would be lost. Leave it out; shuffle=True gives each epoch a new order."
        )
        raise DataError(message, code="distributed_sampler")
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        message = f"sampler ({type(sampler).__name__}) must yield indices and have a length, as torch's samplers do."
        raise DataError(message, code="not_a_sampler")
    if getattr(sampler, "generator", None) is not None:
        message = (
            "the sampler has its own generator, whose state a resumed run does not have. Leave generator= out: "
            "ab.batches(seed=...) seeds the sampler in each epoch."
        )
        raise DataError(message, code="own_generator")


def _check_length(epochs: int | None, steps: int | None, start: Position | None) -> None:
    if start is not None:
        if not isinstance(start, Position):
            message = f"{start=} must be a Position(epoch, sample_offset), such as the `end` of a batch."
            raise DataError(message, code="not_a_position")
        checked_int("start.epoch", start.epoch, least=0, error=DataError)
        checked_int("start.sample_offset", start.sample_offset, least=0, error=DataError)
    if steps is not None:
        checked_int("steps", steps, error=DataError)
        if epochs is not None:
            message = f"{epochs=} and {steps=} both set the end of the run. Give one of them."
            raise DataError(message, code="epochs_and_steps")
        return
    last = 1 if epochs is None else epochs
    checked_int("epochs", last, error=DataError)
    if start is not None and start > Position(last):
        given = f"{epochs=}" if epochs is not None else "epochs=1, as neither epochs nor steps is given,"
        message = (
            f"start={start} lies beyond the end of the run: {given} counts from epoch 0. "
            f"Give epochs={start.epoch + 1} or more to run on, or steps= to count from the start. "
            "Without start= the run continues at the engine's position."
        )
        raise DataError(message, code="start_beyond_end")


def pins_memory(pin_memory: bool | None) -> bool:  # noqa: FBT001 (the user's argument)
    """Return whether to pin: as requested, or if an accelerator reads pinned memory; refuse pinning without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    possible = accelerator is not None and accelerator.type != "mps"  # mps shares the host's memory
    if pin_memory and not possible:
        name = "no accelerator" if accelerator is None else accelerator.type
        message = f"{pin_memory=} needs an accelerator that reads pinned memory; here is {name}. Leave it at None."
        raise DataError(message, code="nothing_to_pin_for")
    return possible if pin_memory is None else pin_memory


def sample_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the ids of all samples in the order of `epoch`: int64 tensor (num_samples,).

    It depends on the arguments only, so that every rank and every resumed run computes the same order.
    """
    if not shuffle:
        return torch.arange(num_samples)
    # A separate generator, so that the order depends on the seed alone and the caller's state does not change.
    generator = torch.Generator().manual_seed(order_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def sampled_order(sampler: Any, num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:  # noqa: ANN401 (torch's)
    """Return the ids that a sampler draws in `epoch`: int64 tensor (num_samples,); the same on every rank.

    Its draws from the global generators are keyed by (seed, epoch). `epoch` is passed to its `set_epoch`, if any.
    """
    with preserved_random_state():
        seed_generators(order_seed(seed, epoch))
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        drawn = list(sampler)
    if len(drawn) != num_samples or not all(isinstance(index, (int, torch.Tensor)) for index in drawn):
        kinds = ", ".join(sorted({type(index).__name__ for index in drawn}))
        message = (
            f"the sampler yielded {len(drawn)} items ({kinds}), and its length is {num_samples}. It must yield that "
            "many indices of single samples: ab.batches makes the batches, so give the sampler inside a batch sampler."
        )
        raise DataError(message, code="sampler_of_batches")
    return torch.tensor([int(index) for index in drawn], dtype=torch.int64)


def digest_of_ids(ids: torch.Tensor, before: int = 0) -> int:
    """Return a checksum of sample ids, int64 (ids,), in their order; `before` is the checksum of the ids before."""
    ids = ids.contiguous()
    return crc32(ctypes.string_at(ids.data_ptr(), ids.numel() * ids.itemsize), before)


def digest_of_subset(dataset: object) -> int:
    """Return a checksum of the indices of a subset, such as a part of `random_split`; 0 for another data set."""
    digest = 0
    while isinstance(dataset, Subset):
        digest = digest_of_ids(torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu"), digest)
        dataset = dataset.dataset
    return digest


@dataclass(frozen=True, slots=True)
class SampleSchedule:
    """The cut of an epoch of `num_samples` into steps. Batches do not cross epochs; the last one may be smaller.

    A step may start at any offset, not only at multiples of the effective batch size: a run may be resumed with
    another.
    """

    num_samples: int
    options: BatchOptions

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch; raises a `TypeError` under a ramp, where epochs differ."""
        if isinstance(self.options.effective_batch_size, BatchRamp):
            message = (
                f"the number of steps differs from epoch to epoch: batches of {self.options.effective_batch_size}."
            )
            raise TypeError(message)
        return self._steps_from(Position())

    def size_at(self, position: Position) -> int:
        """Return the effective batch size of a step that begins at a position; a ramp counts dropped samples too."""
        size = self.options.effective_batch_size
        return size if isinstance(size, int) else size.at(self._num_before(position))

    def normalized(self, position: Position) -> Position:
        """Return the start of the next step: `position`, or the next epoch's start if this epoch has no step left."""
        has_step = (
            position.sample_offset + (self.size_at(position) if self.options.drop_last else 1) <= self.num_samples
        )
        return position if has_step else Position(position.epoch + 1)

    def num_steps(self, start: Position, end_epoch: int | None, steps: int | None) -> int:
        """Return the number of steps from `start`: `steps`, or all steps before `end_epoch`."""
        if steps is not None:
            return steps
        if end_epoch is None or start.epoch >= end_epoch:
            return 0
        of_first = self._steps_from(start)
        if isinstance(self.options.effective_batch_size, BatchRamp):
            return of_first + sum(self._steps_from(Position(epoch)) for epoch in range(start.epoch + 1, end_epoch))
        return of_first + (end_epoch - start.epoch - 1) * self.steps_per_epoch

    def end(self, start: Position, end_epoch: int | None, steps: int | None) -> Position:
        """Return the end of a run: `steps` after `start`, or the start of `end_epoch`."""
        if steps is None:
            return Position(end_epoch or 0)
        left = self._steps_from(start)
        if isinstance(self.options.effective_batch_size, BatchRamp):
            while steps >= left:
                start, steps = Position(start.epoch + 1), steps - left
                left = self._steps_from(start)
            first, _ = next(itertools.islice(self.steps_of_epoch(start), steps, None))
            return Position(start.epoch, first)
        if steps < left:
            return Position(start.epoch, start.sample_offset + steps * self.options.effective_batch_size)
        num_epochs, rest = divmod(steps - left, self.steps_per_epoch)
        return Position(start.epoch + 1 + num_epochs, rest * self.options.effective_batch_size)

    def steps_of_epoch(self, position: Position) -> Iterator[tuple[int, int]]:
        """Yield the range of offsets of each step from `position` to the end of its epoch."""
        return ((start.sample_offset, stop) for start, stop, _ in self.places_of_steps(position))

    def places_of_steps(self, position: Position) -> Iterator[tuple[Position, int, Position]]:
        """Yield, for each step from `position` to the end of its epoch, its start, exclusive end offset, and end."""
        epoch, start = position.epoch, self.normalized(position)
        fixed_size = self.options.effective_batch_size if isinstance(self.options.effective_batch_size, int) else None
        while start.epoch == epoch:
            size = self.size_at(start) if fixed_size is None else fixed_size
            stop = min(start.sample_offset + size, self.num_samples)
            end = Position(epoch, stop)
            # In the middle of an epoch another full step follows, so the end is normalized already.
            if fixed_size is None or stop + fixed_size > self.num_samples:
                end = self.normalized(end)
            yield start, stop, end
            start = end

    def _steps_from(self, position: Position) -> int:
        size, rest = self.options.effective_batch_size, max(0, self.num_samples - position.sample_offset)
        if isinstance(size, BatchRamp):
            if self._num_before(position) < size.num_samples:  # in the last stage all sizes are equal
                return sum(1 for _ in self.steps_of_epoch(position))
            size = size.sizes[-1]
        return rest // size if self.options.drop_last else ceil_div(rest, size)

    def _num_before(self, position: Position) -> int:
        return position.epoch * self.num_samples + position.sample_offset
