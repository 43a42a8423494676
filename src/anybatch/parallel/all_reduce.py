"""Data parallelism without DDP: replicas, buckets, and one all-reduce per bucket and step.

Every rank runs its share of the effective batch through its own replica. In the last micro-batch's backward, gradients
become final one after the other, from the last layer to the first. Once all gradients of a bucket are final, its
all-reduce starts and overlaps with the rest of the backward. Each rank waits for all buckets once, before the update.

A rank that runs out of memory contributes zeros to the remaining buckets and reports the error in the last message, in
which all ranks also report the parameters they used. So no rank waits forever, and all ranks abort the step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.parallel.agreement import StepAbortedError, StepAgreement
from anybatch.parallel.gradient_buckets import GradientBuffers
from anybatch.parallel.replicas import Initial, align_replicas
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionNotifier, Turn, caller_of, trainable
from anybatch.parallel.world import World

_NULL_CONTEXT = nullcontext()


class BucketSums:
    """Base of the strategies whose replicas sum gradients in buckets; arguments as for `AllReduce`."""

    capabilities: Capabilities

    def __init__(self, bucket_bytes: int, initial: Initial, *, overlap: bool) -> None:
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._initial = initial
        self._world = World()
        self._gradients = GradientBuffers(())
        self._is_full: list[bool] = []
        self._started: list[dist.Work] = []
        self._notifier: ReductionNotifier | None = None

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Make the replicas equal and put every gradient into a bucket."""
        parameters = trainable(modules)
        differed = align_replicas(modules, world, self._initial)
        self._world, self._notifier = world, notifier
        self._gradients = GradientBuffers(list(parameters.values()), bucket_bytes=self._bucket_bytes)
        return Prepared(
            parameters=parameters,
            call=caller_of(model),
            backward_inputs=tuple(parameters.values()),
            differed=differed,
            gradient_buffers=self._gradients.flats,
            abort=self._make_abort,
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Enable the hooks for the last micro-batch; earlier gradients only accumulate."""
        if turn.last and self._overlap:
            # Unused parameters never trigger their hook: `finish_gradients` starts their buckets.
            self._is_full = [False] * len(self._gradients.buckets)
            self._gradients.call_when_full(self._bucket_is_final)
        return _NULL_CONTEXT

    def finish_gradients(
        self, report_sums: Float[Tensor, " sums"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " sums"]]:
        """Start the buckets that hooks have not started (parameters without a gradient), then wait once for all."""
        buffers = self._gradients
        buffers.call_when_full(None)
        report_sums, used = self._finish(StepAgreement(report_sums, buffers.used, self._world))
        return buffers.gradients(used), report_sums

    def place_gradients(self) -> None:
        """Make every `.grad` a view of the buckets."""
        self._gradients.place()

    def clear_gradients(self) -> None:
        """Set the buckets to zero."""
        self._gradients.call_when_full(None)
        if self._started and self._world.call_tracker is not None:  # after an error: other ranks may wait in these
            self._world.call_tracker.abandon()
        self._started.clear()
        self._gradients.clear()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor in the default group."""
        dist.all_reduce(numbers)
        return numbers

    def close(self) -> None:
        """Remove the hooks."""
        self._gradients.close()

    def _finish(self, agreement: StepAgreement) -> tuple[Float[Tensor, " sums"], list[bool]]:
        """Start the remaining buckets and the last message, and wait for all of them."""
        while len(self._started) < len(self._gradients.buckets):
            self._start_next()
        # Start everything before the first wait, for a single round trip.
        agreement.start()
        for work in self._started:
            self._world.wait(work)
        self._started.clear()
        return agreement.wait()

    def _make_abort(self, report_sums: Float[Tensor, " sums"]) -> Callable[[], None]:
        """Return the function that a rank calls if it cannot continue; it sends the remaining buckets as zeros."""
        agreement = StepAgreement(report_sums, self._gradients.used, self._world)

        def abort() -> None:
            self._gradients.call_when_full(None)
            # Started buckets are sent unchanged: all ranks discard this step's gradients.
            for bucket in self._gradients.buckets[len(self._started) :]:
                bucket.flat.zero_()
            agreement.reset_to_abort()
            with suppress(StepAbortedError):
                self._finish(agreement)

        return abort

    def _bucket_is_final(self, index: int) -> None:
        self._is_full[index] = True
        # Collectives must start in the same order on every rank, regardless of the order in which gradients become
        # final.
        while len(self._started) < len(self._is_full) and self._is_full[len(self._started)]:
            self._start_next()

    def _start_next(self) -> None:
        index = len(self._started)
        flat = self._gradients.buckets[index].flat
        if self._notifier is not None and self._notifier.observers:
            self._notifier.reduction(index, flat.numel() * flat.itemsize, flat.dtype)
        with self._world.collective():
            work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._started.append(work)


class AllReduce(BucketSums):
    """Replicas whose gradients are summed by bucketed all-reduces, started during the last backward.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        overlap: start a bucket's reduction as soon as its gradients are final. False: reduce after the last backward.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
    """

    capabilities = Capabilities(name="all_reduce", feature=Feature.ALL_REDUCE, replicas=True)

    def __init__(
        self,
        *,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        initial: Initial = "broadcast",
    ) -> None:
        super().__init__(bucket_bytes, initial, overlap=overlap)
