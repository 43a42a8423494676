"""Plan a step: cut a batch into micro-batches, deal and count them. All errors about a batch are raised here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from anybatch.core.loss import Loss
from anybatch.core.tree import Batch, count_samples, tensors_of
from anybatch.data.effective_batch import DatasetBatch
from anybatch.engine.accumulation.planned_batch import (
    BatchCounter,
    CountedBatch,
    PlannedBatch,
    RankShare,
    is_effective_batch,
    plan_effective_batch,
    report_failed_count,
)
from anybatch.engine.data_progress import DataProgress
from anybatch.engine.first_steps import FirstSteps
from anybatch.engine.loss_check.check import UncountedSums
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.notifier import Notifier
from anybatch.errors import DataError, WorldError
from anybatch.parallel.replicas import digest
from anybatch.parallel.world import World

_NUM_COMPARED = 4
"""Number of samples that ranks compare before the first step on a data set."""


def refuse_disagreement(batch: Any, planned: PlannedBatch, world: World) -> None:  # noqa: ANN401 (any nested batch)
    """Refuse the first step on a data set if the ranks' batches do not fit together.

    Raises:
        DataError: on every rank: shares of two ranks have exactly the same samples, processes of one rank have
            different samples, or ranks have different effective batches or data sets.
    """
    if is_effective_batch(batch):
        # Hashes of whole numbers are the same in every process; hashes of strings are not.
        word = (planned.seed, str(planned.plan), hash(tuple(int(sample) for sample in planned.sample_ids)))
        subset = batch.iteration.source.subset_digest if isinstance(batch, DatasetBatch) else 0
        data = (subset, _first_samples(batch))
        for rank, (other, there) in enumerate(world.gather_from_processes((word, data))):
            if other != word:
                message = (
                    f"rank {world.process} has another effective batch than rank {rank}: {word[1]} with seed "
                    f"{word[0]} and {other[1]} with seed {other[0]}, or other samples. Use ab.batches with the "
                    "same data set, size and seed, and the engine with the same sizes, on every rank."
                )
                raise DataError(message)
            # Samples that differ in each load (None) cannot be compared.
            if data[0] != there[0] or (data[1] != there[1] and None not in (data[1], there[1])):
                is_stream = data[0] is None
                raise DataError((_differing_streams if is_stream else _differing_data)(world.process, rank))
        return
    # Samples of a user's loader have no ids, so their bytes are compared.
    of_processes = world.gather_from_processes(_digest(batch.batch if isinstance(batch, RankShare) else batch))
    for group in world.model_groups:
        other = next((one for one in group if of_processes[one] != of_processes[group[0]]), None)
        if other is not None:
            message = (
                f"processes {group[0]} and {other} run one model together, but have different samples in the first "
                "step. Only data-parallel ranks get different samples: use ab.batches, ab.shares(loader, "
                "world=engine.world), or a sampler with num_replicas=engine.world.size and rank=engine.world.rank."
            )
            raise DataError(message)
    digests = world.of_ranks(of_processes)
    for rank, found in enumerate(digests):
        if found is not None and found in digests[:rank]:
            message = (
                f"ranks {digests.index(found)} and {rank} have the same samples in the first step, so every sample "
                f"would count {digests.count(found)} times. Give each rank different samples, with ab.batches or a "
                "DistributedSampler."
            )
            raise DataError(message)


def _first_samples(batch: Any) -> Any:  # noqa: ANN401 (an `EffectiveBatch`)
    """Return a fingerprint of the first few samples; None if they differ in each load."""
    unit = range(min(_NUM_COMPARED, len(batch.sample_ids)))
    once, again = (_fingerprint(next(iter(batch.feed([unit])))) for _ in range(2))
    return once if once == again else None


def _differing_data(rank: int, other: int) -> str:
    return (
        f"rank {rank} has other samples in its data set than rank {other}. ab.batches gives each rank its share of "
        "one data set, so it must be the same on all ranks. Use the same seed for random splits: "
        "random_split(data, sizes, generator=torch.Generator().manual_seed(0))."
    )


def _differing_streams(rank: int, other: int) -> str:
    return (
        f"rank {rank} reads other samples from the stream than rank {other}. ab.batches gives each rank its share of "
        "the stream, so every rank must read the whole stream; if the data set divides it by rank, samples are lost. "
        "Remove this division and seed its generators equally on every rank; or keep it, and use "
        "ab.shares(DataLoader(dataset), effective_batch_size=...)."
    )


def _fingerprint(sample: Any) -> Any:  # noqa: ANN401 (any type of sample)
    """Return values that identify a sample in any process; for unknown objects only the type."""
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


class StepPlanner:
    """Plans steps with the current sizes.

    Attributes:
        seed: seed of all random numbers; None: the seed of the data.
        own_seed: seed of batches that do not come from `ab.batches`; None before the first such batch.
    """

    def __init__(
        self,
        *,
        world: World,
        loss: Loss,
        sizes: RunSizes,
        sums: UncountedSums,
        notifier: Notifier,
        seed: int | None,
        make_seed: Callable[[], int],
    ) -> None:
        self.seed = seed
        self.own_seed: int | None = None
        self._make_seed = make_seed
        self._world = world
        self._loss = loss
        self._sizes = sizes
        self._counter = BatchCounter(loss, world, sizes.constraints, sums)
        self._notifier = notifier
        self._others_wait = world.roll_call is not None and loss.needs_data_to_count
        self._smaller_in: int | None = None  # the last step below the effective batch size

    def plan(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> CountedBatch:
        """Return the batch with this rank's micro-batches and the divisors of the loss.

        `check_loss` is False if a step is repeated, since its samples were checked before.

        Raises:
            DataError, BatchSizeError, LossError: the batch cannot be run; nothing has changed.
        """
        if self._others_wait:
            planned = self._plan_or_leave(batch, step, progress, first, check_loss=check_loss)
        else:
            planned = self._plan(batch, step, progress, first, check_loss=check_loss)
        return self._counter.count(planned, step)

    def _plan_or_leave(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> PlannedBatch:
        """Plan a batch; after an error, report it to the other ranks, which wait for this rank's counts."""
        roll_call = self._world.roll_call
        assert roll_call is not None
        num_told, is_steady = roll_call.num_told, is_steady_step(first, step, progress)
        try:
            return self._plan(batch, step, progress, first, check_loss=check_loss)
        except BaseException as error:
            is_known = isinstance(error, WorldError) or roll_call.num_told != num_told
            if is_steady and not is_known:
                report_failed_count(error, self._loss, self._world)
            raise

    def _plan(
        self,
        batch: Any,  # noqa: ANN401 (what `Engine.step` takes)
        step: int,
        progress: DataProgress,
        first: FirstSteps | None,
        *,
        check_loss: bool,
    ) -> PlannedBatch:
        planned = plan_effective_batch(batch, self._sizes.placement, self._world, progress.position)
        # The engine's seed takes precedence over the data's, also on resume.
        if self.seed is not None:
            planned = planned._replace(seed=self.seed)
        elif not planned.picks_any:  # not from ab.batches
            planned = planned._replace(seed=self._user_seed())
        num_samples, limit = planned.plan.num_samples, self._sizes.sizes.effective_batch_size
        named: tuple[int, ...] = getattr(batch, "sizes", ())
        if num_samples != (limit or num_samples) or named not in ((), (num_samples,)):
            self._sizes.refuse_larger(num_samples)
            self._warn_of_smaller(batch, num_samples, step)
        if not progress.is_stepped and self._world.roll_call is not None:
            with self._world.roll_call.comparing("the first samples of a data set"):
                refuse_disagreement(batch, planned, self._world)
        if first is not None:
            first.check_batch(batch, planned, step, check_loss=check_loss)
        return planned

    def _user_seed(self) -> int:
        """Return the seed for batches of the user, from torch's generator and the weights of rank 0."""
        if self.own_seed is None:
            self.own_seed = int(self._world.gather_objects(self._make_seed())[0])
        return self.own_seed

    def _warn_of_smaller(self, batch: Any, num_samples: int, step: int) -> None:  # noqa: ANN401 (any nested batch)
        """Warn if steps are smaller than the effective batch size; a single one, such as an epoch's last, is fine."""
        sizes: tuple[int, ...] = getattr(batch, "sizes", ())
        if len(sizes) == 1 and num_samples < sizes[0] and getattr(batch, "is_whole_epoch", False):
            message = (
                f"the data set has {num_samples:,} samples, fewer than effective_batch_size={sizes[0]:,}: each step "
                f"has {num_samples:,}, since batches do not cross epochs. Choose an effective batch size of at most "
                f"{num_samples:,}."
            )
            self._notifier.warn("smaller_batches", message)
            return
        limit = self._sizes.sizes.effective_batch_size
        is_smaller = limit is not None and num_samples < limit and limit not in sizes
        if is_smaller and self._smaller_in == step - 1:
            message = (
                f"steps have {num_samples} samples over all ranks, fewer than effective_batch_size={limit}. To "
                f"accumulate a loader's batches, use `for batch in ab.shares(loader, effective_batch_size={limit})`; "
                f"otherwise set effective_batch_size={num_samples}."
            )
            self._notifier.warn("smaller_batches", message)
        if is_smaller:
            self._smaller_in = step


def is_steady_step(first: FirstSteps | None, step: int, progress: DataProgress) -> bool:
    """Return whether planning a step sends none of the additional messages of a run's or data set's first batches."""
    return progress.is_stepped and (first is None or first.sends_nothing(step))
