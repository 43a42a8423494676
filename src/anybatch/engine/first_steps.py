"""The work of an engine's first steps: determine sizes, check the loss, and warn about likely mistakes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.core.batch import Position, lengths_of
from anybatch.core.splitting import BatchPlan
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, count_samples, tensors_of
from anybatch.data.effective_batch import DatasetBatch
from anybatch.engine.forward_state import StateWatch
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.micro_batch_size.search import TrialParts
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import PlannedBatch, RankShare, is_effective_batch
from anybatch.engine.notifier import Notifier
from anybatch.errors import DataError, LossError
from anybatch.parallel.replicas import digest
from anybatch.parallel.world import World


@dataclass(kw_only=True, eq=False)
class FirstSteps:
    """Determines sizes, checks the loss and watches the model in the first steps; `StepRunner` drops it afterwards.

    `unchosen_norms`: the BatchNorm layers if the user did not pass `norms=`; empty after the warning about them.
    """

    check: LossCheck
    sizes: RunSizes
    unchosen_norms: Mapping[str, BatchNormBase]
    watch: StateWatch
    autocast: Callable[..., AbstractContextManager[object]]
    start: Callable[[PlannedBatch, int], None]
    trial_parts: TrialParts
    decisions: dict[str, str]
    notifier: Notifier
    _has_begun: bool = field(default=False, init=False)

    def settle_sizes(self, batch: Any, position: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Determine the micro-batch size if it is "auto" and still unknown."""
        if not self.sizes.searches:
            return
        choice = self.sizes.settle(batch, self.trial_parts, position)
        if choice.description:
            self.decisions["micro_batch_size"] = choice.description
        if choice.layout:
            self.decisions["layout"] = choice.layout
        if choice.rate is not None:
            self.notifier.diagnosis("micro_batch_size", f"micro_batch_size: {choice.description}")

    def check_batch(self, batch: Any, planned: PlannedBatch, step: int, *, check_loss: bool) -> None:  # noqa: ANN401
        """Check a planned batch: send the header of the run once, and compare the loss with its declaration."""
        if not self._has_begun:
            self._check_rows(batch)
            # Check all batch sizes of a ramp (a size that grows during a run): a later one could end the run.
            self.sizes.check_splittable(getattr(batch, "sizes", ()) if planned.picks_any else ())
            self._has_begun = True
            if self.notifier.observers:
                self.start(planned, step)
        if check_loss and self.check.is_due(step):
            self.check.check_declaration(planned, self.autocast, step)

    def detecting_state_changes(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context for running the micro-batches; it detects state that a forward changes."""
        return self.watch.effective_batch(plan)

    def finish_step(self, plan: BatchPlan) -> None:
        """Send the warnings that are due after a step with this plan."""
        self.check.warn_if_undecided()
        self._warn_of_split(plan)

    def is_done(self, step: int, *, is_split: bool) -> bool:
        """Whether the first steps are over. `is_split`: whether this step had several micro-batches."""
        return (
            not self.sizes.searches
            and self.check.is_over(step)
            and not self.watch.draw_checks_left
            and not (is_split and self.waits_for_split)
        )

    @property
    def waits_for_split(self) -> bool:
        """Whether checks of the first step with several micro-batches are still to be made."""
        return self.watch.is_looking or bool(self.unchosen_norms)

    def _warn_of_split(self, plan: BatchPlan) -> None:
        """Warn in the first step with several micro-batches that BatchNorm normalises each by its own statistics."""
        training = [name for name, layer in self.unchosen_norms.items() if layer.training]
        num_micro_batches = len(plan.units)
        if num_micro_batches == 1 or not training:  # a frozen layer may train later
            return
        self.unchosen_norms = {}
        which = f"{len(training)} BatchNorm layer{'s' * (len(training) > 1)} (first {training[0]!r})"
        self.notifier.warn(
            "batch_norm_by_micro_batch",
            f"{which} normalised each of {num_micro_batches} micro-batches by its own statistics. So the gradient "
            "differs from the gradient of the unsplit batch and depends on the split. Use norms='exact' (statistics "
            "of the effective batch), norms=anybatch.norms.Ghost(group_size=32) (of fixed groups), norms='freeze' "
            "(running statistics) or norms='sync' (over ranks); norms='keep' accepts this and silences the warning.",
        )

    def _check_rows(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        """Refuse a mean over samples if micro-batches are packed, because then one row holds several samples."""
        lengths = lengths_of(batch)
        if lengths is None or not lengths.packed:
            return
        if not self.check.loss.allows_other_rows:
            message = (
                "micro-batches are packed into one row, but the loss is a mean over samples. Declare the items of the "
                "mean: ab.mean_over_tokens(loss, labels='labels') or ab.mean_over(loss, count=...); or return "
                "ab.LossSum(total, count)."
            )
            raise LossError(message)


_NUM_COMPARED = 4
"""Number of samples that ranks compare before the first step on a data set."""

_DATA_DIFFER = (
    "ab.batches divides one data set among the ranks, so all ranks must pass the same data set. Use the same seed for "
    "random splits: random_split(data, sizes, generator=torch.Generator().manual_seed(0))."
)
_STREAMS_DIFFER = (
    "ab.batches divides the stream among the ranks, so every rank must read the whole stream, with the same seeds. For "
    "a data set that divides the stream by rank, use ab.shares(DataLoader(dataset), effective_batch_size=...)."
)


def check_agreement(batch: Any, planned: PlannedBatch, world: World) -> None:  # noqa: ANN401 (any nested batch)
    """Refuse the first step on a data set if ranks have different data sets, or if two ranks have the same samples."""
    if is_effective_batch(batch):
        # Integers have the same hash in every process, but strings do not.
        key = (planned.seed, str(planned.plan), hash(tuple(int(sample) for sample in planned.sample_ids)))
        subset = batch.iteration.source.subset_digest if isinstance(batch, DatasetBatch) else 0
        data = (subset, _first_samples(batch))
        for rank, (other, other_data) in enumerate(world.gather_objects((key, data))):
            if other != key:
                message = (
                    f"rank {world.rank} has another effective batch than rank {rank}: {key[1]} with seed "
                    f"{key[0]} and {other[1]} with seed {other[0]}, or other samples. Use ab.batches with the "
                    "same data set, size and seed, and the engine with the same sizes, on every rank."
                )
                raise DataError(message)
            # Samples that differ in each load (None) cannot be compared.
            if data[0] != other_data[0] or (data[1] != other_data[1] and None not in (data[1], other_data[1])):
                is_stream = data[0] is None
                message = (
                    f"rank {world.rank} has different samples in its {'stream' if is_stream else 'data set'} than "
                    f"rank {rank}. {_STREAMS_DIFFER if is_stream else _DATA_DIFFER}"
                )
                raise DataError(message)
        return
    # Samples of a user's loader have no ids, so their bytes are compared.
    digests = world.gather_objects(_digest(batch.batch if isinstance(batch, RankShare) else batch))
    for rank, value in enumerate(digests):
        if value is not None and value in digests[:rank]:
            message = (
                f"ranks {digests.index(value)} and {rank} have the same samples in the first step, so every sample "
                f"would count {digests.count(value)} times. Give each rank different samples, with ab.batches or a "
                "DistributedSampler."
            )
            raise DataError(message)


def _first_samples(batch: Any) -> Any:  # noqa: ANN401 (an `EffectiveBatch`)
    """Return a fingerprint of the first few samples; None if loading them twice gives different samples."""
    unit = range(min(_NUM_COMPARED, len(batch.sample_ids)))
    once, again = (_fingerprint(next(iter(batch.feed([unit])))) for _ in range(2))
    return once if once == again else None


def _fingerprint(sample: Any) -> Any:  # noqa: ANN401 (any type of sample)
    """Return values that are equal in all processes for equal samples; for unknown objects only the type."""
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
    """Return a fingerprint of every tensor of a batch; None for an empty batch."""
    if batch is None or not count_samples(batch):
        return None
    return tuple(digest(tensor) for tensor in tensors_of(batch))
