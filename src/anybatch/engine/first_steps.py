"""The work of an engine's first steps: determine sizes, check the loss, and warn about likely mistakes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import Position, lengths_of
from anybatch.core.splitting import BatchPlan
from anybatch.core.tensors import BufferValues
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import Batch, copied, count_samples, moved_to, tensors_of
from anybatch.data.effective_batch import DatasetBatch
from anybatch.engine.accumulate import LoopContext
from anybatch.engine.decisions import Decisions
from anybatch.engine.forward_state import StateWatch
from anybatch.engine.loss_check.check import LossCheck
from anybatch.engine.micro_batch_size.search import TrialParts
from anybatch.engine.micro_batch_size.sizes import RunSizes
from anybatch.engine.micro_batches import PlannedBatch, RankShare, is_effective_batch
from anybatch.engine.notifier import Notifier
from anybatch.engine.user_code import Model, trial_run
from anybatch.errors import DataError, LossError
from anybatch.parallel.replicas import digest
from anybatch.parallel.world import World


class CutNotice:
    """Warns once, in the first step with several micro-batches, that each is normalised by its own statistics."""

    def __init__(self, layers: Mapping[str, BatchNormBase], notifier: Notifier, *, is_chosen: bool) -> None:
        self._layers = {} if is_chosen else dict(layers)
        self._notifier = notifier

    @property
    def is_waiting(self) -> bool:
        """Whether the warning is still possible."""
        return bool(self._layers)

    def after_step(self, plan: BatchPlan) -> None:
        """Check a step that was run with this plan."""
        if not self._layers or (num_micro_batches := len(plan.units)) == 1:
            return
        training = [name for name, layer in self._layers.items() if layer.training]
        if not training:  # a frozen layer may train later
            return
        self._layers = {}
        which = f"{len(training)} BatchNorm layer{'s' * (len(training) > 1)} (first {training[0]!r})"
        self._notifier.warn(
            "batch_norm_by_micro_batch",
            f"{which} normalised each of {num_micro_batches} micro-batches by its own statistics. So the gradient "
            "differs from the gradient of the un-split batch and depends on the cut. Use norms='exact' (statistics of "
            "the effective batch), norms=anybatch.norms.Ghost(group_size=32) (of fixed groups), norms='freeze' "
            "(running statistics) or norms='sync' (over ranks); norms='keep' accepts this and silences the warning.",
        )


@dataclass(kw_only=True, eq=False)
class FirstSteps:
    """Determines sizes, checks the loss and watches the model in the first steps; `StepRunner` drops it afterwards."""

    check: LossCheck
    sizes: RunSizes
    cut_notice: CutNotice
    watch: StateWatch
    autocast: Callable[..., AbstractContextManager[object]]
    on_first_batch: Callable[[PlannedBatch, int], None]
    trial_parts: Callable[[], TrialParts]
    decisions: Decisions
    notifier: Notifier
    _has_begun: bool = field(default=False, init=False)

    def sends_nothing(self, step: int) -> bool:
        """Whether a step sends only messages that later steps send too."""
        return self._has_begun and not self.check.is_due(step) and not self.sizes.searches

    def settle_sizes(self, batch: Any, position: Position) -> None:  # noqa: ANN401 (any nested batch)
        """Determine the micro-batch size if it is "auto" and still unknown."""
        if not self.sizes.searches:
            return
        found = self.sizes.settle(batch, self.trial_parts(), position)
        self.decisions.add("micro_batch_size", found.words)
        self.decisions.add("layout", found.layout)
        if found.rate is not None:
            self.notifier.diagnosis("micro_batch_size", f"micro_batch_size: {found.words}")

    def check_batch(self, batch: Any, planned: PlannedBatch, step: int, *, check_loss: bool) -> None:  # noqa: ANN401
        """Check a planned batch: send the header of the run once, and compare the loss with its declaration."""
        if not self._has_begun:
            self._refuse_other_rows(batch)
            # All stages of a ramp: one that cannot be cut would end the run later.
            self.sizes.refuse_uncuttable(getattr(batch, "sizes", ()))
            self._has_begun = True
            self.on_first_batch(planned, step)
        if check_loss and self.check.is_due(step):
            self.check.check_declaration(planned, self.autocast, step)

    def watched(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Return the context for the micro-batches, which detects state that a forward changes."""
        return self.watch.effective_batch(plan)

    def finish_step(self, plan: BatchPlan) -> None:
        """Send the warnings that are due after a step with this plan."""
        self.check.warn_if_undecided()
        self.cut_notice.after_step(plan)

    def is_done(self, step: int, *, is_cut: bool) -> bool:
        """Whether all work is done after a step; without a cut, the work of `waits_for_cut` may remain."""
        return (
            not self.sizes.searches
            and self.check.is_over(step)
            and not self.watch.draws_left
            and not (is_cut and self.waits_for_cut)
        )

    @property
    def waits_for_cut(self) -> bool:
        """Whether the first step with several micro-batches must still be watched."""
        return self.watch.is_looking or self.cut_notice.is_waiting

    def _refuse_other_rows(self, batch: Any) -> None:  # noqa: ANN401 (any nested batch)
        """Refuse a loss over samples if the number of rows in a micro-batch differs."""
        lengths = lengths_of(batch)
        if lengths is None or not (lengths.packed or lengths.shapes):
            return
        if not self.check.loss.allows_other_rows:
            layout = "packed into one row" if lengths.packed else "padded with additional rows"
            message = (
                f"micro-batches are {layout}, but the loss is a mean over samples. Declare the items of the mean: "
                "ab.mean_over_tokens(loss, labels='labels') or ab.mean_over(loss, count=...); or return "
                "ab.LossSum(total, count)."
            )
            raise LossError(message)


_NUM_LOOKS = 2
_MAX_NAMES = 4


@dataclass(eq=False)
class MaskedParameters:
    """Checks parameters without a gradient after a step that has skipped micro-batches.

    A micro-batch with a count of zero (all of its targets are masked) is not run. An optimizer skips a parameter whose
    gradient is None, whereas weight decay and momentum change a parameter whose gradient is zero. One forward of a
    skipped micro-batch shows whether it uses the parameter. Two steps are checked.
    """

    context: LoopContext
    model: Model
    modules: nn.Module
    notifier: Notifier
    looks_left: int = field(default=_NUM_LOOKS, init=False)

    def look(self, left_out: Batch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Warn if a skipped micro-batch uses a parameter that has no gradient in this step."""
        names = [
            name for name, gradient in zip(self.context.prepared.parameters, gradients, strict=True) if gradient is None
        ]
        if not names:
            return
        self.looks_left -= 1
        parameters = [self.context.prepared.parameters[name] for name in names]
        buffers, device = BufferValues(self.modules), parameters[0].device
        try:
            with (
                trial_run(),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                self.context.autocast(),
            ):
                output = self.context.loss.function(self.model, moved_to(copied(left_out), device))
                roots = [one.sum() for one in tensors_of(output) if one.requires_grad]
                found = torch.autograd.grad(roots, parameters, allow_unused=True) if roots else ()
        except Exception:  # noqa: BLE001 (such as a loss that fails if all targets are masked)
            return
        finally:
            buffers.restore()
        reached = [name for name, gradient in zip(names, found, strict=False) if gradient is not None]
        if reached:
            more = f" and {len(reached) - _MAX_NAMES} more" if len(reached) > _MAX_NAMES else ""
            message = (
                f"only micro-batches with all targets masked use {', '.join(reached[:_MAX_NAMES])}{more}. Such "
                "micro-batches are not run, so the optimizer skips these parameters; in the un-split batch their "
                "gradient is zero, and weight decay and momentum change them. Use larger micro-batches, or remove "
                "samples without targets from the data."
            )
            self.notifier.warn("parameters_reached_where_masked", message, everywhere=True)


_NUM_COMPARED = 4
"""Number of samples that ranks compare before the first step on a data set."""


def refuse_disagreement(batch: Any, planned: PlannedBatch, world: World) -> None:  # noqa: ANN401 (any nested batch)
    """Refuse the first step on a data set if the ranks' batches do not fit together."""
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
