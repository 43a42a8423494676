"""Loading one unit: every sample under its own random key, then collated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.core.randomness import sample_seed
from anybatch.core.tree import Batch, map_tensors
from anybatch.data.random_state import seed_generators

Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True, slots=True)
class UnitKey:
    """Everything that decides what a unit holds. Equal keys load equal data, in any process.

    Args:
        epoch: the epoch, from 0.
        sample_ids: its samples, in order.
    """

    epoch: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitLoader:
    """Load and collate units of a data set that has an index. Runs in the calling process or in a worker."""

    dataset: Any
    collate: Collate
    seed: int

    def __call__(self, key: UnitKey) -> Batch:
        """Return the collated unit, and leave the global generators in any state."""
        samples = [self._sample(sample_id, key.epoch) for sample_id in key.sample_ids]
        return collate_unit(self.collate, samples, key.sample_ids, seed=self.seed, epoch=key.epoch)

    def _sample(self, sample_id: int, epoch: int) -> Any:  # noqa: ANN401 (what a sample is, the user decides)
        seed_generators(sample_seed(self.seed, epoch, sample_id))
        try:
            return self.dataset[sample_id]
        except Exception as error:
            error.add_note(f"anybatch: while loading sample {sample_id} of {type(self.dataset).__name__}, {epoch=}.")
            raise


def collate_unit(collate: Collate, samples: list[Any], sample_ids: Sequence[int], *, seed: int, epoch: int) -> Batch:
    """Return `collate(samples)` under a random key of the unit's first sample, which no sample has itself."""
    # The complement of an id is no id, so this key differs from that of every sample.
    first = sample_ids[0]
    seed_generators(sample_seed(seed, epoch, ~first))
    try:
        return collate(samples)
    except Exception as error:
        error.add_note(f"anybatch: while collating {len(samples)} samples, the first with id {first}, {epoch=}.")
        raise


def pinned(batch: Batch) -> Batch:
    """Return the batch with its tensors in pinned memory; an object that can pin itself does."""
    own = getattr(batch, "pin_memory", None)
    return own() if callable(own) else map_tensors(batch, torch.Tensor.pin_memory)
