"""Watches a loop while it runs, by torch's own hooks: nothing of the loop, of torch or of the user is replaced."""

import ctypes
import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.diagnostics.loop_check.loop_trace import Backward, Forward, LoopTrace, OptimizerStep
from anybatch.parallel.torch_internals import GradBucket

MAX_FORWARDS = 200
"""A loop that makes more forwards than this on 31 samples, and no pass after pass over them, does not end."""


class LoopStopped(BaseException):
    """Ends a loop that does not end by itself; no Exception, so that a loop that catches those ends too."""


class SeenEnoughStopped(LoopStopped):
    """Ends a loop that goes through its data once more than is looked at."""


class Recorder:
    """Records what happens to one table of parameters between `watch` and the end of the context.

    Args:
        file: the user's file, whose lines are named.
        gain: what gradients are divided by.
        time_limit_seconds: after so long the loop is ended.
        num_passes: after so many passes over the loader in which it trains it is ended, too.
    """

    def __init__(self, file: str | None, gain: float, time_limit_seconds: float, num_passes: int = 2) -> None:
        self.trace = LoopTrace()
        self._file, self._gain = file, gain
        self._limit = TimeLimit(time_limit_seconds)
        self._num_passes = num_passes
        self._pass = 0
        self._finished: set[int] = set()
        self._trained: set[int] = set()
        self._in_closure = False
        self._handles: list[Any] = []
        self._optimizers: list[Optimizer] = []
        self._pending: dict[int, None] = {}
        self._incoming: Tensor | None = None
        self._wrapper: DistributedDataParallel | None = None

    def watch(self, table: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
        """Begin with this table; optimizers that the loop makes itself are found at their first step."""
        self._table = table
        self._optimizers = list(optimizers)
        self._handles += [
            table.register_hook(self._receive),
            table.register_post_accumulate_grad_hook(self._backward),
            register_optimizer_step_pre_hook(self._step),
            register_optimizer_step_post_hook(self._end_step),
            register_module_forward_pre_hook(self._meet),
        ]

    def forward(self, ids: Sequence[int], outputs: Tensor) -> None:
        """Take note of a forward, and of the gradient that its outputs get."""
        if self._in_closure:  # a line search computes the same gradient again, at other parameters
            return
        self._take_unadded()
        if self._pass not in self._trained and len(self._trained & self._finished) >= self._num_passes:
            raise SeenEnoughStopped
        self._trained.add(self._pass)
        if len(self.trace.forwards) >= MAX_FORWARDS:
            raise LoopStopped
        self._limit.check()
        number = len(self.trace.forwards)
        rates = tuple(float(group["lr"]) for each in self._optimizers for group in each.param_groups)
        self.trace.forwards.append(Forward(tuple(ids), rates, self._synced(), self._line()))

        def received(gradient: Tensor) -> None:
            self._pending[number] = None
            for row, sample in enumerate(ids):
                # The first gradient counts; later epochs bring the same one again.
                rows = gradient[row].detach().double().cpu()
                self.trace.by_sample.setdefault(sample, rows if rows.dim() > 1 else rows.unsqueeze(0))

        outputs.register_hook(received)

    def begin_pass(self) -> int:
        """Take note that a pass over the loader begins, and return its number."""
        self._pass += 1
        return self._pass

    def end_pass(self, number: int) -> None:
        """Take note that a pass has come to its end."""
        self._finished.add(number)

    def end_call(self) -> None:
        """Take note that the function returned."""
        self.trace.calls.append(len(self.trace.forwards))

    def __enter__(self) -> Self:
        self._limit.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._limit.cancel()
        for handle in self._handles:
            handle.remove()
        if self._table is not None:
            self._take_unadded()
            self.trace.left = self._gradient()
        self.trace.ended = kind is not LoopStopped
        self.trace.has_more_passes = kind is SeenEnoughStopped
        # True keeps the exception from going on: a stopped loop is a result like others.
        return kind is not None and issubclass(kind, LoopStopped)

    _table: nn.Parameter | None = None

    def _receive(self, gradient: Tensor) -> None:
        if not self._in_closure:
            self._take_unadded()
            self._incoming = self._wide(gradient)

    def _backward(self, table: Tensor) -> None:
        """Take note of a backward; the gradient holds it already, and has not been reduced yet."""
        assert table is self._table
        if self._in_closure or self._incoming is None:
            return
        # The hook runs after the addition, so the gradient from before is recovered by subtraction.
        before = self._gradient() - self._incoming
        before[before.abs() <= 1e-12 * self._incoming.abs().max()] = 0.0  # what rounding left of nothing
        self._append(before)

    def _take_unadded(self) -> None:
        """Take note of a gradient that was computed and added to nothing, as `torch.autograd.grad` does."""
        if self._incoming is not None:
            self._append(None)

    def _append(self, before: Tensor | None) -> None:
        assert self._incoming is not None
        forwards, self._pending = tuple(self._pending), {}
        self.trace.backwards.append(Backward(forwards, self._incoming, before, self._synced(), self._line()))
        self._incoming = None

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 (a hook)
        # The hook is called for every optimizer of the process.
        if not any(each is self._table for group in optimizer.param_groups for each in group["params"]):
            return None
        self._limit.check()
        self._take_unadded()
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        closure = next((one for one in (*args[1:], *kwargs.values()) if callable(one)), None)
        if closure is None:
            self._take_step()
            return None
        return self._with_closure(args, kwargs, closure)

    def _with_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step whose gradient is what its closure's first call leaves."""

        def observed() -> Any:  # noqa: ANN401 (the user's loss)
            loss = closure()
            if not self._in_closure:
                self._take_unadded()
                self._take_step()
                self._in_closure = True
            return loss

        swapped = [observed if one is closure else one for one in args]
        return tuple(swapped), {name: observed if one is closure else one for name, one in kwargs.items()}

    def _end_step(self, *_: object) -> None:
        self._in_closure = False

    def _take_step(self) -> None:
        counts = len(self.trace.forwards), len(self.trace.backwards), self.trace.reductions or 0
        self.trace.steps.append(OptimizerStep(*counts, self._gradient(), self._line()))

    def _meet(self, module: nn.Module, *_: object) -> None:
        """Take note of the wrapper that reduces, the first time it is called, and count its reductions."""
        if self._wrapper is not None or not isinstance(module, DistributedDataParallel):
            return
        # The hook is called for every module of the process.
        if not any(each is self._table for each in module.parameters()):
            return
        self._wrapper, self.trace.reductions = module, 0
        # Nothing that holds the wrapper: DDP's reducer keeps the hook out of the garbage collector's sight, and a cycle
        # through it would keep the process group, with its threads and sockets.
        trace, group = self.trace, module.process_group

        def reduce(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            if bucket.is_last():
                trace.reductions = (trace.reductions or 0) + 1
            # The reduction that DistributedDataParallel makes without a hook, so that counting changes nothing.
            return allreduce_hook(group, bucket)

        module.register_comm_hook(None, reduce)

    def _synced(self) -> bool | None:
        return None if self._wrapper is None else bool(self._wrapper.require_backward_grad_sync)

    def _gradient(self) -> Tensor:
        assert self._table is not None
        gradient = self._table.grad
        return torch.zeros_like(self._table, dtype=torch.float64).cpu() if gradient is None else self._wide(gradient)

    def _wide(self, gradient: Tensor) -> Tensor:
        return gradient.detach().to_dense().to("cpu", torch.float64, copy=True) / self._gain

    def _line(self) -> int | None:
        frame = inspect.currentframe()
        # The innermost frame of the user's file is the line that led here.
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno


class TimeLimit:
    """Ends the thread's work when its time is over, also inside a loop that calls nothing of ours."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = float("inf")
        self._lock = threading.Lock()
        self._running = False
        self._thread = threading.get_ident()
        self._timer = threading.Timer(seconds, self._interrupt)

    def start(self) -> None:
        """Begin to count."""
        self._end = time.monotonic() + self._seconds
        self._running = True
        # A loop that cannot be ended must not keep the process from ending.
        self._timer.daemon = True
        self._timer.start()

    def check(self) -> None:
        """Raise `LoopStopped` if the time is over."""
        if time.monotonic() > self._end:
            raise LoopStopped

    def cancel(self) -> None:
        """End it; nothing is raised from here on."""
        self._timer.cancel()
        with self._lock:
            self._running = False
        # The timer may be raising right now; it must be over before the pending exception is withdrawn.
        self._timer.join()
        self._raise_in_thread(None)  # an interruption that came too late must not hit what follows

    def _interrupt(self) -> None:
        with self._lock:
            if self._running:
                self._raise_in_thread(ctypes.py_object(LoopStopped))

    def _raise_in_thread(self, error: object) -> None:
        # Elsewhere the limit acts at the loop's next forward or step, in `check`.
        if sys.implementation.name == "cpython":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)
