"""Data parallelism from scratch: replicas, buckets, one all-reduce per bucket and step. Written to be read.

Every rank runs its share of the effective batch through its own replica. In the last micro-batch's backward, gradients
become final one after the other, from the last layer to the first. Once all gradients of a bucket are final, its
all-reduce starts and overlaps with the rest of the backward. Each rank waits for all buckets once, before the update.

A rank that runs out of memory, or fails, serves the remaining buckets with zeros and reports it in the last message, in
which all ranks also report the parameters they used. So no rank waits forever, and all leave the effective batch.
"""

from contextlib import AbstractContextManager, nullcontext, suppress

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.errors import UserError
from anybatch.parallel.agreement import StepAbortedError, StepAgreement, StepFailedError
from anybatch.parallel.gradient_buckets import GradientBuffers
from anybatch.parallel.replicas import Initial, align_replicas, layout_of
from anybatch.parallel.strategy import Abort, Capabilities, Prepared, ReductionObserver, Turn, caller_of, trainable
from anybatch.parallel.world import World

_NOTHING = nullcontext()


class BucketSums:
    """Base of the strategies whose replicas sum gradients in buckets; arguments as for `AllReduce`."""

    capabilities: Capabilities

    def __init__(self, bucket_bytes: int, initial: Initial, *, overlap: bool) -> None:
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._initial = initial
        self._world = World()
        self._buffers: GradientBuffers | None = None
        self._full: list[bool] = []
        self._started: list[dist.Work] = []
        self._on_reduction: ReductionObserver | None = None

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Make the replicas equal and put every gradient into a bucket."""
        parameters = trainable(modules)
        differed = align_replicas(modules, world, self._initial)
        self._world = world
        self._on_reduction = on_reduction
        self._buffers = GradientBuffers(list(parameters.values()), bucket_bytes=self._bucket_bytes)
        return Prepared(
            parameters=parameters,
            call=caller_of(model),
            backward_inputs=tuple(parameters.values()),
            differed=differed,
            gradient_buffers=self._buffers.flats,
            layout=layout_of(modules),
            abort=self._make_abort,
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Arm the hooks for the last micro-batch; earlier gradients only accumulate."""
        if turn.last and self._overlap:
            # Unused parameters never trigger their hook: `finish_gradients` starts their buckets.
            self._full = [False] * len(self._gradients.buckets)
            self._gradients.call_when_full(self._bucket_is_final)
        return _NOTHING

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Start the remaining buckets (unused parameters, a rank without samples), then wait for everything once."""
        buffers = self._gradients
        buffers.call_when_full(None)
        numbers, used = self._finish(StepAgreement(numbers, buffers.used, self._world))
        return buffers.gradients(used), numbers

    def place_gradients(self) -> None:
        """Make every `.grad` a view of the buckets."""
        self._gradients.place()

    def clear_gradients(self) -> None:
        """Set the buckets to zero."""
        self._gradients.call_when_full(None)
        self._started.clear()
        self._gradients.clear()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor in the data group."""
        dist.all_reduce(numbers, group=self._world.group)
        return numbers

    def close(self) -> None:
        """Remove the hooks."""
        self._gradients.close()

    def _finish(self, agreement: StepAgreement) -> tuple[Float[Tensor, " numbers"], list[bool]]:
        """Start the remaining buckets and the last message, and wait for all of them."""
        while len(self._started) < len(self._gradients.buckets):
            self._start_next()
        # Start everything before the first wait, for a single round trip.
        agreement.start()
        for work in self._started:
            self._world.wait(work)
        self._started.clear()
        return agreement.wait()

    def _make_abort(self, numbers: Float[Tensor, " numbers"]) -> Abort:
        """Return the function for a rank that cannot continue: it sends the remaining buckets as zeros."""
        agreement = StepAgreement(numbers, self._gradients.used, self._world, aborts=True)

        def abort(*, failed: bool) -> None:
            self._gradients.call_when_full(None)
            self._world.leave_together()
            # Started buckets are sent unchanged: all ranks discard this step's gradients.
            for bucket in self._gradients.buckets[len(self._started) :]:
                bucket.flat.zero_()
            agreement.reset_to_abort(failed=failed)
            with suppress(StepFailedError if failed else StepAbortedError):
                self._finish(agreement)

        return abort

    @property
    def _gradients(self) -> GradientBuffers:
        assert self._buffers is not None, "prepare comes first"
        return self._buffers

    def _bucket_is_final(self, index: int) -> None:
        self._full[index] = True
        # Collectives must start in the same order on every rank, regardless of the order in which gradients become
        # final.
        while len(self._started) < len(self._full) and self._full[len(self._started)]:
            self._start_next()

    def _start_next(self) -> None:
        index = len(self._started)
        flat = self._gradients.buckets[index].flat
        if self._on_reduction is not None:
            self._on_reduction(index, flat.numel() * flat.itemsize, flat.dtype)
        with self._world.collective():
            work = dist.all_reduce(flat, group=self._world.group, async_op=True)
        assert work is not None
        self._started.append(work)


class AllReduce(BucketSums):
    """Replicas whose gradients are summed by bucketed all-reduces, started during the last backward.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        overlap: start a bucket's reduction as soon as its gradients are final. False is the simplest form: reduce after
            the last backward.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
        compression: refused, because only `DDP` supports it.

    Raises:
        UserError: `compression` is set.
    """

    capabilities = Capabilities(name="all_reduce", feature=Feature.ALL_REDUCE, replicas=True, tensor_parallel=True)

    def __init__(
        self,
        *,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        initial: Initial = "broadcast",
        compression: object = None,
    ) -> None:
        if compression is not None:
            message = f"{compression=} is not an option of AllReduce: pass strategies.DDP(compression='bf16')."
            raise UserError(message)
        super().__init__(bucket_bytes, initial, overlap=overlap)
