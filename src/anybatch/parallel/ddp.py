"""Strategy "ddp": torch's DistributedDataParallel, with gradients summed instead of averaged."""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.compatibility import Feature
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tree import Batch
from anybatch.errors import CannotRedoError, CompositionError, UserError, WorldError
from anybatch.parallel.agreement import StepAbortedError, StepAgreement
from anybatch.parallel.call_tracker import CallTracker
from anybatch.parallel.gradient_buckets import FirstGradientCopies
from anybatch.parallel.replicas import Initial, align_replicas
from anybatch.parallel.strategy import (
    Capabilities,
    LossCaller,
    Prepared,
    ReductionNotifier,
    Turn,
    trainable,
)
from anybatch.parallel.torch_internals import GradBucket
from anybatch.parallel.world import World

Compression = Literal["bf16"] | None
# Renamed in torch 2.13, where the old name warns.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class DDP:
    """Replicas whose gradients torch's DDP reduces, with a hook that sums instead of averaging.

    The loss function is called *inside* DDP's forward and receives the user's own model, so the gradients of all its
    methods, such as `model.encode`, are reduced. If it received the DDP wrapper, `wrapper.module.encode` would train
    with unreduced gradients, without an error.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        find_unused_parameters: search for parameters that a micro-batch does not use. False is faster, and correct only
            if every micro-batch of every rank uses every parameter.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
        gradient_as_bucket_view: gradients are views of the buckets until the update, which avoids a copy.
        compression: "bf16" halves the traffic: an all-reduce in bf16, like torch's `bf16_compress_hook`, which rounds
            each gradient once per rank.

    Raises:
        UserError: an unknown compression.
    """

    capabilities = Capabilities(
        name="ddp", feature=Feature.DDP, float32_accumulation=False, replicas=True, prepares_in_forward=True
    )

    def __init__(
        self,
        *,
        bucket_bytes: int = 25 * 2**20,
        find_unused_parameters: bool = True,
        initial: Initial = "broadcast",
        gradient_as_bucket_view: bool = False,
        compression: Compression = None,
    ) -> None:
        self._gradient_as_bucket_view = gradient_as_bucket_view
        if compression not in ("bf16", None):
            message = f"{compression=} must be 'bf16' (an all-reduce in bf16) or None."
            raise UserError(message)
        self._compression = compression
        self.capabilities = replace(self.capabilities, compresses=compression is not None)
        self._bucket_bytes = bucket_bytes
        self._find_unused_parameters = find_unused_parameters
        self._initial = initial
        self._wrapper: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._first_copies = FirstGradientCopies()
        self._reduced = False
        self._prepared = False
        self._world = World()
        self._reductions = _Reductions(lambda: None, None)

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Make the replicas equal and wrap the model in DDP; refuse float64 gradients under compression."""
        parameters = trainable(modules)
        if self._compression:
            _check_no_float64(parameters)
        differed = align_replicas(modules, world, self._initial)
        self._parameters = list(parameters.values())
        self._first_copies = FirstGradientCopies(self._parameters)
        self._world = world
        self._reductions = _Reductions(weakref.ref(notifier), world.call_tracker, self._compression)
        self._wrapper = DistributedDataParallel(
            LossCaller(modules, model),
            # `align_replicas` has synchronised the replicas, and reports the tensors that differed
            init_sync=False,
            **_NO_BUFFER_SYNC,
            bucket_cap_mb=max(1, self._bucket_bytes // 2**20),
            find_unused_parameters=self._find_unused_parameters,
            gradient_as_bucket_view=self._gradient_as_bucket_view,
        )
        self._wrapper.register_comm_hook(self._reductions, _sum_bucket)
        return Prepared(
            parameters=parameters,
            call=self._call,
            backward_inputs=tuple(self._parameters),
            differed=differed,
            decisions={"compression": "gradients are summed in bf16, rounded to 2**-9 once per rank"}
            if self._compression
            else {},
            abort=self._make_abort,
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return `no_sync` for all but the last micro-batch; it covers the forward too, as DDP requires."""
        self._reduced = turn.last
        if turn.last:
            return self._reducing()
        assert self._wrapper is not None
        return self._first_copies.around(self._wrapper.no_sync())

    def finish_gradients(
        self, report_sums: Float[Tensor, " sums"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " sums"]]:
        """Return the gradients reduced by DDP; a rank without samples joins with zeros first."""
        if not self._reduced:
            self._join_with_zeros()
        # No flags of used parameters are needed: DDP leaves `.grad` at None for a parameter that no rank has used.
        agreement = StepAgreement(report_sums, (), self._world)
        agreement.start()
        report_sums, _ = agreement.wait()
        return [parameter.grad for parameter in self._parameters], report_sums

    def place_gradients(self) -> None:
        """Set every `.grad` to None; DDP writes the reduced gradients to it."""
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None."""
        self._reduced = self._prepared = False
        self._first_copies.pending = self._first_copies.parameters
        for parameter in self._parameters:
            parameter.grad = None

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor in the default group."""
        dist.all_reduce(numbers)
        return numbers

    def close(self) -> None:
        """Drop the wrapper and its hooks."""
        self._wrapper = None

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """If a failed reduction broke a backward, convert the error into the error of the failed rank."""
        try:
            yield
        except RuntimeError as error:
            if self._reductions.error is not None:
                raise self._reductions.error from None
            if self._reductions.broken and self._world.call_tracker is not None:
                raise self._world.call_tracker.cause_of(error) from error
            raise
        finally:
            self._reductions.error = None
            self._reductions.started.clear()

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        assert self._wrapper is not None
        output = self._wrapper(lambda model: function(model, batch))
        self._prepared = self._reduced  # the forward has prepared a reduction, which only its backward can finish
        return output

    def _make_abort(self, report_sums: Float[Tensor, " sums"]) -> Callable[[], None]:
        """Return the function that a rank calls if it cannot continue; it sends zeros if no reduction is prepared.

        DDP cannot end a reduction whose backward has failed: its reducer refuses the next reduction, and does not
        report the remaining buckets.
        """
        agreement = StepAgreement(report_sums, (), self._world)

        def abort() -> None:
            if self._prepared:
                message = (
                    "strategy 'ddp' cannot abort the backward in which gradients are reduced, in a rank's last "
                    "micro-batch (strategy='all_reduce' can)"
                )
                raise CannotRedoError(message, rank=self._world.rank)
            agreement.reset_to_abort()
            self._reduced = True
            self._join_with_zeros()
            agreement.start()
            with suppress(StepAbortedError):
                agreement.wait()

        return abort

    def _join_with_zeros(self) -> None:
        # With the search for unused parameters, one parameter triggers the reduction, and other parameters stay unused;
        # without the search, DDP waits for every parameter.
        touched = self._parameters[:1] if self._find_unused_parameters else self._parameters
        zeros = self._call(lambda _model, _batch: sum((p.reshape(-1)[:1] * 0).sum() for p in touched), None)
        zeros.backward()


@dataclass(slots=True)
class _Reductions:
    """The notifier of reductions, and the error of a failed reduction: DDP does not preserve exception types.

    DDP's reducer hides this object from the garbage collector, so it must not reference a world, whose process group
    would stay alive.
    """

    notifier: Callable[[], ReductionNotifier | None]
    call_tracker: CallTracker | None
    compression: Compression = None
    broken: bool = False
    error: WorldError | None = None
    started: "list[tuple[dist.Work, Callable[[], Tensor], torch.futures.Future[Tensor]]]" = field(default_factory=list)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective; on a CPU also check for ranks that will not join in."""
        if self.call_tracker is None:
            work.wait()
            return
        try:
            self.call_tracker.wait(work)
        except WorldError as error:
            self.error = error
            raise

    def finish_later(
        self, work: dist.Work, finish: Callable[[], Tensor], *, is_last: bool
    ) -> "torch.futures.Future[Tensor]":
        """Return a future that this thread completes after the last bucket of the backward has started.

        A callback would run in a gloo thread: if the collective fails while the interpreter exits, that thread cannot
        acquire the interpreter's lock, and aborts the process. DDP would wait for the buckets next anyway, but without
        checking for ranks that will not join in.
        """
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.started.append((work, finish, future))
        if is_last:
            started, self.started = self.started, []
            for pending, finish_bucket, result in started:
                self.wait(pending)
                result.set_result(finish_bucket())
        return future


def _sum_bucket(reductions: _Reductions, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    def finish() -> Tensor:
        return flat if sent is flat else flat.copy_(sent)  # summed in place

    def summed(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            # Only to raise its error: the sum is in the bucket.
            future.value()
        except RuntimeError:
            reductions.broken = True
            raise
        return finish()

    flat = bucket.buffer()
    notifier, on_cpu = reductions.notifier(), flat.device.type == "cpu"
    sent = flat.bfloat16() if reductions.compression and dist.get_world_size() > 1 else flat
    # DDP's default hook would divide by the number of ranks; the engine divides once, by the whole batch's items.
    if notifier is not None and notifier.observers:
        notifier.reduction(bucket.index(), sent.numel() * sent.itemsize, sent.dtype)
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    if on_cpu:
        return reductions.finish_later(work, finish, is_last=bucket.is_last())
    # On an accelerator, this does not block the host: it only orders later work after the collective.
    result: torch.futures.Future[torch.Tensor] = work.get_future().then(summed)
    return result


def _check_no_float64(parameters: dict[str, nn.Parameter]) -> None:
    """Raise a `CompositionError` for float64 gradients, which a bf16 message would round to 8 significant bits."""
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            message = (
                f"compression='bf16' does not support float64 parameters ({name!r} is one): their gradients have 53 "
                "significant bits, and a message in bf16 keeps 8 of them. Leave compression out, or use float32 "
                "parameters."
            )
            raise CompositionError(message)
