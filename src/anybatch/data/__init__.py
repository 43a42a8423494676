"""From a data set to effective batches: one global order, lazy batches, and workers that prefetch.

Most users need only `batches`. The samples of a step and their augmentation depend only on the seed, the data and the
effective batch size: not on the world size, the workers or the micro-batches.
"""

from anybatch.core.tree import SampleList
from anybatch.data.batches import Batches, batches
from anybatch.data.collate import Packed, Padded, PaddedOrPacked
from anybatch.data.effective_batch import DatasetBatch
from anybatch.data.loading import AnyRows, OverEffectiveBatch
from anybatch.data.streams import Shards

__all__ = [
    "AnyRows",
    "Batches",
    "DatasetBatch",
    "OverEffectiveBatch",
    "Packed",
    "Padded",
    "PaddedOrPacked",
    "SampleList",
    "Shards",
    "batches",
]
