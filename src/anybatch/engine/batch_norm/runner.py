"""Applies a BatchNorm policy: runs effective batches, and normalises inside the model's layers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.core.splitting import CutConstraints, Unit, group_sizes
from anybatch.core.torch_internals import InstanceNormBase
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import LoopContext, MicroBatch, Sums, accumulate
from anybatch.engine.batch_norm.exact import accumulate_together
from anybatch.errors import CompositionError
from anybatch.norms import Exact, Freeze, Policy, PolicyName, policy_of
from anybatch.norms.batch_norm_override import BatchNormCall, Interceptor
from anybatch.norms.block_checkpoints import BlockCheckpoint, blocks_of
from anybatch.norms.layers import Ranks, batch_norms, refuse_unfit_layers, tracking_layers
from anybatch.norms.merged_statistics import PartialStatistics, merge_statistics, normalise_with, partial_statistics
from anybatch.norms.running_statistics import BufferReader, RunningStatistics, momentum_of_one
from anybatch.parallel.strategy import Capabilities, Strategy
from anybatch.parallel.world import World

Execute = Callable[[LoopContext, Iterable[tuple[MicroBatch, Batch]]], Sums]
"""Adds up the gradient of some micro-batches."""


class BatchNormRunner:
    """Runs effective batches under a policy. `constraints` and the policy contain all decisions."""

    def __init__(
        self,
        policy: Policy,
        modules: nn.Module,
        constraints: CutConstraints,
        ranks: Ranks,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        self._policy = policy
        self._batch_norms = batch_norms(modules)
        self._constraints = constraints
        self._ranks = ranks
        self._autocast = autocast
        self._has_sums = False
        self._unit = Unit(0, 0, 0)
        # Only Exact(method="checkpoint") makes a rank share one unit.
        blocks = blocks_of(modules, policy.blocks) if isinstance(policy, Exact) and constraints.whole else {}
        frozen = isinstance(policy, Freeze)
        self._frozen = list(self._batch_norms.values()) if frozen else []
        self._statistics = _statistics(modules, device, frozen=frozen)
        self.is_idle = not self._batch_norms and not self._statistics.layers
        # The statistics of layers that are not overridden are read from their buffers.
        overridden = bool(self._batch_norms) and (
            constraints.group is not None or constraints.lockstep or constraints.every_unit
        )
        self._interceptor = Interceptor(self._batch_norms.values() if overridden else ())
        self._reading = [
            layer for layer in self._statistics.layers if isinstance(layer, InstanceNormBase) or not overridden
        ]
        self._hooks = [
            layer.register_forward_hook(BufferReader(self._statistics, number))
            for number, layer in enumerate(self._statistics.layers)
            if layer in self._reading
        ]
        self._blocks = [BlockCheckpoint(block) for block in blocks.values()]
        self.description = self._in_words(list(blocks))

    def forward(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Return the context of one forward: autocast, and recording of the unit's statistics."""
        if self._constraints.every_unit:
            return self._autocast()
        self._unit = micro_batch.unit
        stack = ExitStack()
        stack.enter_context(self._statistics.forward(counts=micro_batch.unit.weight > 0))
        stack.enter_context(self._autocast())
        return stack

    def accumulate(self, context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
        """Add up the gradient of one effective batch without changing running statistics, see `update`."""
        if self._constraints.every_unit:
            return self._together(context, micro_batches)
        # Around the backward too: a block that is recomputed there must be normalised in the same way.
        with self._prepared(), self._interceptor.everywhere(self._normalisation()):
            return accumulate(context, micro_batches)

    def accumulate_alone(self, context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
        """Add up the gradient of some micro-batches without waiting for other ranks; see `accumulate`."""
        if self.is_idle or self._constraints.lockstep or self._constraints.every_unit:
            # With plain layers: layers that wait for other ranks or micro-batches would hang in a trial.
            return accumulate(dataclasses.replace(context, forward=lambda _: self._autocast()), micro_batches)
        return self.accumulate(context, micro_batches)

    @contextmanager
    def two_passes(self) -> Iterator[Callable[[MicroBatch], AbstractContextManager[object]]]:
        """Prepare layers for a loss across samples; yield a function that makes contexts for first-pass forwards."""
        if self.is_idle:
            yield lambda _: nullcontext()
            return
        with self._prepared():
            yield lambda micro_batch: self._statistics.forward(counts=micro_batch.unit.weight > 0)

    def update(self) -> None:
        """Update running statistics once, from the last effective batch."""
        if self._has_sums:
            self._statistics.update(self._ranks)
            self._has_sums = False

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            block.close()
        self._interceptor.close()

    def _normalisation(self) -> Callable[[BatchNormCall], Tensor] | None:
        """Return the function that replaces the layers' normalisation; None to use the layers'."""
        if not self._batch_norms:
            return None
        if self._constraints.group is not None:
            return self._by_groups
        return self._over_ranks if self._constraints.lockstep else None

    def _in_words(self, blocks: Sequence[str]) -> str:
        if not self._batch_norms:
            return ""
        first = next(iter(self._batch_norms))
        where = f"{len(self._batch_norms)} BatchNorm layers, first {first!r}"
        description = f"{self._policy.name} ({where}): {self._policy.says}"
        if self._constraints.whole:
            description += f"; {len(blocks)} blocks, {', '.join(blocks[:3]) or 'none found'}"
        return description

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Set up the layers for one effective batch, and restore everything but the recorded sums on exit."""
        modes = [layer.training for layer in self._frozen]
        self._has_sums = False
        self._statistics.begin()
        try:
            # For this batch only: the user controls the modes of the model.
            for layer in self._frozen:
                layer.training = False
            # With a momentum of 1, a layer stores each forward's statistics in its buffers, for `BufferReader`.
            with momentum_of_one(self._reading):
                yield
            # Not set after an error: a partial batch must not update running statistics.
            self._has_sums = True
        finally:
            for layer, training in zip(self._frozen, modes, strict=True):
                layer.training = training
            self._statistics.restore_buffers()

    def _together(self, context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
        assert isinstance(self._policy, Exact)
        with self._prepared():
            return accumulate_together(
                context,
                micro_batches,
                interceptor=self._interceptor,
                statistics=self._statistics,
                ranks=self._ranks,
                offload=self._policy.offload,
            )

    def _over_ranks(self, call: BatchNormCall) -> Tensor:
        """Normalise with the statistics of the current micro-batches of all ranks."""
        part = partial_statistics(call.values)
        self._record(call, [part])
        # A filler takes part in the sum with a count of 0, because the other ranks wait for it.
        counted = part if self._unit.weight else PartialStatistics(0, part.mean, part.squares)
        statistics, _ = merge_statistics([counted], self._ranks, torch.zeros_like(part.mean[0]))
        return normalise_with(call.values, statistics, call.weight, call.bias, call.eps)

    def _by_groups(self, call: BatchNormCall) -> Tensor:
        """Normalise each group of samples with the group's statistics."""
        group_size = self._constraints.group
        assert group_size is not None
        rows, rest = divmod(call.values.shape[0], self._unit.num_samples)
        if rest:
            message = (
                f"Ghost(group_size={group_size}) needs samples along the first axis of the BatchNorm input, "
                f"which has {call.values.shape[0]} rows for {self._unit.num_samples} samples. Move the samples to the "
                "first axis (they may be flattened with other axes), or use norms='exact'."
            )
            raise CompositionError(message)
        sizes = [rows * size for size in group_sizes(self._unit.num_samples, group_size)]
        groups = call.values.split(sizes)
        with torch.no_grad():
            # For the running statistics only; the normalisation below builds the graph.
            self._record(call, [partial_statistics(group) for group in groups])
        # Without running statistics, which are updated once from the whole effective batch, after the step.
        return torch.cat(
            [F.batch_norm(g, None, None, call.weight, call.bias, training=True, eps=call.eps) for g in groups]
        )

    def _record(self, call: BatchNormCall, parts: Sequence[PartialStatistics]) -> None:
        if call.running_mean is None or not self._statistics.recording:
            return
        self._statistics.add_parts(call.running_mean, parts)


def policy_for(norms: "Policy | PolicyName | None", modules: nn.Module, world_size: int) -> Policy:
    """Return the chosen policy, after a check of the model's layers.

    Raises:
        UserError: the name is unknown.
        ParameterError, CompositionError: a layer is not supported.
    """
    policy = policy_of(norms)
    refuse_unfit_layers(modules, num_ranks=world_size, frozen=isinstance(policy, Freeze))
    return policy


def refuse_policy(
    policy: Policy, modules: nn.Module, constraints: CutConstraints, needs: Capabilities, *, searches: bool
) -> None:
    """Raise a `CompositionError` if the policy does not work with this strategy or these layers."""
    if constraints.every_unit and searches:
        message = (
            "micro_batch_size='auto' cannot search under norms='exact', where all micro-batches are in memory "
            "together. Set micro_batch_size."
        )
        raise CompositionError(message)
    if constraints.every_unit and needs.lockstep:
        message = (
            f"norms='exact' interleaves micro-batches, but strategy {needs.name!r} keeps ranks in lockstep within "
            "each. Use strategy='all_reduce', or norms=Exact(method='checkpoint')."
        )
        raise CompositionError(message)
    for name, layer in batch_norms(modules).items():
        if isinstance(policy, Freeze) and layer.running_mean is None:
            message = (
                f"norms='freeze' needs running statistics, but layer {name!r} tracks none "
                "(track_running_stats=False). Use norms='exact' or Ghost(group_size=...)."
            )
            raise CompositionError(message)


def ranks_of(strategy: Strategy, world: World) -> Ranks:
    """Return the ranks for layers that are normalised over them."""

    def total(tensor: Tensor) -> Tensor:
        with world.collective():
            return strategy.sum(tensor)

    def most(number: int) -> int:
        return int(max(row[0] for row in world.gather_numbers([float(number)])))

    return Ranks(world.size, total, most)


def _statistics(modules: nn.Module, device: torch.device, *, frozen: bool) -> RunningStatistics:
    tracking = tracking_layers(modules)
    if frozen:
        # Frozen BatchNorm layers keep their statistics; InstanceNorm layers are not frozen.
        tracking = {name: layer for name, layer in tracking.items() if isinstance(layer, InstanceNormBase)}
    return RunningStatistics(tracking, device)
