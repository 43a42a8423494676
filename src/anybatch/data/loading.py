"""Load units: every sample under its own random key, then collate."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from anybatch.core.randomness import sample_seed, sample_seeds
from anybatch.core.tree import Batch, SampleList, as_fields, map_tensors, read_samples
from anybatch.data.collate import Collate, Packed, Padded, PaddedOrPacked
from anybatch.data.random_state import KeyedLoading, Seed, seed_generators
from anybatch.errors import DataError


@dataclass(frozen=True, slots=True)
class AnyRows:
    """A collate function that may return another number of rows than samples, declared as such.

    Packed tokens, say, or several views of each sample. A loss that is a mean over samples still counts samples.
    """

    function: Collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Collate."""
        return self.function(samples)


@dataclass(frozen=True, slots=True)
class OverEffectiveBatch:
    """A collate function that is called once with all samples of the effective batch; its result is then cut.

    For operations across samples (mixup, normalising over the batch), so that they do not depend on the cut. Every rank
    loads all samples of every effective batch, not only its share, and holds them in host memory.
    """

    function: Collate

    def __call__(self, samples: list[Any]) -> Batch:
        """Collate."""
        return self.function(samples)


def checked_rows(batch: Batch, num_samples: int, collate: Collate) -> Batch:
    """Return the result of a collate function with its lists marked; refuse one without a row per sample."""
    # torch's default returns one row per sample
    if collate is default_collate:
        return as_fields(batch)
    if collate is list:
        return SampleList(batch)
    if isinstance(collate, (AnyRows, Packed, PaddedOrPacked)) or (isinstance(collate, Padded) and collate.shapes):
        return batch
    try:
        batch, rows = read_samples(batch, num_samples)
    except DataError:  # uncountable: allowed, because batches of a data set are not cut
        if isinstance(collate, OverEffectiveBatch):
            raise
        return batch
    if rows != num_samples:
        message = (
            f"collate returned {rows} rows of {num_samples} samples, and the loss is divided by samples. Filter "
            "samples in the data set, before batching; if another number of rows is intended (packed tokens, several "
            "views), declare it: collate=anybatch.data.AnyRows(collate)."
        )
        raise DataError(message, code="other_rows")
    return batch


class UnitKey(NamedTuple):
    """The complete key of a unit: equal keys load equal data, in any process.

    A tuple, since it is sent to workers, which is faster for tuples.
    """

    epoch: int
    sample_ids: tuple[int, ...]
    packed: bool = False


class UnitLoader:
    """Loads and collates units of a data set with an index; `seed` is the seed of the data."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:  # noqa: ANN401 (torch has no type for it)
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        # `collated` reads the rows.
        self._indexes_tensors = type(dataset) is TensorDataset and collate is default_collate
        self._may_read_together = hasattr(dataset, "__getitems__")
        self._has_layouts = isinstance(collate, PaddedOrPacked)

    def __call__(self, key: UnitKey, seed: Seed | None) -> Batch:
        """Return the collated unit, with the global generators seeded before each sample and before collating.

        Without a `seed` function nothing is seeded.
        """
        return self.collated(key, self.samples(key, seed), seed)

    def samples(self, key: UnitKey, seed: Seed | None) -> list[Any]:
        """Return the samples of a unit, for `collated`."""
        dataset = self.dataset
        if self._indexes_tensors:
            return []
        if self._may_read_together and reads_together(dataset):
            return list(dataset.__getitems__(list(key.sample_ids)))
        ids = iter(key.sample_ids)
        try:
            if seed is None:
                return [dataset[sample_id] for sample_id in ids]
            loaded = []
            for sample_id, sample_key in zip(ids, sample_seeds(self.seed, key.epoch, key.sample_ids), strict=True):
                seed(sample_key)
                loaded.append(dataset[sample_id])
        except Exception as error:
            sample_id = key.sample_ids[-1 - operator.length_hint(ids)]
            error.add_note(
                f"anybatch: while loading sample {sample_id} of {type(dataset).__name__}, epoch={key.epoch}."
            )
            raise
        return loaded

    def collated(self, key: UnitKey, samples: list[Any], seed: Seed | None = None) -> Batch:
        """Return the samples of a unit as a batch."""
        if self._indexes_tensors:
            rows = torch.tensor(key.sample_ids)
            return [tensor[rows] for tensor in self.dataset.tensors]
        collate = in_layout(self.collate, packed=key.packed) if self._has_layouts else self.collate
        return collate_unit(collate, samples, key.sample_ids, key=(self.seed, key.epoch), seed=seed)


def reads_together(dataset: object) -> bool:
    """Whether samples can be read together, with `__getitems__`: from a Hugging Face table without a transform.

    In other cases each sample is read under its own random key, since reading may augment it.
    """
    form = getattr(dataset, "format", None)
    return hasattr(dataset, "__getitems__") and isinstance(form, Mapping) and form.get("type", "custom") != "custom"


def draws_nothing(dataset: object) -> bool:
    """Whether reading a data set certainly draws no random numbers: tensors, and containers of objects."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor) or reads_together(dataset)


def only_collates(collate: Collate) -> bool:
    """Whether a collate function certainly draws no random numbers."""
    return collate is default_collate or isinstance(collate, (Padded, Packed, PaddedOrPacked))


def in_layout(collate: Collate, *, packed: bool | None) -> Collate:
    """Return the padding or packing variant of a collate function that can do both; return others unchanged."""
    if not isinstance(collate, PaddedOrPacked):
        return collate
    return collate.packed if packed else collate.padded


def collate_unit(
    collate: Collate,
    samples: list[Any],
    sample_ids: Sequence[int],
    *,
    key: tuple[int, int],
    seed: Seed | None = seed_generators,
) -> Batch:
    """Return `collate(samples)` under a random key of the unit's first sample, different from the sample's own key.

    `key` is the seed of the data and the epoch; without a `seed` function nothing is seeded.
    """
    # The complement of an id is not an id, so this key differs from the key of every sample.
    first, (data_seed, epoch) = sample_ids[0], key
    if seed is not None:
        seed(sample_seed(data_seed, epoch, ~first))
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(f"anybatch: while collating {len(samples)} samples, the first with id {first}, {epoch=}.")
        raise


def pinned(batch: Batch) -> Batch:
    """Return the batch with its tensors in pinned memory; objects with `pin_memory` pin themselves."""
    own = getattr(batch, "pin_memory", None)
    return own() if callable(own) else map_tensors(batch, torch.Tensor.pin_memory)


class KeyedUnits:
    """Loads units, in the calling process or in a worker, each sample under its own key."""

    def __init__(self, loader: UnitLoader) -> None:
        self._loader = loader
        self._only_collates = only_collates(loader.collate)
        self._loading: KeyedLoading | None = None  # created on first use, because a worker has its own generators

    def __call__(self, key: UnitKey) -> Batch:
        """Return one unit."""
        return next(iter(self.load([key])))

    def load(self, keys: Sequence[UnitKey]) -> Iterable[Batch]:
        """Return several units, with their samples loaded together; restores the caller's generators.

        Units are collated lazily, one by one, unless the collate function may draw numbers.
        """
        loader = self._loader
        if self._loading is None:
            self._loading = KeyedLoading(draws_nothing=self._only_collates and draws_nothing(loader.dataset))
        if not self._only_collates:
            return self._loading.run(lambda seed: [loader(key, seed) for key in keys])
        if self._loading.draws_nothing:
            samples = [loader.samples(key, None) for key in keys]
        else:
            samples = self._loading.run(lambda seed: [loader.samples(key, seed) for key in keys])
        return map(loader.collated, keys, samples)
