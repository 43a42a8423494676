"""The arguments of `batches`, with the checks that do not depend on the kind of data set."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from anybatch.core.batch import Position
from anybatch.core.batch_ramp import BatchRamp
from anybatch.core.whole_numbers import checked_int
from anybatch.data.fetch import Collate, OverEffectiveBatch
from anybatch.data.lengths import Lengths
from anybatch.errors import BatchSizeError, DataError


@dataclass(frozen=True, slots=True)
class RunRange:
    """The range of a run.

    Attributes:
        start: first position.
        end_epoch: first epoch that is not run; None if `steps` is given.
        steps: number of steps from `start` on; None if `end_epoch` is given.
    """

    start: Position
    end_epoch: int | None
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The arguments of `batches`, with defaults filled in.

    Attributes:
        effective_batch_size: samples of one step, or a ramp of them.
        shuffle: whether each epoch has a new order.
        sampler: draws the order of each epoch instead; None for none.
        seed: the seed of the order and of the augmentation.
        drop_last: drop the last batch of an epoch if it is not full.
        start: first position; None for the engine's position.
        epochs: epochs to run; None for one, or if `steps` is given.
        steps: number of steps from the start on; None if `epochs` is given.
        collate: makes a micro-batch of a list of samples.
        num_workers: worker processes; 0 loads in the calling process.
        pin_memory: whether to pin micro-batches.
        lengths: length of each sample; None if batches are not cut by length.
    """

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
            raise DataError(message)
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
        raise DataError(message)
    if isinstance(sampler, DistributedSampler):
        message = (
            "sampler is a DistributedSampler, and ab.batches gives each rank its share of every batch itself, so "
            "samples would be lost. Leave it out; shuffle=True gives each epoch a new order."
        )
        raise DataError(message)
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        message = f"sampler ({type(sampler).__name__}) must yield indices and have a length, as torch's samplers do."
        raise DataError(message)
    if getattr(sampler, "generator", None) is not None:
        message = (
            "the sampler has its own generator, whose state a resumed run does not have. Leave generator= out: "
            "ab.batches(seed=...) seeds the sampler in each epoch."
        )
        raise DataError(message)


def _check_length(epochs: int | None, steps: int | None, start: Position | None) -> None:
    if start is not None:
        if not isinstance(start, Position):
            message = f"{start=} must be a Position(epoch, sample_offset), such as the `end` of a batch."
            raise DataError(message)
        checked_int("start.epoch", start.epoch, least=0, error=DataError)
        checked_int("start.sample_offset", start.sample_offset, least=0, error=DataError)
    if steps is not None:
        checked_int("steps", steps, error=DataError)
        if epochs is not None:
            message = f"{epochs=} and {steps=} both set the end of the run. Give one of them."
            raise DataError(message)
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
        raise DataError(message)


def pins_memory(pin_memory: bool | None) -> bool:  # noqa: FBT001 (the user's argument)
    """Return whether to pin: as requested, or if an accelerator reads pinned memory; refuse pinning without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    possible = accelerator is not None and accelerator.type != "mps"  # mps shares the host's memory
    if pin_memory and not possible:
        name = "no accelerator" if accelerator is None else accelerator.type
        message = f"{pin_memory=} needs an accelerator that reads pinned memory; here is {name}. Leave it at None."
        raise DataError(message)
    return possible if pin_memory is None else pin_memory
