"""The executor of norms="exact": micro-batches advance layer by layer and share one backward."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from anybatch.core.compatibility import Feature, refusal
from anybatch.core.loss import without_graph
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import LoopContext, MicroBatch, Sums, forward_of
from anybatch.engine.torch_internals import active_dispatch_modes, is_in_checkpoint
from anybatch.errors import BatchSizeError, CompositionError
from anybatch.norms.batch_norm_override import BatchNormCall, Interceptor
from anybatch.norms.cooperative import CooperativeThreads, Exchange
from anybatch.norms.host_store import HostStore
from anybatch.norms.layers import Ranks
from anybatch.norms.merged_statistics import (
    MergedStatistics,
    PartialStatistics,
    merge_statistics,
    normalise_with,
    partial_statistics,
)
from anybatch.norms.running_statistics import RunningStatistics
from anybatch.parallel.strategy import Turn

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
    """Add up the gradient of one effective batch whose BatchNorm layers use the statistics of all of it, exactly.

    Equal to one forward and backward over all samples of all ranks: each micro-batch runs its forward up to a BatchNorm
    layer and waits there. When all have arrived, their statistics are merged, also over ranks, and they continue.
    Merging is differentiable, so all forwards form one graph with one backward.
    """
    micro_batches = _without_fillers(list(micro_batches))
    device = statistics.device
    store = None
    if device.type != "cpu" if offload is None else offload:
        store = HostStore(context.prepared.parameters.values())
    # One for each forward, since forwards are interleaved; they are joined in the order of the micro-batches.
    sums = [Sums() for _ in micro_batches]
    merging = _Merging(statistics, ranks, device)
    # torch keeps this state per thread, and each forward runs in a separate thread.
    thread_state = _ThreadState(device)

    before, after = context.callbacks()

    def forward_of_one(number: int) -> Callable[[Exchange[_Contribution, MergedStatistics]], Terms]:
        micro_batch, batch = micro_batches[number]

        def run(exchange: Exchange[_Contribution, MergedStatistics]) -> Terms:
            for look in before:
                look(micro_batch)
            together = interceptor.in_this_thread(
                lambda call: _normalise(call, exchange, counts=micro_batch.unit.weight > 0)
            )
            forward = forward_of(context.loss, micro_batch, sums[number])
            random = context.randomness.micro_batch(micro_batch)
            with random, thread_state.applied(), together, _hooks(store), context.autocast():
                terms: Terms = context.prepared.call(forward, batch)
            contributions = [term.detach() for term in terms]
            sums[number].contributions.append((micro_batch.factors, contributions))
            for note in after:
                note(micro_batch, contributions)
            return terms

        return run

    # Gradients are reduced after the backward, not during it, when the layers' statistics are summed.
    with context.strategy.micro_batch(Turn(first=True, last=False)):
        with statistics.forward(counts=any(micro_batch.unit.weight for micro_batch, _ in micro_batches)):
            threads: CooperativeThreads[_Contribution, MergedStatistics, Terms] = CooperativeThreads(
                merging, context.randomness.parked
            )
            found = threads.run([forward_of_one(number) for number in range(len(micro_batches))])
        terms = [term for terms in found for term in terms]
        # One backward for all, since merged statistics join the forwards into one graph.
        total = torch.stack([*terms, *merging.last_token(like=terms)]).sum()
        if not total.requires_grad:
            raise without_graph()
        torch.autograd.backward(context.scaler.scale(total), inputs=context.prepared.backward_inputs)
    return _joined(sums)


class _Merging:
    """Merges the statistics of micro-batches at a layer, and records them for the running statistics."""

    def __init__(self, statistics: RunningStatistics, ranks: Ranks, device: torch.device) -> None:
        self._statistics = statistics
        self._ranks = ranks
        self._token = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, layer: str, contributed: Sequence[_Contribution]) -> MergedStatistics:
        """Return the statistics of the whole effective batch."""
        parts, running_mean = [part for part, _ in contributed], contributed[0][1]
        total = sum(part.count for part in parts)
        if self._ranks.size == 1 and total == 1:
            message = (
                f"the effective batch has 1 value per channel at the BatchNorm layer with {layer}: a single value has "
                "no variance. Use a larger effective batch."
            )
            raise BatchSizeError(message)
        if running_mean is not None:
            self._statistics.add_parts(running_mean, [part for part in parts if part.count])
        statistics, self._token = merge_statistics(parts, self._ranks, self._token)
        return statistics

    def last_token(self, *, like: Sequence[Tensor]) -> list[Tensor]:
        """Return a zero whose backward runs the sums of all layers over ranks, in order; nothing with one rank."""
        if self._ranks.size == 1:
            return []
        # Not detached: the token's graph gives the collectives of a backward the same order on all ranks.
        token = self._token * 0
        return [token.to(like[0].dtype) if like else token]


def _normalise(call: BatchNormCall, exchange: Exchange[_Contribution, MergedStatistics], *, counts: bool) -> Tensor:
    """Normalise one micro-batch with the merged statistics of all micro-batches."""
    if is_in_checkpoint():
        raise CompositionError(refusal(Feature.NON_REENTRANT, Feature.NORMS_EXACT, {}))
    part = partial_statistics(call.values)
    if not counts:
        # A filler must reach each layer like the others, but must not change the statistics.
        part = PartialStatistics(0, part.mean, part.squares)
    statistics = exchange(f"{call.values.shape[1]} channels, eps={call.eps:g}", (part, call.running_mean))
    return normalise_with(call.values, statistics, call.weight, call.bias, call.eps)


def _without_fillers(micro_batches: list[tuple[MicroBatch, Batch]]) -> list[tuple[MicroBatch, Batch]]:
    """Drop filler micro-batches, but keep one if the rank has no others, since every rank must take part."""
    return [micro_batch for micro_batch in micro_batches if micro_batch[0].unit.weight] or micro_batches[:1]


def _joined(sums: Sequence[Sums]) -> Sums:
    joined = Sums()
    for part in sums:
        joined.contributions += part.contributions
        joined.late_counts += part.late_counts
    return joined


def _hooks(store: HostStore | None) -> AbstractContextManager[object]:
    return nullcontext() if store is None else store.hooks()


class _ThreadState:
    """The current thread's state in torch: gradient mode, dispatch modes, and the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._gradients = torch.is_grad_enabled()
        self._modes = active_dispatch_modes()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the same state in another thread."""
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            with torch.set_grad_enabled(self._gradients), stream:
                yield
