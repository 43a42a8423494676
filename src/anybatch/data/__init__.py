"""From a data set to effective batches: one global order, lazy batches, workers that run ahead.

`batches` is the one thing most users need. Which samples make a step, and how they are augmented, depends on the seed,
the data and the effective batch size, and on nothing else: not on the world size, the workers or the micro-batches.
"""

from anybatch.core.containers import SampleList
from anybatch.data.batches import Batches, batches
from anybatch.data.collate import Packed, Padded, PaddedOrPacked
from anybatch.data.effective_batch import DatasetBatch
from anybatch.data.fetch import AnyRows, OverEffectiveBatch
from anybatch.data.shards import Shards

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
