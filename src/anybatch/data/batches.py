"""`batches`: effective batches from a data set and an effective batch size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from anybatch.core.batch import Position
from anybatch.core.geometry import refuse_unless
from anybatch.core.schedules import BatchRamp
from anybatch.data.collate import Lengths
from anybatch.data.effective_batch import DatasetBatches, Iteration
from anybatch.data.indexed import IndexedSource
from anybatch.data.options import BatchOptions, pins_memory
from anybatch.data.streams import Shards, StreamSource, check_readable, yields_samples
from anybatch.errors import DataError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Batches:
    """The effective batches of a run, made by `batches`. Each `iter()` begins at `start`, or at the engine's position.

    Worker processes belong to the iterator: they end when it is exhausted, closed or dropped.

    Attributes:
        source: the source of the batches.
        request: the arguments of `batches`.
    """

    source: IndexedSource | StreamSource
    request: BatchOptions

    def __repr__(self) -> str:
        """Return the size, the seed and the start."""
        size, seed, start = self.effective_batch_size, self.seed, self.start
        return f"Batches(effective_batch_size={size!r}, {seed=!r}, {start=!r})"

    @property
    def effective_batch_size(self) -> int | BatchRamp:
        """Samples of one optimizer step over all ranks, or a ramp of them."""
        return self.request.effective_batch_size

    @property
    def seed(self) -> int:
        """The seed of the order and of the augmentation."""
        return self.request.seed

    @property
    def start(self) -> Position | None:
        """First position of an iteration; None for the position of the engine that steps the first batch."""
        return self.request.start

    def __iter__(self) -> DatasetBatches:
        """Yield the effective batches from `start` on."""
        return Iteration(self.source.open(), self.request).batches()

    def __len__(self) -> int:
        """Return the number of optimizer steps of one iteration; without `start`, from the beginning of the data.

        Raises:
            TypeError: unknown: a stream without length and without `steps`.
        """
        return self.source.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in a whole epoch.

        Raises:
            TypeError: unknown: a stream without length, or a ramp, under which epochs differ.
        """
        return self.source.steps_per_epoch


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
    """Cut a data set into effective batches: each sample of an epoch is in exactly one, on any hardware.

    The plain loop, on one rank with one micro-batch per step:

    ```python
    for epoch in range(epochs):
        order = torch.randperm(len(dataset), generator=generator_of(seed, epoch))
        for ids in order.split(effective_batch_size):
            yield collate([dataset[i] for i in ids])
    ```

    Samples are loaded unit by unit when a batch is fed; samples of a stream are loaded when its batch is reached.
    `batch.load()` returns all samples of a batch, collated.

    The samples of a step depend on the data, `seed` and `effective_batch_size` only. So does augmentation that draws
    from the global generators of python, numpy or torch (CPU): they are seeded from (seed, epoch, sample id) before
    each sample, and the caller's state is restored. Before `collate` they are seeded from the unit's first sample, so a
    collate function that draws numbers depends on the cut. Generators that a data set creates itself are not seeded. A
    Hugging Face data set without a transform draws nothing, and is read a unit at a time.

    Args:
        dataset: (1) a data set with an index, that is `__getitem__` and `__len__`; (2) a stream: a torch
            `IterableDataset`, a loader of single samples (a `DataLoader`, or torchdata's stateful one, with
            `batch_size=None`), or any object whose `__iter__` restarts from the beginning; or (3) `Shards`, a stream in
            a fixed number of parts. Every rank reads all of a stream, so it must yield the same on every rank and not
            divide itself by rank. Before an epoch its `set_epoch(epoch)` is called, if it has that method.
        effective_batch_size: samples of one optimizer step over all ranks. The last batch of an epoch may be smaller. A
            `BatchRamp` of `anybatch.schedules` lets it grow in stages: the order of the samples does not change,
            the first step checks that every stage can be cut, and a resumed run continues in the middle of a stage.
            Over a stream the last stage has to begin within the first epoch. "auto" tries micro-batches on the first
            batch only, so pass a `micro_batch_size` if that is a small one.
        epochs: whole epochs; 1 if `steps` is not given either. With `start`, and after `Engine.load`, they count from
            epoch 0, so that a resumed run ends where the original run would have ended; iterating again from the end of
            a run adds the same number of epochs.
        steps: optimizer steps from the start on, instead of `epochs`.
        shuffle: a new order in each epoch; False keeps the data set's own order. None shuffles data sets with an index,
            and keeps the order of a stream or a sampler.
        sampler: yields the indices of each epoch, drawn once per epoch and the same on every rank: a torch `Sampler`
            with a length and without a generator (weighted, a subset). Its `set_epoch` is called. A sample that is
            drawn twice in an epoch gets the same augmentation.
        seed: the seed of the order and of the augmentation.
        drop_last: drop the last batch of an epoch if it is not full.
        collate: makes a micro-batch of a list of samples, with one row for each; None for torch's `default_collate`. It
            sees a micro-batch only: for operations across samples pass `anybatch.data.OverEffectiveBatch(collate)`,
            which sees the whole effective batch (every rank loads all of it), and `anybatch.data.AnyRows(collate)` for
            another number of rows than samples.
        num_workers: worker processes per rank that prefetch; 0 loads in the calling process. At most one for a stream,
            and at most one per shard for `Shards`.
        pin_memory: copy micro-batches to pinned memory; None does so if an accelerator can use it.
        lengths: length of each sample, for engines that cut by length (`micro_batch_size=ab.token_budget(8192)`), with
            a collate function that pads or packs each micro-batch (`anybatch.data.Padded`, `Packed`; or
            `PaddedOrPacked`, the faster of both): a list of whole numbers by sample id; the name of a field or column
            that contains them, or has that length ("input_ids"); or a function of a sample. For a field or function
            every rank loads all samples of a batch before it is cut, once in a run; a column of a Hugging Face data set
            and a stream cost nothing more. See docs/lengths.md.
        start: first position, such as the result of `engine.load`. At the very end of the run nothing is yielded. None:
            the position of the engine that steps the first batch. So a loop over epochs is one run, whether it makes
            new batches in each epoch or iterates the same ones again. After `Engine.load`, this is exactly the
            checkpoint's position; otherwise a partly used epoch is abandoned, and the next one begins (`steps` continue
            in the middle of the same data set). Evaluation does not change it.

    Returns:
        An iterable of effective batches, with `len()` and `steps_per_epoch`.

    Raises:
        BatchSizeError: `effective_batch_size` is not a whole number of at least 1, or a stage of a ramp is larger than
            the data set.
        DataError: a data set that is empty or cannot be read, a `start` beyond it, or arguments that contradict.
    """
    _refuse_tables(dataset)
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last), ("pin_memory", pin_memory)):
        refuse_unless(value is None or isinstance(value, bool), name, value, "True or False", DataError)
    if shuffle and sampler is not None:
        message = "shuffle=True and a sampler both set the order of the samples. Give one of them."
        raise DataError(message, code="shuffle_and_sampler")
    if sampler is not None and not _has_index(dataset):
        message = f"a sampler yields indices, and the data set ({type(dataset).__name__}) is a stream. Leave it out."
        raise DataError(message, code="sampler_of_a_stream")
    request = BatchOptions(
        effective_batch_size=effective_batch_size,
        # A stream cannot be shuffled, because it has no index.
        shuffle=sampler is None and _has_index(dataset) if shuffle is None else shuffle,
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
    source = IndexedSource(dataset, request) if _has_index(dataset) else _stream_source(dataset, request)
    return Batches(source=source, request=request)


def _refuse_tables(dataset: object) -> None:
    """Raise a `DataError` for a DataFrame or a dict of columns, whose `dataset[i]` is not sample i."""
    message = ""
    if hasattr(dataset, "iloc"):
        message = "Pass its rows, dataset.to_dict('records'), or a Dataset that makes tensors of dataset.iloc[i]."
    elif isinstance(dataset, Mapping):
        message = "Pass a list of samples, or tensors of equal length as torch.utils.data.TensorDataset(x, y)."
    if message:
        message = f"dataset is a {type(dataset).__name__}, which is indexed by column and not by sample. {message}"
        raise DataError(message)


def _has_index(dataset: object) -> bool:
    if isinstance(dataset, (IterableDataset, Shards, str)):  # torch's class has a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _stream_source(dataset: Any, request: BatchOptions) -> StreamSource:  # noqa: ANN401
    # A loader of batches would be cut again, into batches of batches.
    if isinstance(dataset, Batches) or (isinstance(dataset, DataLoader) and not yields_samples(dataset)):
        message = (
            f"dataset is a {type(dataset).__name__}, which yields batches; ab.batches cuts batches itself. "
            "Pass the data set it was made from, the whole of it on every rank (no DistributedSampler), or a loader "
            "that yields samples, with batch_size=None."
        )
        raise DataError(message, code="yields_batches")
    if isinstance(dataset, Shards):
        return StreamSource(dataset, dataset, None, request)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, (IterableDataset, str)):
        message = (
            f"dataset ({type(dataset).__name__}) has __getitem__ but no __len__, so its samples cannot be ordered. "
            "Add __len__, or pass a stream: an object with __iter__ and no __getitem__."
        )
        raise DataError(message, code="no_length")
    check_readable(dataset, "dataset")
    return StreamSource(dataset, Shards([dataset]), _stated_length(dataset), request)


def _stated_length(stream: object) -> int | None:
    try:
        return len(stream)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
