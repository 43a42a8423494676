"""`batches`: divide a data set into effective batches of a given size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from anybatch.core.batch import Position
from anybatch.core.geometry import require
from anybatch.core.schedules import BatchRamp
from anybatch.data.collate import KnownLengths, Lengths
from anybatch.data.effective_batch import DatasetBatches, Iteration, OpenSource
from anybatch.data.indexed import OpenIndexed, SampleSchedule, checked_schedule
from anybatch.data.options import BatchOptions, pins_memory
from anybatch.data.streams import (
    OpenStream,
    Shards,
    check_readable,
    check_stream_options,
    stated_schedule,
    yields_samples,
)
from anybatch.errors import DataError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Batches:
    """The effective batches of a run, made by `batches`. Each `iter()` begins at `start`, or at the engine's position.

    Worker processes belong to the iterator: they end when it is exhausted, closed or garbage-collected.

    Attributes:
        options: the arguments of `batches`.
        schedule: returns the schedule of an epoch; raises a `TypeError` if the number of samples is unknown.
        open: returns a new reader of the data set, with its own workers.
    """

    options: BatchOptions
    schedule: Callable[[], SampleSchedule]
    open: Callable[[], OpenSource]

    def __repr__(self) -> str:
        """Return the size, the seed and the start."""
        size, seed, start = self.effective_batch_size, self.seed, self.start
        return f"Batches(effective_batch_size={size!r}, {seed=!r}, {start=!r})"

    @property
    def effective_batch_size(self) -> int | BatchRamp:
        """Samples of one optimizer step over all ranks, or a ramp of them."""
        return self.options.effective_batch_size

    @property
    def seed(self) -> int:
        """The seed of the sample order and of the augmentation."""
        return self.options.seed

    @property
    def start(self) -> Position | None:
        """Position at which an iteration begins; None: the engine's, at the iteration's first step."""
        return self.options.start

    def __iter__(self) -> DatasetBatches:
        """Yield the effective batches from `start` on."""
        return Iteration(self.open(), self.options).batches()

    def __len__(self) -> int:
        """Return the number of optimizer steps of one iteration, from `start` or by default from the first sample.

        Raises:
            TypeError: the number is unknown, for a stream without a length and without `steps`.
        """
        span = self.options.span
        return self.schedule().num_steps(span) if span.steps is None else span.steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in a whole epoch.

        Raises:
            TypeError: the data set is a stream without a length, or the batch size is a ramp, so that epochs differ.
        """
        return self.schedule().steps_per_epoch


def batches(
    dataset: Any,  # noqa: ANN401 (anything with an index or an iterator)
    *,
    effective_batch_size: int | BatchRamp,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool | None = None,
    sampler: Any = None,  # noqa: ANN401 (any of torch's samplers of indices)
    seed: int = 0,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    lengths: Lengths | None = None,
    start: Position | None = None,
) -> Batches:
    """Divide a data set into effective batches: each sample of an epoch is in exactly one, on any hardware.

    In plain Python, on one rank with one micro-batch per step:

    ```python
    for epoch in range(epochs):
        order = torch.randperm(len(dataset), generator=generator_of(seed, epoch))
        for ids in order.split(effective_batch_size):
            yield collate([dataset[i] for i in ids])
    ```

    Samples are loaded one micro-batch at a time when the engine steps the batch; samples of a stream are loaded when
    the iteration reaches their batch. `batch.load()` returns all samples of a batch, collated.

    The samples of a step depend only on the data, `seed` and `effective_batch_size`. So does augmentation that draws
    from the global generators of python, numpy or torch (CPU): they are seeded from (seed, epoch, sample id) before
    each sample, and restored afterwards. Before `collate` they are seeded from the first sample of the micro-batch, so
    the result of a collate function that draws random numbers depends on how the batch is split. Generators that a data
    set creates itself are not seeded. A Hugging Face data set without a transform draws no random numbers, so all
    samples of a micro-batch are read in one call.

    Args:
        dataset: (1) a data set with `__getitem__` and `__len__`; (2) a stream: a torch `IterableDataset`, a loader of
            single samples (`batch_size=None`), or any object whose `__iter__` restarts from the beginning; or (3)
            `Shards`. Every rank reads the whole stream, so a stream must not divide its samples by rank. Its
            `set_epoch(epoch)` is called before each epoch, if it has that method.
        effective_batch_size: samples of one optimizer step over all ranks. The last batch of an epoch may be smaller. A
            `BatchRamp` of `anybatch.schedules` lets the size grow in stages; for a stream, the last stage has to begin
            within the first epoch.
        epochs: number of whole epochs; 1 if `steps` is not given either. With `start`, and after `Engine.load`, epochs
            are counted from epoch 0, so that a resumed run ends where the original run would have ended; iterating
            again from the end of a run adds the same number of epochs.
        steps: number of optimizer steps, counted from the start of the iteration, instead of `epochs`.
        shuffle: True for a new order in each epoch; False for the data set's own order. None shuffles data sets with an
            index, and keeps the order of a stream or a sampler.
        sampler: yields the indices of each epoch, drawn once per epoch and the same on every rank: a torch `Sampler`
            with a length and without a generator (weighted, a subset). Its `set_epoch` is called, if it has one. A
            sample that is drawn twice in an epoch gets the same augmentation.
        seed: the seed of the sample order and of the augmentation.
        drop_last: drop the last batch of an epoch if it is not full.
        collate: function of a list of samples that returns a micro-batch with one row for each sample; None for torch's
            `default_collate`. It gets the samples of one micro-batch: use `anybatch.data.OverEffectiveBatch(collate)`
            for operations across samples, and `anybatch.data.AnyRows(collate)` if the number of rows differs from the
            number of samples.
        num_workers: worker processes per rank that prefetch; 0 loads in the calling process. At most 1 for a stream,
            and at most one per shard for `Shards`.
        pin_memory: copy micro-batches to pinned memory; None does so if an accelerator can use it.
        lengths: length of each sample, for engines with `micro_batch_size=ab.token_budget(8192)`: a list of whole
            numbers by sample id; the name of a field or column whose value or `len()` is the length ("input_ids"); or a
            function of a sample. For a field or function, every rank loads all samples of a batch before it is split;
            each length is read once in a run. See docs/lengths.md.
        start: first position, such as the result of `engine.load`. None: the engine's position, which is the
            checkpoint's position after `Engine.load`. So a loop over epochs is one run, whether it calls `ab.batches`
            in each epoch or iterates over the same object again. If an iteration ends within an epoch, the next one
            begins with the next epoch; with `steps`, it continues within the same epoch.

    Returns:
        An iterable of effective batches, with `len()` and `steps_per_epoch`.

    Raises:
        BatchSizeError: `effective_batch_size` is not a whole number of at least 1, or a ramp exceeds the data set.
        DataError: a data set that is empty or cannot be read, a `start` beyond its end, or contradicting arguments.
    """
    _check_not_table(dataset)
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last), ("pin_memory", pin_memory)):
        require(value is None or isinstance(value, bool), name, value, "True or False", DataError)
    if shuffle and sampler is not None:
        message = "shuffle=True and a sampler both set the order of the samples. Pass one of them."
        raise DataError(message, code="shuffle_and_sampler")
    if sampler is not None and not _has_index(dataset):
        message = (
            f"a sampler yields indices, but the data set ({type(dataset).__name__}) is a stream. Leave the sampler out."
        )
        raise DataError(message, code="sampler_of_a_stream")
    is_indexed = _has_index(dataset)
    options = BatchOptions(
        effective_batch_size=effective_batch_size,
        # A stream cannot be shuffled, because it has no index.
        shuffle=sampler is None and is_indexed if shuffle is None else shuffle,
        sampler=sampler,
        seed=seed,
        drop_last=drop_last,
        start=start,
        epochs=epochs,
        steps=steps,
        collate=default_collate if collate is None else collate,
        num_workers=num_workers,
        pin_memory=pins_memory(pin_memory),
        lengths=lengths,
    )
    if not is_indexed:
        return _stream_batches(dataset, options)
    known_lengths = None if lengths is None else KnownLengths(lengths, options.collate, dataset)
    schedule = checked_schedule(dataset, options)
    open_source = partial(OpenIndexed, dataset, schedule, known_lengths)
    return Batches(options=options, schedule=lambda: schedule, open=open_source)


def _check_not_table(dataset: object) -> None:
    """Raise a `DataError` for a DataFrame or a dict of columns, where `dataset[i]` is not sample i."""
    message = ""
    if hasattr(dataset, "iloc"):
        message = "Pass its rows, dataset.to_dict('records'), or a Dataset that returns tensors from dataset.iloc[i]."
    elif isinstance(dataset, Mapping):
        message = "Pass a list of samples, or tensors of equal length as torch.utils.data.TensorDataset(x, y)."
    if message:
        message = f"dataset is a {type(dataset).__name__}, which is indexed by column and not by sample. {message}"
        raise DataError(message)


def _has_index(dataset: object) -> bool:
    if isinstance(dataset, (IterableDataset, Shards, str)):  # torch's class has a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _stream_batches(dataset: Any, options: BatchOptions) -> Batches:  # noqa: ANN401 (anything that can be iterated)
    # Batches of a loader would be grouped into batches of batches.
    if isinstance(dataset, Batches) or (isinstance(dataset, DataLoader) and not yields_samples(dataset)):
        message = (
            f"dataset is a {type(dataset).__name__}, which yields batches, but ab.batches needs samples. Pass the "
            "complete data set on every rank (no DistributedSampler), or a loader that yields samples, with "
            "batch_size=None."
        )
        raise DataError(message, code="yields_batches")
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, (IterableDataset, str)):
        message = (
            f"dataset ({type(dataset).__name__}) has __getitem__ but no __len__, so its samples cannot be ordered. "
            "Add __len__, or pass a stream: an object with __iter__ and no __getitem__."
        )
        raise DataError(message, code="no_length")
    if isinstance(dataset, Shards):
        shards, num_samples = dataset, None
    else:
        check_readable(dataset, "dataset")
        shards, num_samples = Shards([dataset]), _stated_length(dataset)
    check_stream_options(options, shards.num_shards)
    known_lengths = None if options.lengths is None else KnownLengths(options.lengths, options.collate, None)
    return Batches(
        options=options,
        schedule=partial(stated_schedule, num_samples, options),
        open=partial(OpenStream, dataset, shards, options, known_lengths),
    )


def _stated_length(stream: object) -> int | None:
    try:
        return len(stream)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
