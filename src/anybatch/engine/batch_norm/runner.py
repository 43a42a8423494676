"""How a policy about BatchNorm is carried out: which executor runs an effective batch, and what it is given."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.core.batch import Placement
from anybatch.core.compatibility import Feature
from anybatch.core.splitting import Unit, group_sizes
from anybatch.core.torch_internals import InstanceNormBase
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import Machine, Work, accumulate
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.batch_norm.exact import accumulate_together
from anybatch.engine.micro_batch_size.sizes import Sizing
from anybatch.errors import CompositionError
from anybatch.norms import Exact, Freeze, Ghost, Keep, Policy, PolicyName, Sync, policy_of
from anybatch.norms.batch_norm_override import Call, Interceptor
from anybatch.norms.block_checkpoints import BlockCheckpoint, blocks_of
from anybatch.norms.layers import Ranks, batch_norms, refuse_unfit_layers, tracking_layers
from anybatch.norms.merged_statistics import Chunk, chunk_of, merged, normalised
from anybatch.norms.running_statistics import BufferReader, RunningStatistics, momentum_of_one
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.world import World


class Normalisation:
    """Runs effective batches under a policy. What is to be done is decided once, here.

    Args:
        policy: the policy.
        modules: the model, on its device.
        strategy: sums over ranks.
        world: the ranks.
        sizing: whether a micro-batch size is to be searched.

    Raises:
        CompositionError: the policy cannot be had with this strategy, these sizes or these layers.
    """

    def __init__(self, policy: Policy, modules: nn.Module, strategy: Strategy, world: World, sizing: Sizing) -> None:
        self._policy = policy
        self._batch_norms = batch_norms(modules)
        self._ranks = _ranks(strategy, world)
        self._has_sums = False
        several = world.size > 1
        meets = isinstance(policy, Exact) and policy.method == "rendezvous"
        self.is_whole = isinstance(policy, Exact) and not meets
        self.every_unit = bool(self._batch_norms) and meets
        over_ranks = bool(self._batch_norms) and several and (isinstance(policy, Sync) or self.is_whole)
        self.joins_ranks = several and bool(self._batch_norms) and isinstance(policy, (Sync, Exact))
        self.lockstep = over_ranks or strategy.capabilities.lockstep
        self._fills_up = self.lockstep or (self.every_unit and several)
        self._refuse(strategy, sizing)
        tracking = tracking_layers(modules)
        if isinstance(policy, Freeze):
            tracking = {name: layer for name, layer in tracking.items() if isinstance(layer, InstanceNormBase)}
        self._statistics = RunningStatistics(tracking, world.device)
        takes_over = bool(self._batch_norms) and (isinstance(policy, Ghost) or over_ranks)
        # Layers whose statistics nothing else gets to see leave them in their buffers.
        self._reading = [
            layer
            for layer in self._statistics.layers
            if isinstance(layer, InstanceNormBase) or not (takes_over or meets)
        ]
        self._unit = Unit(0, 0, 0)
        self._normalise = None if not takes_over else self._by_groups if isinstance(policy, Ghost) else self._over_ranks
        self._interceptor = Interceptor(self._batch_norms.values() if takes_over or meets else ())
        self._execute = self._choose(meets=meets)
        blocks = blocks_of(modules, policy.blocks) if isinstance(policy, Exact) and self.is_whole else {}
        self._hooks = [
            layer.register_forward_hook(BufferReader(self._statistics, number))
            for number, layer in enumerate(self._statistics.layers)
            if layer in self._reading
        ]
        self._blocks = [BlockCheckpoint(block) for block in blocks.values()]
        self.decisions = self._in_words(list(blocks))

    def place(self, placement: Placement) -> Placement:
        """Return how batches are cut under the policy."""
        cut = placement.cut
        if self.is_whole:
            cut = dataclasses.replace(cut, micro_batch_size=None, accumulation_steps=None)
        group = self._policy.group_size if isinstance(self._policy, Ghost) else None
        cut = dataclasses.replace(cut, lockstep=cut.lockstep or self._fills_up, group=group)
        return dataclasses.replace(placement, cut=cut)

    def accumulate(self, machine: Machine, work: Iterable[tuple[Work, Batch]]) -> Sums:
        """Add up the gradient of one effective batch; buffers are as before afterwards, see `update`."""
        return self._execute(machine, work)

    def alone(self, machine: Machine, work: Iterable[tuple[Work, Batch]]) -> Sums:
        """Add up the gradient of some micro-batches, without waiting for other ranks."""
        return accumulate(machine, work) if self.lockstep or self.every_unit else self._execute(machine, work)

    @contextmanager
    def two_passes(self) -> Iterator[Callable[[Work], AbstractContextManager[object]]]:
        """Prepare layers for a loss across samples; what is yielded is the context of a forward of the first pass."""
        if not self._statistics.layers and not self._batch_norms:
            yield lambda _: nullcontext()
            return
        with self._prepared():
            yield lambda item: self._statistics.forward(counts=item.unit.weight > 0)

    def update(self) -> None:
        """Update running statistics, once, from what the last effective batch has shown."""
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

    def _refuse(self, strategy: Strategy, sizing: Sizing) -> None:
        """Refuse what the policy cannot do.

        Raises:
            CompositionError: with what to use instead.
        """
        if self.every_unit and strategy.capabilities.lockstep:
            message = (
                f"norms='exact' runs micro-batches in turns, and strategy {strategy.capabilities.name!r} keeps ranks "
                "in lockstep within each. Use strategy='all_reduce', or norms=Exact(method='checkpoint')."
            )
            raise CompositionError(message)
        if self.every_unit and sizing.searches and sizing.may_run_out:
            message = (
                "micro_batch_size='auto' cannot search under norms='exact', where all micro-batches take memory at "
                "once. Name a micro_batch_size."
            )
            raise CompositionError(message)
        for name, layer in self._batch_norms.items():
            if isinstance(self._policy, Freeze) and layer.running_mean is None:
                message = (
                    f"norms='freeze' needs running statistics, and layer {name!r} tracks none "
                    "(track_running_stats=False). Use norms='exact' or Ghost(group_size=...)."
                )
                raise CompositionError(message)
        if self.is_whole or self.every_unit:
            sizing.searches = False  # there is nothing to find: a share is one micro-batch
        elif self._batch_norms and isinstance(self._policy, Keep | Sync):
            sizing.only_fits = "what BatchNorm makes of a sample depends on its micro-batch"
        sizing.group = self._policy.group_size if isinstance(self._policy, Ghost) else 1

    def _choose(self, *, meets: bool) -> Callable[[Machine, Iterable[tuple[Work, Batch]]], Sums]:
        if not self._batch_norms and not self._statistics.layers:
            return accumulate
        if meets and self._batch_norms:
            return self._together
        return self._one_by_one

    def _in_words(self, blocks: Sequence[str]) -> dict[str, str]:
        if not self._batch_norms:
            return {}
        first = next(iter(self._batch_norms))
        where = f"{len(self._batch_norms)} BatchNorm layers, first {first!r}"
        said = f"{self._policy.name} ({where}): {self._policy.says}"
        if self.is_whole:
            said += f"; {len(blocks)} blocks, {', '.join(blocks[:3]) or 'none found'}"
        return {"norms": said}

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Set layers up for one effective batch, and put everything but the sums back."""
        frozen = list(self._batch_norms.values()) if isinstance(self._policy, Freeze) else []
        modes = [layer.training for layer in frozen]
        self._has_sums = False
        self._statistics.begin()
        try:
            for layer in frozen:
                layer.training = False
            with momentum_of_one(self._reading):
                yield
            self._has_sums = True
        finally:
            for layer, training in zip(frozen, modes, strict=True):
                layer.training = training
            self._statistics.put_back()

    def _one_by_one(self, machine: Machine, work: Iterable[tuple[Work, Batch]]) -> Sums:
        """Run micro-batches one after the other, and see what layers make of them."""

        def before(item: Work) -> None:
            self._unit = item.unit
            machine.before(item)

        def forward() -> AbstractContextManager[object]:
            stack = ExitStack()
            stack.enter_context(self._statistics.forward(counts=self._unit.weight > 0))
            stack.enter_context(machine.autocast())
            return stack

        # Around the backward too: a block that is run again there must be normalised as before.
        with self._prepared(), self._interceptor.everywhere(self._normalise):
            return accumulate(dataclasses.replace(machine, before=before, autocast=forward), work)

    def _together(self, machine: Machine, work: Iterable[tuple[Work, Batch]]) -> Sums:
        assert isinstance(self._policy, Exact)
        with self._prepared():
            return accumulate_together(
                machine,
                work,
                interceptor=self._interceptor,
                statistics=self._statistics,
                ranks=self._ranks,
                offload=self._policy.offload,
            )

    def _over_ranks(self, call: Call) -> Tensor:
        """Normalise by the statistics of what all ranks run at this moment."""
        chunk = chunk_of(call.values)
        self._record(call, [chunk])
        counted = chunk if self._unit.weight else Chunk(0, chunk.mean, chunk.squares)
        joint, _ = merged([counted], self._ranks, torch.zeros_like(chunk.mean[0]))
        return normalised(call.values, joint, call.weight, call.bias, call.eps)

    def _by_groups(self, call: Call) -> Tensor:
        """Normalise each group of samples by its own statistics."""
        assert isinstance(self._policy, Ghost)
        rows, rest = divmod(call.values.shape[0], self._unit.num_samples)
        if rest:
            message = (
                f"Ghost(group_size={self._policy.group_size}) needs the samples along the first axis of what BatchNorm "
                f"gets, which has {call.values.shape[0]} rows for {self._unit.num_samples} samples. Move the samples "
                "to the front (flattened with other axes is right too), or use norms='exact'."
            )
            raise CompositionError(message)
        sizes = [rows * size for size in group_sizes(self._unit.num_samples, self._policy.group_size)]
        groups = call.values.split(sizes)
        with torch.no_grad():
            self._record(call, [chunk_of(group) for group in groups])
        return torch.cat(
            [F.batch_norm(g, None, None, call.weight, call.bias, training=True, eps=call.eps) for g in groups]
        )

    def _record(self, call: Call, chunks: Sequence[Chunk]) -> None:
        if call.running_mean is None or not self._statistics.recording:
            return
        self._statistics.add_chunks(call.running_mean, chunks)


def policy_for(norms: "Policy | PolicyName", modules: nn.Module, world: World) -> Policy:
    """Return the policy that was asked for, if the model's layers permit one at all.

    Raises:
        UserError: an unknown name.
        ParameterError, CompositionError: a layer that nothing can be done about as it is.
    """
    policy = policy_of(norms)
    refuse_unfit_layers(modules, num_ranks=world.size, frozen=isinstance(policy, Freeze))
    return policy


def policy_features(policy: Policy) -> dict[Feature, str]:
    """Return the feature of the composition table that a policy is; none for "keep", which is the rule."""
    if isinstance(policy, Exact):
        return {Feature.NORMS_EXACT if policy.method == "rendezvous" else Feature.NORMS_CHECKPOINT: ""}
    kinds = {Sync: Feature.NORMS_SYNC, Freeze: Feature.NORMS_FREEZE, Ghost: Feature.NORMS_GHOST}
    return {feature: "" for kind, feature in kinds.items() if isinstance(policy, kind)}


def _ranks(strategy: Strategy, world: World) -> Ranks:
    def total(tensor: Tensor) -> Tensor:
        with world.collective():
            return strategy.sum(tensor)

    def most(number: int) -> int:
        return int(max(row[0] for row in world.gather_numbers([float(number)])))

    return Ranks(world.size, total, most)
