"""The arguments of `batches`, and their checks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from anybatch.core.batch import Position
from anybatch.core.geometry import checked_int
from anybatch.core.schedules import BatchRamp
from anybatch.data.collate import Collate, Lengths
from anybatch.data.loading import OverEffectiveBatch
from anybatch.errors import BatchSizeError, DataError


@dataclass(frozen=True, slots=True)
class RunRange:
    """The part of the data that a run uses: from `start` to the beginning of `end_epoch`, or a number of `steps`."""

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
        """Check each value, and that no two values contradict each other.

        Raises:
            BatchSizeError: the effective batch size is not a whole number of at least 1.
            DataError: any other value is invalid, or two values contradict each other.
        """
        if not isinstance(self.effective_batch_size, BatchRamp):  # a ramp checks its own sizes
            checked_int("effective_batch_size", self.effective_batch_size, error=BatchSizeError)
        checked_int("num_workers", self.num_workers, minimum=0, error=DataError)
        checked_int("seed", self.seed, minimum=None, error=DataError)
        if not callable(self.collate):
            message = f"collate={self.collate!r} must be a function of a list of samples, or None for default_collate."
            raise DataError(message, code="not_a_function")
        if self.lengths is not None and isinstance(self.collate, OverEffectiveBatch):
            message = (
                "lengths= cannot be combined with OverEffectiveBatch, which pads the whole batch before the split. "
                "Leave one of them out."
            )
            raise DataError(message)
        if self.sampler is not None:
            _check_sampler(self.sampler)
        _check_length(self.epochs, self.steps, self.start)

    @property
    def span(self) -> RunRange:
        """The range of the run from `start`, or from the beginning of the data if `start` is None."""
        return self.span_from(self.start or Position(), resumed=True)

    def span_from(self, position: Position, *, resumed: bool = False) -> RunRange:
        """Return the range of a run that begins at a position.

        If `resumed`, epochs are counted from epoch 0, as in the original run; if the position is at the end of that run
        or later, as many epochs are added. Otherwise epochs are counted from the position's epoch.
        """
        if self.steps is not None:
            return RunRange(position, None, self.steps)
        epochs = self.epochs or 1
        is_within = resumed and (position < Position(epochs) or self.start is not None)
        return RunRange(position, epochs if is_within else position.epoch + epochs, None)


def _check_sampler(sampler: Any) -> None:  # noqa: ANN401 (torch's)
    if isinstance(sampler, BatchSampler):
        message = (
            f"sampler is a {type(sampler).__name__}, which yields batches, but ab.batches needs indices. Pass the "
            "sampler inside it."
        )
        raise DataError(message, code="sampler_of_batches")
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        message = f"sampler ({type(sampler).__name__}) must yield indices and have a length, as torch's samplers do."
        raise DataError(message, code="not_a_sampler")
    check_sampler_order(sampler)


def check_sampler_order(sampler: Any, generator: torch.Generator | None = None) -> None:  # noqa: ANN401 (torch's)
    """Raise a `DataError` if a sampler divides samples over ranks, or if a resumed run cannot repeat its order."""
    if isinstance(sampler, DistributedSampler):
        message = (
            "sampler is a DistributedSampler, but anybatch divides each batch over the ranks, so samples would be "
            "lost. Leave it out; shuffle=True gives each epoch a new order."
        )
        raise DataError(message, code="distributed_sampler")
    if generator is not None or getattr(sampler, "generator", None) is not None:
        message = (
            "the order comes from a separate generator (as always in torchdata's loaders), whose state a resumed run "
            "cannot restore. Leave generator= out, or pass the data set itself to ab.batches(seed=...)."
        )
        raise DataError(message, code="own_generator")


def _check_length(epochs: int | None, steps: int | None, start: Position | None) -> None:
    if start is not None:
        if not isinstance(start, Position):
            message = f"{start=} must be a Position(epoch, sample_offset), such as the `end` of a batch."
            raise DataError(message, code="not_a_position")
        checked_int("start.epoch", start.epoch, minimum=0, error=DataError)
        checked_int("start.sample_offset", start.sample_offset, minimum=0, error=DataError)
    if steps is not None:
        checked_int("steps", steps, error=DataError)
        if epochs is not None:
            message = f"{epochs=} and {steps=} both set the end of the run. Pass one of them."
            raise DataError(message, code="epochs_and_steps")
        return
    last = 1 if epochs is None else epochs
    checked_int("epochs", last, error=DataError)
    if start is not None and start > Position(last):
        limit = f"{epochs=}" if epochs is not None else "epochs=1, the default without epochs= and steps=,"
        message = (
            f"start={start} is after the end of the run: {limit} counts from epoch 0. Pass at least "
            f"epochs={start.epoch + 1} to continue, or steps=, which counts from `start`. Without start= the run "
            "continues at the engine's position."
        )
        raise DataError(message, code="start_beyond_end")


def pins_memory(pin_memory: bool | None) -> bool:  # noqa: FBT001 (the user's argument)
    """Return `pin_memory`, or for None whether an accelerator reads pinned memory; refuse True without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    possible = accelerator is not None and accelerator.type != "mps"  # mps shares the host's memory
    if pin_memory and not possible:
        name = "no accelerator" if accelerator is None else accelerator.type
        message = (
            f"{pin_memory=} needs an accelerator that reads pinned memory; this machine has {name}. Leave it at None."
        )
        raise DataError(message, code="nothing_to_pin_for")
    return possible if pin_memory is None else pin_memory


def batch_samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the batch sampler of a loader, and those inside it: Accelerate wraps them for each rank."""
    found: list[Any] = [loader.batch_sampler]
    while hasattr(found[-1], "batch_sampler"):
        found.append(found[-1].batch_sampler)
    return found


def upper_limit(loader: DataLoader[Any]) -> Any:  # noqa: ANN401 (of any sampler)
    """Return a loader's batch size, which is the maximum size of a micro-batch."""
    return getattr(batch_samplers(loader)[-1], "batch_size", 1)
