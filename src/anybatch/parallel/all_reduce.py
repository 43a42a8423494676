"""Data parallelism from scratch: replicas, buckets, one all-reduce per bucket and step. Written to be read.

Every rank runs its share of the effective batch through its own replica. In the last micro-batch's backward, gradients
become final one after the other, from the last layer to the first; as soon as a bucket of them is final its all-reduce
starts and travels while the backward goes on. All buckets are waited for once, before the update.

A rank that runs out of memory, or fails, serves the remaining buckets with zeros and says so in the last message, in
which all ranks say which parameters they have used: so no rank waits for it in vain, and all leave the effective batch.
"""

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.parallel.compressed_sum import CompressedSum, Compression, check_compression, refuse_wide, told
from anybatch.parallel.gradient_buckets import GradientBuffers
from anybatch.parallel.model_groups import layout_of
from anybatch.parallel.replicas import Initial, align_replicas
from anybatch.parallel.step_agreement import StepAbortedError, StepAgreement, StepFailedError
from anybatch.parallel.strategy import Abort, Capabilities, Prepared, ReductionObserver, Turn, caller_of, trainable
from anybatch.parallel.world import World

_NOTHING = nullcontext()


class AllReduce:
    """Replicas whose gradients are summed by bucketed all-reduces, started from within the last backward.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        overlap: start a bucket's reduction as soon as its gradients are final. False is the simplest form: reduce
            after the last backward.
        initial: make replicas equal by broadcasting rank 0's values, or "verify" that they are.
        compression: "bf16" halves what travels: messages in bf16, sums in float32. Gradients are rounded to bf16 twice.

    Raises:
        UserError: an unknown compression.
    """

    capabilities = Capabilities(name="all_reduce", feature=Feature.ALL_REDUCE, replicas=True, tensor_parallel=True)

    def __init__(
        self,
        *,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        initial: Initial = "broadcast",
        compression: Compression = None,
    ) -> None:
        self._compression = check_compression(compression)
        self.capabilities = replace(self.capabilities, compresses=compression is not None)
        self._compressed: list[CompressedSum] = []
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
        """Make the replicas equal and put every gradient into a bucket.

        Raises:
            CompositionError: there are float64 parameters, whose gradients are not compressed.
        """
        parameters = trainable(modules)
        if self._compression:
            refuse_wide(parameters)
        differed = align_replicas(modules, world, self._initial)
        self._world = world
        self._on_reduction = on_reduction
        self._buffers = GradientBuffers(list(parameters.values()), bucket_bytes=self._bucket_bytes)
        if self._compression and world.size > 1:
            self._compressed = [
                CompressedSum(flat, world.rank, world.size, world.group) for flat in self._buffers.flats
            ]
        return Prepared(
            parameters=parameters,
            call=caller_of(model),
            backward_inputs=tuple(parameters.values()),
            differed=differed,
            gradient_buffers=self._buffers.flats,
            layout=layout_of(modules),
            decisions=told(self._compression),
            abort=self._make_abort,
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Arm the hooks for the last micro-batch; gradients of the others only add up."""
        if turn.last and self._overlap:
            # Unused parameters never come: `finish_gradients` starts their buckets.
            self._full = [False] * len(self._gradients.buckets)
            self._gradients.call_when_full(self._bucket_is_final)
        return _NOTHING

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Start what has not been started (unused parameters, a rank with nothing), then wait for everything once."""
        buffers = self._gradients
        buffers.call_when_full(None)
        numbers, used = self._finish(StepAgreement(numbers, buffers.used, self._world))
        return buffers.gradients(used), numbers

    def place_gradients(self) -> None:
        """Give every parameter its place in the buckets."""
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
        """Start every bucket that is left and the last message, and wait for all of them."""
        while len(self._started) < len(self._gradients.buckets):
            self._start_next()
        # All is on its way before the first is waited for, which makes one round trip of it.
        agreement.start()
        for work in self._started:
            self._world.wait(work)
        self._started.clear()
        self._gather_compressed()
        return agreement.wait()

    def _gather_compressed(self) -> None:
        """Send the sums that this rank owns to all. Behind all other collectives, in the same order on every rank."""
        works = []
        for index, one in enumerate(self._compressed):
            with self._world.collective():
                works.append(one.gather(self._on_reduction, index))
        for one, work in zip(self._compressed, works, strict=True):
            self._world.wait(work)
            one.finish()

    def _make_abort(self, numbers: Float[Tensor, " numbers"]) -> Abort:
        """Return what a rank calls that cannot go on: buckets that have not been sent yet travel as zeros."""
        agreement = StepAgreement(numbers, self._gradients.used, self._world, aborts=True)

        def abort(*, failed: bool) -> None:
            self._gradients.call_when_full(None)
            self._world.leave_together()
            # Buckets that have started travel as they are: all ranks throw this step's gradients away.
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
        # Collectives must start in the same order on every rank, whatever order gradients become final in.
        while len(self._started) < len(self._full) and self._full[len(self._started)]:
            self._start_next()

    def _start_next(self) -> None:
        index = len(self._started)
        flat = self._gradients.buckets[index].flat
        if self._compressed:
            with self._world.collective():
                self._started.append(self._compressed[index].start(self._on_reduction, index))
            return
        if self._on_reduction is not None:
            self._on_reduction(index, flat.numel() * flat.itemsize, flat.dtype)
        with self._world.collective():
            work = dist.all_reduce(flat, group=self._world.group, async_op=True)
        assert work is not None
        self._started.append(work)
