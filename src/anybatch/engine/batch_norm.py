"""Run effective batches with the statistics that `norms=` selects; if needed, the engine normalises for the layers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.core.compatibility import Feature, refusal
from anybatch.core.loss import without_graph
from anybatch.core.splitting import SplitConstraints, Unit, group_sizes
from anybatch.core.torch_internals import active_dispatch_modes, is_in_checkpoint
from anybatch.core.tree import Batch
from anybatch.engine.accumulate import LoopContext, MicroBatch, Sums, accumulate, forward_of
from anybatch.errors import BatchSizeError, CompositionError
from anybatch.norms import Exact, Freeze, Policy, PolicyName, policy_of
from anybatch.norms.exact import (
    BatchNormCall,
    BlockCheckpoint,
    CooperativeThreads,
    Exchange,
    HostStore,
    Interceptor,
    blocks_of,
)
from anybatch.norms.layers import Ranks, batch_norms, check_supported_layers, tracking_layers
from anybatch.norms.running_statistics import (
    BufferReader,
    PartialStatistics,
    RunningStatistics,
    Statistics,
    merge_statistics,
    normalise_with,
    partial_statistics,
)
from anybatch.parallel.strategy import Capabilities, Strategy, Turn
from anybatch.parallel.world import World

Terms = list[Tensor]
_Contribution = tuple[PartialStatistics, Tensor | None]


def accumulate_together(
    context: LoopContext,
    micro_batches: Iterable[tuple[MicroBatch, Batch]],
    *,
    interceptor: Interceptor,
    statistics: RunningStatistics,
    ranks: Ranks,
    offload: bool | None,
) -> Sums:
    """Add up the gradient of one effective batch whose BatchNorm layers use the statistics of the whole batch.

    It equals the gradient of one forward and backward over all samples of all ranks. Each micro-batch runs its forward
    up to a BatchNorm layer and waits there. When all micro-batches have reached the layer, their statistics are merged,
    also over ranks, and all continue. Merging is differentiable, so all forwards form one graph with one backward.
    """
    micro_batches = list(micro_batches)
    # Drop fillers (weight 0, only to keep ranks in lockstep), but keep one if there is no other: all ranks take part.
    micro_batches = [micro_batch for micro_batch in micro_batches if micro_batch[0].unit.weight] or micro_batches[:1]
    device = statistics.device
    store = None
    if device.type != "cpu" if offload is None else offload:
        store = HostStore(context.prepared.parameters.values())
    # One `Sums` for each forward, since forwards are interleaved; joined later in the order of the micro-batches.
    sums = [Sums() for _ in micro_batches]
    merging = _Merging(statistics, ranks, device)
    # torch has this state per thread, and each forward runs in a separate thread.
    thread_state = _ThreadState(device)

    before, after = context.callbacks()

    def make_forward(number: int) -> Callable[[Exchange], Terms]:
        micro_batch, batch = micro_batches[number]

        def run(exchange: Exchange) -> Terms:
            for callback in before:
                callback(micro_batch)
            together = interceptor.in_this_thread(
                lambda call: _normalise(call, exchange, counts=micro_batch.unit.weight > 0)
            )
            forward = forward_of(context.loss, micro_batch, sums[number])
            random = context.randomness.micro_batch(micro_batch)
            offloaded = nullcontext() if store is None else store.hooks()
            with random, thread_state.applied(), together, offloaded, context.autocast():
                terms: Terms = context.prepared.call(forward, batch)
            contributions = [term.detach() for term in terms]
            sums[number].contributions.append((micro_batch.factors, contributions))
            for observe in after:
                observe(micro_batch, contributions)
            return terms

        return run

    # Gradients are reduced after the backward: during it, ranks communicate to sum the layers' statistics.
    with context.strategy.micro_batch(Turn(first=True, last=False)):
        with statistics.forward(counts=any(micro_batch.unit.weight for micro_batch, _ in micro_batches)):
            threads = CooperativeThreads(merging, context.randomness.suspended)
            results = threads.run([make_forward(number) for number in range(len(micro_batches))])
        terms = [term for terms in results for term in terms]
        # One backward for all, since merged statistics join the forwards into one graph.
        total = torch.stack([*terms, *merging.last_token(like=terms)]).sum()
        if not total.requires_grad:
            raise without_graph()
        torch.autograd.backward(context.scaler.scale(total), inputs=context.prepared.backward_inputs)
    joined = Sums()
    for part in sums:
        joined.contributions += part.contributions
        joined.returned_counts += part.returned_counts
    return joined


class _Merging:
    """Merges the statistics of all micro-batches at a layer, and records them to update the running statistics."""

    def __init__(self, statistics: RunningStatistics, ranks: Ranks, device: torch.device) -> None:
        self._statistics = statistics
        self._ranks = ranks
        # Each merge depends on this token and replaces it, which fixes the order of the collectives in the backward.
        self._token = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, layer: str, contributed: Sequence[_Contribution]) -> Statistics:
        """Return the statistics of the whole effective batch."""
        parts, running_mean = [part for part, _ in contributed], contributed[0][1]
        total = sum(part.count for part in parts)
        if self._ranks.size == 1 and total == 1:
            message = (
                f"the effective batch has 1 value per channel at the BatchNorm layer with {layer}: a single value has "
                "no variance. Use a larger effective batch."
            )
            raise BatchSizeError(message, code="single_value")
        if running_mean is not None:
            self._statistics.add_parts(running_mean, [part for part in parts if part.count])
        statistics, self._token = merge_statistics(parts, self._ranks, self._token)
        return statistics

    def last_token(self, *, like: Sequence[Tensor]) -> list[Tensor]:
        """Return [a zero whose backward runs the collectives of all layers in order]; [] with one rank."""
        if self._ranks.size == 1:
            return []
        # Not detached: the backward through its graph runs the collectives, in the same order on all ranks.
        token = self._token * 0
        return [token.to(like[0].dtype) if like else token]


def _normalise(call: BatchNormCall, exchange: Exchange, *, counts: bool) -> Tensor:
    """Normalise one micro-batch with the merged statistics of all micro-batches."""
    if is_in_checkpoint():
        raise CompositionError(refusal(Feature.NON_REENTRANT, Feature.NORMS_EXACT, {}))
    part = partial_statistics(call.values)
    if not counts:
        # A filler must reach each layer like other micro-batches, but must not change the statistics.
        part = PartialStatistics(0, part.mean, part.squares)
    statistics = exchange(f"{call.values.shape[1]} channels, eps={call.eps:g}", (part, call.running_mean))
    return normalise_with(call.values, statistics, call.weight, call.bias, call.eps)


class _ThreadState:
    """The current thread's state in torch: gradient mode, dispatch modes, and the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._gradients = torch.is_grad_enabled()
        self._modes = active_dispatch_modes()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply this state in another thread, within the context."""
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            with torch.set_grad_enabled(self._gradients), stream:
                yield


Execute = Callable[[LoopContext, Iterable[tuple[MicroBatch, Batch]]], Sums]
"""Function (context, micro-batches) -> their loss values; it also adds up their gradients."""


class BatchNormRunner:
    """Runs effective batches with a BatchNorm policy; `constraints` are the policy's requirements on micro-batches."""

    def __init__(
        self,
        policy: Policy,
        modules: nn.Module,
        constraints: SplitConstraints,
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
        # A rank share is one micro-batch (`whole`) only with Exact(method="checkpoint").
        blocks = blocks_of(modules, policy.blocks) if isinstance(policy, Exact) and constraints.whole else {}
        frozen = isinstance(policy, Freeze)
        self._frozen = list(self._batch_norms.values()) if frozen else []
        # Frozen layers do not update their statistics.
        self._statistics = RunningStatistics({} if frozen else tracking_layers(modules), device)
        self.is_idle = not self._batch_norms
        # Layers that are not intercepted store statistics in their buffers, and these are read.
        is_intercepted = bool(self._batch_norms) and (
            constraints.group is not None or constraints.lockstep or constraints.every_unit
        )
        self._interceptor = Interceptor(self._batch_norms.values() if is_intercepted else ())
        self._reading = [] if is_intercepted else self._statistics.layers
        self._hooks = [
            layer.register_forward_hook(BufferReader(self._statistics, number))
            for number, layer in enumerate(self._reading)
        ]
        self._blocks = [BlockCheckpoint(block) for block in blocks.values()]
        self.description = self._describe(list(blocks))

    def forward(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Return the context of one forward: autocast, and recording of the micro-batch's statistics."""
        if self._constraints.every_unit:
            return self._autocast()
        self._unit = micro_batch.unit
        stack = ExitStack()
        stack.enter_context(self._statistics.forward(counts=micro_batch.unit.weight > 0))
        stack.enter_context(self._autocast())
        return stack

    def accumulate(self, context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
        """Add up the gradient of one effective batch; running statistics do not change before `update`."""
        if self._constraints.every_unit:
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
        # Normalise in the backward too: a checkpointed block that is recomputed there must give the same result.
        with self._prepared(), self._interceptor.in_all_threads(self._normalisation()):
            return accumulate(context, micro_batches)

    def accumulate_alone(self, context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
        """Add up the gradient of some micro-batches without waiting for other ranks; see `accumulate`."""
        if self.is_idle or self._constraints.lockstep or self._constraints.every_unit:
            # Let the layers normalise: code that waits for other ranks or micro-batches would hang in a trial.
            return accumulate(dataclasses.replace(context, forward=lambda _: self._autocast()), micro_batches)
        return self.accumulate(context, micro_batches)

    @contextmanager
    def two_passes(self) -> Iterator[Callable[[MicroBatch], AbstractContextManager[object]]]:
        """Prepare layers for an `ab.joint` loss, which runs forwards twice; yield a context for each first forward."""
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
        """Return the function that normalises instead of the layers; None if the layers normalise themselves."""
        if not self._batch_norms:
            return None
        if self._constraints.group is not None:
            return self._by_groups
        return self._over_ranks if self._constraints.lockstep else None

    def _describe(self, blocks: Sequence[str]) -> str:
        if not self._batch_norms:
            return ""
        first = next(iter(self._batch_norms))
        where = f"{len(self._batch_norms)} BatchNorm layers, first {first!r}"
        description = f"{self._policy.name} ({where}): {self._policy.description}"
        if self._constraints.whole:
            description += f"; {len(blocks)} blocks, {', '.join(blocks[:3]) or 'none found'}"
        return description

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Set up the layers for one effective batch, and restore them on exit; the recorded statistics are kept."""
        modes, momenta = [layer.training for layer in self._frozen], [layer.momentum for layer in self._reading]
        self._has_sums = False
        self._statistics.begin()
        try:
            # For this batch only, because the user controls the modes of the model.
            for layer in self._frozen:
                layer.training = False
            # With a momentum of 1, a layer stores each forward's statistics in its buffers, for `BufferReader`.
            for layer in self._reading:
                layer.momentum = 1.0
            yield
            # Not after an error, because a partial batch must not update running statistics.
            self._has_sums = True
        finally:
            for layer, training in zip(self._frozen, modes, strict=True):
                layer.training = training
            for layer, momentum in zip(self._reading, momenta, strict=True):
                layer.momentum = momentum
            self._statistics.restore_buffers()

    def _over_ranks(self, call: BatchNormCall) -> Tensor:
        """Normalise with the statistics of the current micro-batches of all ranks."""
        part = partial_statistics(call.values)
        self._record(call, [part])
        # A filler takes part in the sum with 0 samples, because the other ranks wait for this rank.
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
            raise CompositionError(message, code="ghost_rows")
        sizes = [rows * size for size in group_sizes(self._unit.num_samples, group_size)]
        groups = call.values.split(sizes)
        with torch.no_grad():
            # Without a graph, since this is for the running statistics only.
            self._record(call, [partial_statistics(group) for group in groups])
        # Running statistics are not passed here, since they are updated once from the whole effective batch.
        return torch.cat(
            [F.batch_norm(g, None, None, call.weight, call.bias, training=True, eps=call.eps) for g in groups]
        )

    def _record(self, call: BatchNormCall, parts: Sequence[PartialStatistics]) -> None:
        if call.running_mean is None or not self._statistics.recording:
            return
        self._statistics.add_parts(call.running_mean, parts)


def policy_for(norms: "Policy | PolicyName | None", modules: nn.Module, world_size: int) -> Policy:
    """Return the policy that the user chose, after a check of the model's layers."""
    policy = policy_of(norms)
    check_supported_layers(modules, num_ranks=world_size, frozen=isinstance(policy, Freeze))
    return policy


def check_policy(
    policy: Policy, modules: nn.Module, constraints: SplitConstraints, capabilities: Capabilities, *, searches: bool
) -> None:
    """Raise a `CompositionError` if the policy does not work with this strategy or these layers."""
    if constraints.every_unit and searches:
        message = (
            "micro_batch_size='auto' cannot search under norms='exact', where all micro-batches are in memory "
            "together. Set micro_batch_size."
        )
        raise CompositionError(message)
    if constraints.every_unit and capabilities.lockstep:
        message = (
            f"norms='exact' interleaves micro-batches, but strategy {capabilities.name!r} needs one after another, "
            "in lockstep. Use strategy='all_reduce', or norms=Exact(method='checkpoint')."
        )
        raise CompositionError(message)
    for name, layer in batch_norms(modules).items():
        if isinstance(policy, Freeze) and layer.running_mean is None:
            message = (
                f"norms='freeze' needs running statistics, but layer {name!r} tracks none "
                "(track_running_stats=False). Use norms='exact' or Ghost(group_size=...)."
            )
            raise CompositionError(message, code="no_running_statistics")


def ranks_of(strategy: Strategy, world: World) -> Ranks:
    """Return the number of ranks and their collectives, for layers that are normalised over ranks."""

    def total(tensor: Tensor) -> Tensor:
        with world.collective():
            return strategy.sum(tensor)

    def largest(number: int) -> int:
        return int(max(row[0] for row in world.gather_numbers([float(number)])))

    return Ranks(world.size, total, largest)
