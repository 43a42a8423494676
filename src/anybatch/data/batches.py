"""`batches`: a data set and an effective batch size in, effective batches out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, default_collate

from anybatch.core.batch import Position
from anybatch.core.batch_ramp import BatchRamp
from anybatch.core.whole_numbers import refuse_unless
from anybatch.data.effective_batch import DatasetBatches, OpenSource
from anybatch.data.indexed import IndexedSource
from anybatch.data.iteration import Iteration
from anybatch.data.lengths import Lengths
from anybatch.data.options import BatchOptions, pins_memory
from anybatch.data.sample_loaders import yields_samples
from anybatch.data.shards import Shards, check_readable
from anybatch.data.streams import StreamSource
from anybatch.errors import DataError


class Source(Protocol):
    """A source of effective batches: a data set with an index, or a stream."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch."""

    @property
    def num_steps(self) -> int:
        """Number of steps from the start to the end."""

    def open(self) -> OpenSource:
        """Return the source with workers of its own, for one iteration."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batches:
    """The effective batches of a run, made by `batches`. Each `iter()` begins at `start`, or where the engine stands.

    Worker processes belong to the iterator: they end when it is exhausted, closed or dropped.

    Attributes:
        effective_batch_size: samples of one optimizer step over all ranks, or a ramp of them.
        seed: the seed of the order and of the augmentation.
        start: where iteration begins; None where the engine stands that steps its first batch.
        source: what makes the batches.
        request: what was asked.
    """

    effective_batch_size: int | BatchRamp
    seed: int
    start: Position | None
    source: Source = field(repr=False)
    request: BatchOptions = field(repr=False)

    def __iter__(self) -> DatasetBatches:
        """Yield the effective batches from `start` on."""
        return Iteration(self.source.open(), self.request).batches()

    def __len__(self) -> int:
        """Return the number of optimizer steps of one iteration, from its beginning if there is no `start`.

        Raises:
            TypeError: it is not known: a stream without length and without `steps`.
        """
        return self.source.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in a whole epoch.

        Raises:
            TypeError: it is not known: a stream without length; or epochs differ, under a ramp.
        """
        return self.source.steps_per_epoch


def batches(
    dataset: Any,  # noqa: ANN401 (a data set is whatever can be indexed or iterated)
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

    Samples are loaded one by one when a batch is fed, unit by unit; those of a stream when its batch is reached. To see
    them, call `batch.load()`, which returns all samples of a batch, collated. Which samples make a step depends on the
    data, `seed` and `effective_batch_size` only. So does augmentation that draws from the global generators of python,
    numpy or torch (CPU): they are seeded from (seed, epoch, sample id) before
    each sample, and the caller's state is put back. Before `collate` they are seeded from the unit's first sample, so a
    collate function that draws numbers depends on how the batch is cut. Generators that a data set makes for itself
    are its own affair. A data set of Hugging Face without a transform draws nothing, and its units are read at once.

    Args:
        dataset: one of three.
            A data set with an index, that is `__getitem__` and `__len__`.
            A stream: a torch `IterableDataset`, a loader of single samples (a `DataLoader`, or torchdata's stateful
            one, with `batch_size=None`), or any object whose `__iter__` starts afresh. Every rank reads all of it, so
            it must yield the same on every rank and not divide itself by rank. At most one worker.
            `Shards`, a stream in a fixed number of parts. At most one worker per shard.
            Before an epoch of a stream its `set_epoch(epoch)` is called, if it has that method.
        effective_batch_size: samples of one optimizer step over all ranks. The last batch of an epoch may be smaller.
            A `BatchRamp` of `anybatch.core.batch_ramp` lets it grow in stages: the order of the samples stays what it
            is, the first step checks that every stage can be cut, and a run goes on in the middle of one. Over a stream
            the last stage has to begin within the first epoch. "auto" tries micro-batches on the first batch only, so
            name a `micro_batch_size` where that is a small one.
        epochs: whole epochs; 1 if `steps` is not given either. With `start`, and after `Engine.load`, they count from
            epoch 0, so that a resumed run ends where it would have ended; a run that is iterated again from its end
            goes on with as many more.
        steps: optimizer steps from the start on, instead of `epochs`.
        shuffle: a new order in each epoch; False keeps the data set's own order. None shuffles data sets with an index,
            and keeps the order of a stream or a sampler.
        sampler: yields the indices of each epoch, drawn once per epoch and the same on every rank: a torch `Sampler`
            with a length, and without a generator of its own (weighted, a subset). Its `set_epoch` is called. A sample
            that is drawn twice in an epoch is augmented alike.
        seed: the seed of the order and of the augmentation.
        drop_last: leave out the last batch of an epoch if it is not full.
        collate: makes a micro-batch of a list of samples, with one row for each; None for torch's `default_collate`. It
            sees a micro-batch only: for what looks across samples pass `anybatch.data.OverEffectiveBatch(collate)`,
            which sees the whole effective batch (every rank loads all of it), and `anybatch.data.AnyRows(collate)` for
            another number of rows than samples.
        num_workers: worker processes per rank that load ahead; 0 loads in the calling process.
        pin_memory: copy micro-batches to pinned memory; None does so where an accelerator can use it.
        lengths: how long each sample is, for engines that cut by length (`micro_batch_size=ab.token_budget(8192)`),
            with a collate function that pads or packs each micro-batch (`anybatch.data.Padded`, `Packed`; or
            `PaddedOrPacked`, the faster of both): a list of whole numbers by sample id; the name of a field or column
            that holds them, or is that long ("input_ids"); or a function of a sample. By a field or function every
            rank loads all samples of a batch before it is cut, once in a run; a column of a Hugging Face data set and a
            stream cost nothing more. See docs/lengths.md.
        start: where to begin, such as what `engine.load` returns. At the very end of the run nothing is yielded.
            None: where the engine stands that steps the first batch, so that a loop over epochs which makes its batches
            anew in each, or iterates the same ones again, is one run. After `Engine.load` that is exactly where the
            checkpoint stands; otherwise an epoch that was left in the middle is left behind, and the next one begins
            (`steps` go on in the middle of the same data set). Evaluating moves nothing.

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
        message = "shuffle=True and a sampler both say in which order samples come. Give one of them."
        raise DataError(message)
    if sampler is not None and not _has_index(dataset):
        message = f"a sampler yields indices, and the data set ({type(dataset).__name__}) is a stream. Leave it out."
        raise DataError(message)
    request = BatchOptions(
        effective_batch_size=effective_batch_size,
        # A stream has an order of its own, and no index by which it could be shuffled.
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
    return Batches(effective_batch_size=effective_batch_size, seed=seed, start=start, source=source, request=request)


def _refuse_tables(dataset: object) -> None:
    """Refuse a DataFrame and a dict of columns, whose `dataset[i]` is not sample i.

    Raises:
        DataError: with a way to get samples out of it.
    """
    message = ""
    if hasattr(dataset, "iloc"):
        message = "Pass its rows, dataset.to_dict('records'), or a Dataset that makes tensors of dataset.iloc[i]."
    elif isinstance(dataset, Mapping):
        message = "Pass a list of samples, or tensors of equal length as torch.utils.data.TensorDataset(x, y)."
    if message:
        message = f"dataset is a {type(dataset).__name__}, which is indexed by column and not by sample. {message}"
        raise DataError(message)


def _has_index(dataset: object) -> bool:
    if isinstance(dataset, (IterableDataset, Shards, str)):  # torch's has a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _stream_source(dataset: Any, request: BatchOptions) -> StreamSource:  # noqa: ANN401
    # A loader of batches would be cut a second time, into batches of batches.
    if isinstance(dataset, Batches) or (isinstance(dataset, DataLoader) and not yields_samples(dataset)):
        message = (
            f"dataset is a {type(dataset).__name__}, which yields batches; ab.batches cuts batches itself. "
            "Pass the data set it was made from, the whole of it on every rank (no DistributedSampler), or a loader "
            "that yields samples, with batch_size=None."
        )
        raise DataError(message)
    if isinstance(dataset, Shards):
        return StreamSource(dataset, dataset, None, request)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, (IterableDataset, str)):
        message = (
            f"dataset ({type(dataset).__name__}) has __getitem__ but no __len__, so its samples cannot be ordered. "
            "Add __len__, or pass a stream: an object with __iter__ and no __getitem__."
        )
        raise DataError(message)
    check_readable(dataset, "dataset")
    return StreamSource(dataset, Shards([dataset]), _stated_length(dataset), request)


def _stated_length(stream: object) -> int | None:
    try:
        return len(stream)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
