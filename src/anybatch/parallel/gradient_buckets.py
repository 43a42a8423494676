"""Flat buffers in which gradients accumulate, divided into buckets that can be reduced one by one."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from anybatch.core.tensors import accumulation_dtype, is_low_precision
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.torch_internals import num_storage_users


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients of `parameters` on this rank, in their accumulation dtypes."""
    return sum(local_part(parameter).numel() * accumulation_dtype(parameter).itemsize for parameter in parameters)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat tensor and the indices of the parameters whose gradients are views of it."""

    flat: torch.Tensor
    members: tuple[int, ...]


class GradientBuffers:
    """Flat buffers in which the gradients of `parameters` accumulate over micro-batches.

    From `place` to `clear` the `.grad` of a float32 or float64 parameter is a view of a bucket, so autograd itself adds
    into it. A bf16 or fp16 parameter's gradient is added to its float32 view as soon as autograd has computed it, and
    then freed. At other times a backward does not change the buckets.

    A bucket is closed once it reaches `bucket_bytes`, and a parameter is never split; None: one bucket per device and
    dtype. `used[i]`: whether a backward has computed a gradient for parameter i since the last `clear`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, bucket_bytes: int | None = None) -> None:
        self._parameters = tuple(parameters)
        self._is_low = tuple(is_low_precision(parameter) for parameter in self._parameters)
        self.used = [False] * len(self._parameters)
        self._is_placed = False
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._parameters)
        size = sys.maxsize if bucket_bytes is None else bucket_bytes
        self.buckets = tuple(self._make_bucket(members) for members in bucket_members(parameters, size))
        self._bucket_of = {number: index for index, bucket in enumerate(self.buckets) for number in bucket.members}
        # Number of gradients that each bucket still waits for before `on_bucket` is called.
        self._missing = [0] * len(self.buckets)
        self._on_bucket: Callable[[int], None] | None = None
        # The hooks fire in every micro-batch, not only the last, because a parameter may be used in any of them.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(number))
            for number, parameter in enumerate(self._parameters)
        ]

    @property
    def flats(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers."""
        return tuple(bucket.flat for bucket in self.buckets)

    def call_when_full(self, on_bucket: Callable[[int], None] | None) -> None:
        """Call a function with each bucket's index when all of its gradients have arrived; None stops these calls."""
        self._missing[:] = [len(bucket.members) for bucket in self.buckets]
        self._on_bucket = on_bucket

    def place(self) -> None:
        """Give every parameter its view, replacing `.grad`; gradients accumulate in the buckets from now on."""
        self._is_placed = True
        for parameter, view, low in zip(self._parameters, self._views, self._is_low, strict=True):
            # Autograd adds into an existing `.grad`; a bf16 one would accumulate in bf16.
            parameter.grad = None if low else view

    def clear(self) -> None:
        """Set the buckets to zero and every `.grad` to None."""
        for bucket in self.buckets:
            bucket.flat.zero_()
        self.used[:] = [False] * len(self.used)
        self._is_placed = False
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self, used: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return each parameter's gradient, or None (also as its `.grad`) if no rank has `used` it.

        None, not zero: an optimizer with momentum or weight decay moves a parameter whose gradient is zero.
        """
        for parameter, is_used in zip(self._parameters, used, strict=True):
            if not is_used:
                parameter.grad = None
        return [view if is_used else None for view, is_used in zip(self._views, used, strict=True)]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        """Return a hook for parameter `number`. Autograd passes it the parameter, not the gradient."""
        used, view = self.used, self._views[number]
        bucket, missing = self._bucket_of[number], self._missing

        def mark_used(_: torch.Tensor) -> None:
            # Another engine over the same model, or the user's own loop, may run backwards between our steps.
            if not self._is_placed:
                return
            used[number] = True
            # Counted inline, which saves a call: this runs for every parameter in every micro-batch.
            if self._on_bucket is not None:
                missing[bucket] -= 1
                if not missing[bucket]:
                    self._on_bucket(bucket)

        def add_widened(parameter: torch.Tensor) -> None:
            # Autograd also calls this if a Python function has returned None as the gradient.
            if not self._is_placed or parameter.grad is None:
                return
            view.add_(parameter.grad)
            # Free it now: otherwise autograd would add the next micro-batch's gradient to it in bf16.
            parameter.grad = None
            mark_used(parameter)

        return add_widened if self._is_low[number] else mark_used

    def _make_bucket(self, members: tuple[int, ...]) -> Bucket:
        first = self._parameters[members[0]]
        parts = [self._parameters[number] for number in members]
        total = sum(part.numel() for part in parts)
        flat = torch.zeros(total, dtype=accumulation_dtype(first), device=first.device)
        offset = 0
        for number, part in zip(members, parts, strict=True):
            piece = flat[offset : offset + part.numel()]
            # The view uses the parameter's strides if these are dense (channels-last weights, say), so that autograd
            # adds equal layouts; `empty_like` computes these strides.
            strides = torch.empty_like(part, device="meta").stride()
            self._views[number] = piece.as_strided(part.size(), strides)
            offset += part.numel()
        return Bucket(flat, members)


def bucket_members(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Group parameter indices into buckets of one device and accumulation dtype each.

    Buckets are filled in reverse parameter order, roughly the order in which a backward computes gradients.
    """
    open_buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    open_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    closed: list[tuple[int, ...]] = []
    # Depends on the parameters alone, because all ranks must make the same buckets in the same order.
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        kind = (parameter.device, accumulation_dtype(parameter))
        open_buckets.setdefault(kind, []).append(number)
        open_bytes[kind] = open_bytes.get(kind, 0) + parameter.numel() * kind[1].itemsize
        if open_bytes[kind] >= bucket_bytes:
            closed.append(tuple(open_buckets.pop(kind)))
            del open_bytes[kind]
    return closed + [tuple(members) for members in open_buckets.values()]


_NULL_CONTEXT = nullcontext()


class FirstGradientCopies:
    """Context that copies the first gradient of each parameter, around every micro-batch of a step but the last.

    If `.grad` is None, autograd installs the new gradient without a copy. A captured graph
    (`torch.compile(mode="reduce-overhead")`, `torch.cuda.make_graphed_callables`) returns gradients in static buffers,
    so its next backward would overwrite the accumulated gradient. Later gradients are added in place, and are safe. On
    a CPU, where copying costs as much as a small backward, a gradient is not copied if nothing else uses its memory.

    Before each effective batch, set all gradients to None, and `pending` to `parameters`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        self.parameters = parameters
        self.pending = parameters
        self._around: AbstractContextManager[object] = _NULL_CONTEXT

    def around(self, context: AbstractContextManager[object]) -> "FirstGradientCopies":
        """Return this context, changed to enter and leave `context` too."""
        self._around = context
        return self

    def __enter__(self) -> object:
        return self._around.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._around.__exit__(kind, error, traceback)
        # After the first micro-batch only parameters that no sample has used yet are pending.
        if kind is None and self.pending:
            self.pending = [parameter for parameter in self.pending if not _copy_gradient(parameter)]


def _copy_gradient(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    # Plans run on fake tensors, which nothing overwrites. Copies seldom raise a step's peak: gradients are copied one
    # at a time, after the backward has freed the activations.
    if not hasattr(parameter.grad, "fake_mode") and _may_be_static(parameter.grad):
        parameter.grad = parameter.grad.clone()
    return True


def _may_be_static(gradient: torch.Tensor) -> bool:
    """Return whether something else may write to a gradient's memory.

    Captured CUDA graphs write to addresses, so no reference count shows them. On a CPU, memory that torch did not
    allocate, such as numpy's, is not resizable.
    """
    if gradient.layout is not torch.strided or gradient.device.type != "cpu" or hasattr(gradient, "device_mesh"):
        return True
    storage = gradient.untyped_storage()
    return not storage.resizable() or num_storage_users(storage) != 1
