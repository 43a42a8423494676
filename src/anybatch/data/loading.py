"""Load micro-batches: load every sample with its own random seed, then collate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from anybatch.core.batch import Positions, select
from anybatch.core.randomness import sample_seed
from anybatch.core.tree import Batch, SampleList, as_fields, map_tensors, mark_and_count
from anybatch.data.collate import Collate, Packed, Padded, PaddedOrPacked
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.errors import DataError


@dataclass(frozen=True, slots=True)
class AnyRows:
    """Wraps a collate function whose number of rows may differ from the number of samples.

    Examples are packed tokens, and several views of each sample. A mean over samples is still divided by samples.
    """

    function: Collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the result of the wrapped function."""
        return self.function(samples)


@dataclass(frozen=True, slots=True)
class OverEffectiveBatch:
    """Wraps a collate function that is called once with all samples of the effective batch; its result is then split.

    For operations across samples (mixup, normalising over the batch), so that they do not depend on the split. Every
    rank loads all samples of every effective batch, not only its share, and holds them in host memory.
    """

    function: Collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the result of the wrapped function."""
        return self.function(samples)


def checked_rows(batch: Batch, num_samples: int, collate: Collate) -> Batch:
    """Return a batch with its lists of samples marked (`mark_and_count`); raise unless it has one row per sample."""
    # default_collate always returns one row per sample.
    if collate is default_collate:
        return as_fields(batch)
    if collate is list:
        return SampleList(batch)
    if isinstance(collate, (AnyRows, Packed, PaddedOrPacked)):
        return batch
    try:
        batch, rows = mark_and_count(batch, num_samples)
    except DataError:  # the rows cannot be counted, which is allowed for micro-batches, since they are not split
        if isinstance(collate, OverEffectiveBatch):
            raise
        return batch
    if rows != num_samples:
        message = (
            f"collate returned {rows} rows for {num_samples} samples, but the loss is divided by samples. Filter "
            "samples in the data set, before batching; if the numbers differ on purpose (packed tokens, several "
            "views), declare it: collate=anybatch.data.AnyRows(collate)."
        )
        raise DataError(message, code="other_rows")
    return batch


class UnitKey(NamedTuple):
    """The key of a micro-batch: equal keys load equal data, in any process.

    A tuple, because it is sent to workers, and tuples are faster to send.
    """

    epoch: int
    sample_ids: tuple[int, ...]
    packed: bool = False


class UnitLoader:
    """Loads and collates micro-batches; `dataset` is a data set with an index, or a dict of loaded samples by id."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:  # noqa: ANN401 (torch has no type for it)
        self.dataset = dataset
        self.collate = collate
        self.seed = seed

    # Computed at the first read: a Hugging Face data set may get a transform after `ab.batches` was called.
    @cached_property
    def _may_draw(self) -> bool:
        return not draws_nothing(self.dataset)

    @cached_property
    def _reads_together(self) -> bool:
        return reads_together(self.dataset)

    @cached_property
    def _is_random(self) -> bool:
        return self._may_draw or not only_collates(self.collate)

    def __call__(self, key: UnitKey) -> Batch:
        """Return a micro-batch, with each sample loaded with its own seed; restore the caller's generators."""
        dataset, collate = self.dataset, self.collate
        if isinstance(collate, PaddedOrPacked):
            collate = collate.packed if key.packed else collate.padded
        if type(dataset) is TensorDataset and collate is default_collate:
            rows = torch.tensor(key.sample_ids)
            return [tensor[rows] for tensor in dataset.tensors]
        if not self._is_random:
            return self._collated(collate, key)
        with preserved_random_state():
            return self._collated(collate, key)

    def _collated(self, collate: Collate, key: UnitKey) -> Batch:
        """Return the micro-batch, collated with a seed that depends on the id of its first sample."""
        samples, first, epoch = self._samples(key), key.sample_ids[0], key.epoch
        if not only_collates(collate):
            # The complement of an id is not an id, so this seed differs from the seed of every sample.
            seed_generators(sample_seed(self.seed, epoch, ~first))
        try:
            return collate(samples)
        except Exception as error:
            error.add_note(f"anybatch: while collating {len(samples)} samples, the first with id {first}, {epoch=}.")
            raise

    def _samples(self, key: UnitKey) -> list[Any]:
        if self._reads_together:
            return list(self.dataset.__getitems__(list(key.sample_ids)))
        loaded: list[Any] = []
        try:
            for sample_id in key.sample_ids:
                if self._may_draw:
                    seed_generators(sample_seed(self.seed, key.epoch, sample_id))
                loaded.append(self.dataset[sample_id])
        except Exception as error:
            sample_id = key.sample_ids[len(loaded)]
            name = type(self.dataset).__name__
            error.add_note(f"anybatch: while loading sample {sample_id} of {name}, epoch={key.epoch}.")
            raise
        return loaded


def reads_together(dataset: object) -> bool:
    """Whether samples can be read in one call, `__getitems__`: true for a Hugging Face data set without a transform.

    Samples of other data sets are read one by one, each with its own seed, since reading may augment them.
    """
    form = getattr(dataset, "format", None)
    return hasattr(dataset, "__getitems__") and isinstance(form, Mapping) and form.get("type", "custom") != "custom"


def draws_nothing(dataset: object) -> bool:
    """Whether reading a data set certainly draws no random numbers: true for tensors and containers of objects."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    return type(dataset) in (TensorDataset, list, tuple, dict, range, torch.Tensor) or reads_together(dataset)


def only_collates(collate: Collate) -> bool:
    """Whether a collate function certainly draws no random numbers."""
    return collate is default_collate or isinstance(collate, (Padded, Packed, PaddedOrPacked))


def unit_keys(
    epoch: int, sample_ids: Sequence[int], units: Sequence[Positions], *, packed: bool | None
) -> list[UnitKey]:
    """Return the keys of units (micro-batches), given by the positions of their samples in `sample_ids`."""
    return [UnitKey(epoch, tuple(select(sample_ids, positions)), bool(packed)) for positions in units]


def pinned(batch: Batch) -> Batch:
    """Return the batch with its tensors in pinned memory; a batch with a method `pin_memory` is pinned by it."""
    method = getattr(batch, "pin_memory", None)
    return method() if callable(method) else map_tensors(batch, torch.Tensor.pin_memory)
