"""Means of the BatchNorm policies: intercepted layers, cooperative threads, checkpointed blocks, offloaded tensors."""

import contextvars
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from anybatch.core.torch_internals import BatchNormBase, checkpointed_forward, num_changes, storage_key
from anybatch.errors import CompositionError, ParameterError


@dataclass(frozen=True, slots=True)
class BatchNormCall:
    """One call of `F.batch_norm` that normalises `values`, (samples, channels, ...), by their own statistics.

    The buffer `running_mean` identifies the layer; None for a layer without running statistics.
    """

    values: Tensor
    running_mean: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float


Normalise = Callable[[BatchNormCall], Tensor]


class Interceptor:
    """Replaces the normalisation of BatchNorm layers in train mode by another function, while one is set.

    The rest of a layer's forward, a fused activation, say, runs as before. Hooks enter the context around each layer
    only. So it costs nothing elsewhere, and is active in any thread that runs the layer, even if a backward recomputes
    a checkpointed block. Compiled layers are not intercepted.
    """

    def __init__(self, layers: Iterable[BatchNormBase]) -> None:
        self._everywhere: Normalise | None = None
        self._thread = threading.local()
        self._handles = [
            handle
            for layer in layers
            for handle in (
                layer.register_forward_pre_hook(self._enter),
                # Always: after an error in the layer the mode would stay active, and intercept calls of later layers.
                layer.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def everywhere(self, normalise: Normalise | None) -> Iterator[None]:
        """Use a function in all threads; with None layers normalise as usual."""
        self._everywhere = normalise
        try:
            yield
        finally:
            self._everywhere = None

    @contextmanager
    def in_this_thread(self, normalise: Normalise) -> Iterator[None]:
        """Use a function in this thread only."""
        self._thread.normalise = normalise
        try:
            yield
        finally:
            self._thread.normalise = None

    def _enter(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        del args
        normalise = getattr(self._thread, "normalise", None) or self._everywhere
        if normalise is None or not layer.training:
            return
        self._thread.mode = _InsteadOfBatchNorm(normalise)
        # Manually, because a `with` block cannot span two hooks.
        self._thread.mode.__enter__()

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del layer, args, output
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.__exit__(None, None, None)


class _InsteadOfBatchNorm(TorchFunctionMode):
    """A context that replaces `F.batch_norm`."""

    def __init__(self, normalise: Normalise) -> None:
        super().__init__()
        self._normalise = normalise

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the result of torch's function)
        """Run a function of torch, or our replacement of `F.batch_norm`."""
        del types
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(  # noqa: PLR0917 (torch's signature)
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            # No recursion: a mode is off while it handles a function.
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        # Like torch's kernel, whose input autocast does not convert.
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(BatchNormCall(input, running_mean, weight, bias, eps))


C = TypeVar("C")  # a task's contribution to an exchange
V = TypeVar("V")  # the combined value for all tasks
R = TypeVar("R")  # a task's result
Exchange = Callable[[str, C], V]
"""Called by a task with the name of the exchange and its contribution; blocks until all tasks have called it, and
returns the combined value."""


class CooperativeThreads(Generic[C, V, R]):
    """Runs tasks in threads, exactly one at a time, and switches only when a task waits for the others.

    A task runs until it calls its exchange or returns; then the next task runs. Once all have contributed, their
    contributions are combined, and the tasks continue in the same order. So the order of execution is deterministic,
    and data shared by the tasks needs no lock.

    Threads, not generators: a task is a forward through the user's model, which has to be suspended inside nested
    calls.
    """

    def __init__(
        self,
        combine: Callable[[str, Sequence[C]], V],
        while_waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._combine = combine
        self._while_waiting = while_waiting
        self._turns: list[threading.Semaphore] = []
        self._waiting: dict[int, tuple[str, C]] = {}
        self._finished: set[int] = set()
        self._num_exchanges = 0
        self._combined: Any = None
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[Callable[[Exchange[C, V]], R]]) -> list[R]:
        """Run all tasks to their end and return their results, in their order.

        Raises:
            CompositionError: tasks do not call the same exchanges in the same order.
            BaseException: the exception of a task; all other tasks have been cancelled.
        """
        self._turns = [threading.Semaphore(0) for _ in tasks]
        threads = [
            threading.Thread(
                # A thread starts with empty context variables, and the model may read the caller's.
                target=contextvars.copy_context().run,
                args=(self._serve, number, task),
                name=f"anybatch micro-batch {number}",
            )
            for number, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        try:
            self._turns[0].release()
            for thread in threads:
                thread.join()
        except BaseException as error:  # a keyboard interrupt, say, while the threads run
            self._cancel(error)
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(tasks))]

    def _serve(self, number: int, task: Callable[[Exchange[C, V]], R]) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            return
        try:
            self._results[number] = task(lambda name, contribution: self._exchange(number, name, contribution))
            self._finished.add(number)
            self._pass_turn()
        # Another task has failed, and `run` raises its error.
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            self._cancel(error)

    def _exchange(self, number: int, name: str, contribution: C) -> V:
        self._waiting[number] = (name, contribution)
        with self._while_waiting():
            self._pass_turn()
            self._turns[number].acquire()
        if self._error is not None:
            raise _CancelledError
        combined: V = self._combined
        return combined

    def _pass_turn(self) -> None:
        """Run the next task that has not contributed yet; after the last one combine, and start over."""
        remaining = [n for n in range(len(self._turns)) if n not in self._waiting and n not in self._finished]
        if remaining:
            self._turns[remaining[0]].release()
        elif self._waiting:
            self._check_same_exchange()
            self._num_exchanges += 1
            name = self._waiting[0][0]
            self._combined = self._combine(name, [self._waiting[n][1] for n in range(len(self._turns))])
            self._waiting.clear()
            self._turns[0].release()

    def _check_same_exchange(self) -> None:
        """Refuse tasks that have finished, or wait at another exchange, while the first one waits."""
        places = {
            number: repr(self._waiting[number][0]) if number in self._waiting else "its end"
            for number in range(len(self._turns))
        }
        first = next(iter(self._waiting))
        other = next((number for number, place in places.items() if place != places[first]), None)
        if other is None:
            return
        message = (
            f"micro-batches do not reach the same BatchNorm layers: after {self._num_exchanges} of them micro-batch "
            f"{first} is at {places[first]} and micro-batch {other} at {places[other]}. Exact normalisation needs the "
            "same layers in the same order for each micro-batch: make the model's path independent of the samples, or "
            "use norms=Ghost(group_size=...)."
        )
        raise CompositionError(message, code="different_layers")

    def _cancel(self, error: BaseException) -> None:
        # Wake every thread, which sees the error and ends: none may be left waiting.
        self._error = self._error or error
        for turn in self._turns:
            turn.release()


class _CancelledError(BaseException):
    """Ends a task because another one has failed. Not an Exception, so that a model's `except Exception` misses it."""


def blocks_of(modules: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks to checkpoint by name; None selects the outermost non-root modules with a BatchNorm child."""
    named = dict(modules.named_modules())
    if names is not None:
        unknown = [name for name in names if name not in named]
        if unknown:
            message = f"blocks={names!r} names {unknown[0]!r}, which is not a module of the model. See named_modules()."
            raise ParameterError(message)
        return {name: named[name] for name in names}
    models = {modules, *(modules.children() if isinstance(modules, nn.ModuleDict) else ())}
    found: dict[str, nn.Module] = {}
    for name, module in named.items():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if module not in models and not inside and any(isinstance(child, BatchNormBase) for child in module.children()):
            found[name] = module
    return found


class BlockCheckpoint:
    """Checkpoints one module in train mode with `torch.utils.checkpoint`'s own code for use_reentrant=False.

    The module is neither wrapped nor patched, so its name and its parameters' names stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._running: list[Generator[None, None, None]] = []
        self._recomputing = False
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, prepend=True, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Recomputation in the backward also runs the hooks, but must not checkpoint the block again.
        if self._recomputing or not module.training:
            return
        running = checkpointed_forward(module, self._contexts, args, kwargs)
        next(running)
        self._running.append(running)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Let the block run again in the backward without another checkpoint."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if not self._recomputing and self._running:
            # Run the generator to its end; the default suppresses StopIteration.
            next(self._running.pop(), None)


_SMALL_BYTES = 1 << 14  # copying less is not worth the time
_Key = tuple[object, ...]


class HostStore:
    """Saved-tensor hooks that move tensors to the host, and back when the backward needs them.

    A tensor that several operations save is copied once, unless it changes in between; and it is copied back once for
    all operations that need it while one of them still holds it.
    """

    def __init__(self, kept_on_device: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._kept_on_device = {storage_key(tensor.untyped_storage()) for tensor in kept_on_device}
        self._copies: dict[_Key, tuple[StorageWeakRef, weakref.ref[_HostCopy]]] = {}

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context of a forward whose saved tensors go to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _HostCopy":
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.itemsize
        # An expanded tensor occupies less memory than its copy would.
        owner = storage_key(storage)
        if num_bytes < _SMALL_BYTES or num_bytes > storage.nbytes() or owner in self._kept_on_device:
            return tensor
        place = (owner, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        key = (*place, tensor.dtype, *num_changes((tensor,), "Exact(offload=True)"))
        known = self._copies.get(key)
        copy = None if known is None or known[0].expired() else known[1]()
        if copy is None:
            copy = _HostCopy(tensor)
            self.num_bytes += num_bytes
            # The reference prevents reuse of the address by another storage while the key is in use.
            self._copies[key] = (StorageWeakRef(storage), weakref.ref(copy))
        return copy


class _HostCopy:
    """A tensor's values on the host, and a weak reference to its latest copy on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: weakref.ref[Tensor] | None = None
        # Pinned, so that the copy can overlap with computation on the device.
        self._values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._values.copy_(tensor, non_blocking=True)

    def on_device(self) -> Tensor:
        known = None if self._back is None else self._back()
        if known is None:
            known = torch.empty_like(self._values, device=self._device, pin_memory=False)
            known.copy_(self._values, non_blocking=True)
            self._back = weakref.ref(known)
        return known


def _unpack(packed: "Tensor | _HostCopy") -> Tensor:
    return packed.on_device() if isinstance(packed, _HostCopy) else packed
