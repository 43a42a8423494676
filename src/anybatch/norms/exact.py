"""Tools for BatchNorm policies: intercept layers, run cooperative threads, checkpoint blocks, offload saved tensors."""

import contextvars
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

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
    """The arguments of a call of `F.batch_norm` in train mode; `values` has the shape (samples, channels, ...).

    `running_mean` is the layer's buffer, which identifies the layer; None for a layer without running statistics.
    """

    values: Tensor
    running_mean: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float


Normalise = Callable[[BatchNormCall], Tensor]


class Interceptor:
    """Replaces `F.batch_norm` in the BatchNorm layers of a model in train mode, while a replacement is set.

    Other code in a layer's forward, such as a fused activation, runs unchanged. Forward hooks switch the replacement on
    before each layer and off after it, so it costs nothing outside these layers, and also works in other threads and
    when a backward recomputes a checkpointed block. Compiled layers are not intercepted.
    """

    def __init__(self, layers: Iterable[BatchNormBase]) -> None:
        self._everywhere: Normalise | None = None
        self._thread = threading.local()
        self._handles = [
            handle
            for layer in layers
            for handle in (
                layer.register_forward_pre_hook(self._enter),
                # `always_call`, because otherwise the replacement would stay active after an error in the layer.
                layer.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def in_all_threads(self, normalise: Normalise | None) -> Iterator[None]:
        """Return a context in which all threads use `normalise`; with None, layers normalise as usual."""
        self._everywhere = normalise
        try:
            yield
        finally:
            self._everywhere = None

    @contextmanager
    def in_this_thread(self, normalise: Normalise) -> Iterator[None]:
        """Return a context in which only this thread uses `normalise`."""
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
        self._thread.mode = BatchNormReplacement(normalise)
        # Enter the context manually, because a `with` block cannot span two hooks.
        self._thread.mode.__enter__()

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del layer, args, output
        mode = getattr(self._thread, "mode", None)
        if mode is not None:
            self._thread.mode = None
            mode.__exit__(None, None, None)


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
"""The parameters of `F.batch_norm`."""


class BatchNormReplacement(TorchFunctionMode):
    """A context in which `normalise` replaces `F.batch_norm` for calls in train mode."""

    def __init__(self, normalise: Normalise) -> None:
        super().__init__()
        self._normalise = normalise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run a function of torch, or the replacement for `F.batch_norm` in train mode."""
        named = dict(zip(_BATCH_NORM, args, strict=False)) | (kwargs or {}) if func is F.batch_norm else {}
        if not named.get("training"):
            return func(*args, **(kwargs or {}))
        running_mean, weight, bias = (named.get(name) for name in ("running_mean", "weight", "bias"))
        call = BatchNormCall(named["input"], running_mean, weight, bias, named.get("eps", 1e-5))
        # Autocast is disabled, because it does not convert the input of torch's batch_norm either.
        with torch.autocast(call.values.device.type, enabled=False):
            return self._normalise(call)


Exchange = Callable[[str, Any], Any]
"""Called by a task with the name of the exchange and its contribution; blocks until all tasks have called it, and
returns the combined value."""


class CooperativeThreads:
    """Runs tasks in threads, one at a time, and switches only when a task waits for a result of all tasks.

    A task runs until it calls its exchange function or returns; then the next task runs. After all tasks have
    contributed to an exchange, their contributions are combined, and the tasks continue in the same order. So the order
    of execution is deterministic, and data that tasks share needs no lock.

    Generators cannot be used: a task is a forward of the user's model, which has to be suspended inside nested calls.
    """

    def __init__(
        self,
        combine: Callable[[str, Sequence[Any]], Any],
        while_waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._combine = combine
        self._while_waiting = while_waiting
        self._turns: list[threading.Semaphore] = []
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._combined: Any = None
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[Callable[[Exchange], Any]]) -> list[Any]:
        """Run all tasks to their end and return their results, in the order of the tasks."""
        self._turns = [threading.Semaphore(0) for _ in tasks]
        threads = [
            threading.Thread(
                # The model may read context variables of the caller, but a thread starts without them.
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
        except BaseException as error:  # such as a keyboard interrupt
            self._cancel(error)
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(tasks))]

    def _serve(self, number: int, task: Callable[[Exchange], Any]) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            return
        try:
            self._results[number] = task(lambda name, contribution: self._exchange(number, name, contribution))
            self._pass_turn()
        # Another task has failed, and `run` raises that task's error.
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            self._cancel(error)

    def _exchange(self, number: int, name: str, contribution: Any) -> Any:  # noqa: ANN401 (the caller's)
        self._waiting[number] = (name, contribution)
        with self._while_waiting():
            self._pass_turn()
            self._turns[number].acquire()
        if self._error is not None:
            raise _CancelledError
        return self._combined

    def _pass_turn(self) -> None:
        """Run the next task that has not contributed yet; if all have, combine the contributions and start over."""
        remaining = [n for n in range(len(self._turns)) if n not in self._waiting and n not in self._results]
        if remaining:
            self._turns[remaining[0]].release()
        elif self._waiting:
            names = {self._waiting[n][0] if n in self._waiting else "no further layer" for n in range(len(self._turns))}
            if len(names) > 1:
                message = (
                    f"micro-batches reached different BatchNorm layers: {'; '.join(sorted(names))}. Exact "
                    "normalisation needs the same layers in the same order for each micro-batch: make the model's "
                    "path independent of the samples, or use norms=Ghost(group_size=...)."
                )
                raise CompositionError(message, code="different_layers")
            contributions = [self._waiting[n][1] for n in range(len(self._turns))]
            self._combined = self._combine(names.pop(), contributions)
            self._waiting.clear()
            self._turns[0].release()

    def _cancel(self, error: BaseException) -> None:
        # Wake up every thread, so that it ends.
        self._error = self._error or error
        for turn in self._turns:
            turn.release()


class _CancelledError(BaseException):
    """Ends a task after another task has failed. It is a BaseException, so `except Exception` does not catch it."""


def blocks_of(modules: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules to checkpoint; for None, the outermost modules (without the model) with a BatchNorm child."""
    named = dict(modules.named_modules())
    if names is not None:
        unknown = [name for name in names if name not in named]
        if unknown:
            message = f"blocks={names!r} contains {unknown[0]!r}, which is not a module: see model.named_modules()."
            raise ParameterError(message)
        return {name: named[name] for name in names}
    models = {modules, *(modules.children() if isinstance(modules, nn.ModuleDict) else ())}
    blocks: dict[str, nn.Module] = {}
    for name, module in named.items():
        nested = any(name.startswith(f"{outer}.") for outer in blocks)
        if module not in models and not nested and any(isinstance(child, BatchNormBase) for child in module.children()):
            blocks[name] = module
    return blocks


class BlockCheckpoint:
    """Runs one module under activation checkpointing in train mode, as torch does with use_reentrant=False.

    It uses hooks, and neither wraps nor patches the module, so module and parameters keep their names.
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
        # The recomputation in the backward also runs the hooks, but must not checkpoint the block again.
        if self._recomputing or not module.training:
            return
        running = checkpointed_forward(module, self._contexts, args, kwargs)
        next(running)
        self._running.append(running)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Return a context for the recomputation in the backward, in which the block is not checkpointed again."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del module, args, output
        if not self._recomputing and self._running:
            # Advance the generator to its end; with the default None, `next` does not raise StopIteration.
            next(self._running.pop(), None)


_SMALL_BYTES = 1 << 14  # smaller tensors stay on the device, because moving them saves too little memory
_Key = tuple[object, ...]


class HostStore:
    """Saved-tensor hooks that move tensors to the host, and back to the device when the backward needs them.

    A tensor that several operations save is copied to the host once, unless it changes in between. Several operations
    also share one copy on the device, as long as it is alive.
    """

    def __init__(self, kept_on_device: Iterable[Tensor]) -> None:
        self.num_bytes = 0
        self._kept_on_device = {storage_key(tensor.untyped_storage()) for tensor in kept_on_device}
        self._copies: dict[_Key, tuple[StorageWeakRef, weakref.ref[_HostCopy]]] = {}

    def hooks(self) -> AbstractContextManager[object]:
        """Return a context for a forward in which saved tensors are moved to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _HostCopy":
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.itemsize
        # An expanded tensor occupies less memory than its copy would.
        owner = storage_key(storage)
        if num_bytes < _SMALL_BYTES or num_bytes > storage.nbytes() or owner in self._kept_on_device:
            return tensor
        view = (owner, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        key = (*view, tensor.dtype, *num_changes((tensor,), "Exact(offload=True)"))
        known = self._copies.get(key)
        copy = None if known is None or known[0].expired() else known[1]()
        if copy is None:
            copy = _HostCopy(tensor)
            self.num_bytes += num_bytes
            # The weak reference prevents another storage from getting this address while the key is in use.
            self._copies[key] = (StorageWeakRef(storage), weakref.ref(copy))
        return copy


class _HostCopy:
    """A tensor's values on the host, and a weak reference to the latest copy on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._device_copy: weakref.ref[Tensor] | None = None
        # Pinned, so that the copy can overlap with computation on the device.
        self._values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        self._values.copy_(tensor, non_blocking=True)

    def on_device(self) -> Tensor:
        copy = None if self._device_copy is None else self._device_copy()
        if copy is None:
            copy = torch.empty_like(self._values, device=self._device, pin_memory=False)
            copy.copy_(self._values, non_blocking=True)
            self._device_copy = weakref.ref(copy)
        return copy


def _unpack(packed: "Tensor | _HostCopy") -> Tensor:
    return packed.on_device() if isinstance(packed, _HostCopy) else packed
