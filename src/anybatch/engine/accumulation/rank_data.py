"""Ranks compare their data before the first step on each data set."""

from collections.abc import Mapping
from typing import Any

import torch

from anybatch.core.tree import Batch, count_samples, tensors_of
from anybatch.data.effective_batch import DatasetBatch
from anybatch.engine.accumulation.planned_batch import PlannedBatch, RankShare, is_effective_batch
from anybatch.errors import DataError
from anybatch.parallel.replicas import digest
from anybatch.parallel.world import World

_NUM_COMPARED = 4
"""Samples that ranks compare with each other before the first step on a data set."""


def refuse_disagreement(batch: Any, planned: PlannedBatch, world: World) -> None:  # noqa: ANN401 (any nested batch)
    """Refuse a first step on some data in which ranks do not mean the same effective batch.

    Raises:
        DataError: on every rank: two ranks bring byte for byte the same samples as their shares, or the processes of
            one rank different ones, or ranks were given different effective batches or data sets.
    """
    if world.roll_call is None:
        return
    if is_effective_batch(batch):
        # Hashes of whole numbers are the same in every process; hashes of strings are not.
        word = (planned.seed, str(planned.plan), hash(tuple(int(sample) for sample in planned.sample_ids)))
        subset = batch.iteration.source.subset_digest if isinstance(batch, DatasetBatch) else 0
        data = (subset, _first_samples(batch))
        for rank, (other, there) in enumerate(world.gather_from_processes((word, data))):
            if other != word:
                message = (
                    f"rank {world.process} was given another effective batch than rank {rank}: {word[1]} with seed "
                    f"{word[0]} against {other[1]} with seed {other[0]}, or other samples. Build ab.batches with the "
                    "same data set, size and seed, and the engine with the same sizes, on every rank."
                )
                raise DataError(message)
            # Samples that differ each time they are loaded say nothing.
            if data[0] != there[0] or (data[1] != there[1] and None not in (data[1], there[1])):
                is_stream = data[0] is None
                raise DataError((_differing_streams if is_stream else _differing_data)(world.process, rank))
        return
    # Samples of a loader of the user's own have no ids, so their bytes are compared.
    of_processes = world.gather_from_processes(_digest(batch.batch if isinstance(batch, RankShare) else batch))
    for group in world.model_groups:
        other = next((one for one in group if of_processes[one] != of_processes[group[0]]), None)
        if other is not None:
            message = (
                f"processes {group[0]} and {other} run one model together, and brought different samples to the first "
                "step. Batches are dealt over the data-parallel dimension alone: use ab.batches, ab.shares(loader, "
                "world=engine.world), or a sampler with num_replicas=engine.world.size and rank=engine.world.rank."
            )
            raise DataError(message)
    digests = world.of_ranks(of_processes)
    for rank, found in enumerate(digests):
        if found is not None and found in digests[:rank]:
            message = (
                f"ranks {digests.index(found)} and {rank} brought the same samples to the first step, so every sample "
                f"would count {digests.count(found)} times. Give each rank its own (a DistributedSampler, or "
                "ab.batches)."
            )
            raise DataError(message)


def _first_samples(batch: Any) -> Any:  # noqa: ANN401 (an `EffectiveBatch`)
    """Return a fingerprint of the first few samples, as every rank loads them; None if they differ each time."""
    unit = range(min(_NUM_COMPARED, len(batch.sample_ids)))
    once, again = (_fingerprint(next(iter(batch.feed([unit])))) for _ in range(2))
    return once if once == again else None


def _differing_data(rank: int, other: int) -> str:
    return (
        f"rank {rank} has other samples in its data set than rank {other}, although their numbers agree. "
        "ab.batches gives each rank its share of one data set, so all ranks need the same one. Give random_split and "
        "the like a generator with a common seed: random_split(data, sizes, generator=torch.Generator()"
        ".manual_seed(0))."
    )


def _differing_streams(rank: int, other: int) -> str:
    return (
        f"rank {rank} reads other samples from the stream than rank {other}. ab.batches gives each rank its share, so "
        "every rank has to read the whole stream; of one that divides itself by rank, samples would be lost. Take the "
        "division by rank out of the data set, and seed its private generators equally on every rank; or keep it, and "
        "iterate ab.shares(DataLoader(dataset), effective_batch_size=...)."
    )


def _fingerprint(sample: Any) -> Any:  # noqa: ANN401 (what a sample is, the user decides)
    """Return values that identify a sample in any process; of unknown objects only the type."""
    if isinstance(sample, torch.Tensor):
        return digest(sample)
    if isinstance(sample, (str, bytes, bool, int, float, type(None))):
        return repr(sample)
    if isinstance(sample, Mapping):
        return [(repr(key), _fingerprint(value)) for key, value in sample.items()]
    if isinstance(sample, (list, tuple)):
        return [_fingerprint(value) for value in sample]
    tensors = [digest(tensor) for tensor in tensors_of(sample)]
    return [type(sample).__name__, sample.tobytes() if hasattr(sample, "tobytes") else tensors]


def _digest(batch: Batch | None) -> tuple[int, ...] | None:
    """Return a fingerprint of every tensor of a batch; None for an empty one."""
    if batch is None or not count_samples(batch):
        return None
    return tuple(digest(tensor) for tensor in tensors_of(batch))
