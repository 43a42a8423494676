"""Records the forwards, backwards and optimizer steps of a loop, with PyTorch's public hooks."""

import _thread
import inspect
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.parallel.torch_internals import GradBucket

TableGradient = Float64[Tensor, "sample position output"]
MAX_FORWARDS = 200
"""A loop that makes more forwards on 31 samples, outside of a pass over its loader, is stopped."""
TOLERANCE = 1e-5
"""Relative; rounding in float32 is smaller, and the smallest fault is 0.1."""


class LoopStopped(BaseException):
    """Stops a loop that does not end. Not an Exception, so that loops do not catch it."""


class SeenEnoughStopped(LoopStopped):
    """Stops a loop that has made all the passes over its data that are looked at."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that a backward can follow."""

    ids: tuple[int, ...]
    learning_rates: tuple[float, ...]
    is_synced: bool | None  # whether DistributedDataParallel would reduce its backward; None without that wrapper
    line: int | None


@dataclass(slots=True)
class RankStep:
    """The backwards of one optimizer step on one rank, and the gradient that the optimizer used.

    Attributes:
        forwards: numbers of the forwards whose gradients were added up, without those that were cleared.
        cleared: numbers of forwards whose gradients were cleared before later backwards, one entry per clearing.
        rescaled_lines: lines of backwards that found the gradient so far changed, but not cleared.
        is_stale: the first backward found the gradient of the step before.
        is_cleared: the optimizer found no gradient, although the last backward left one.
        num_forwards: forwards until this step, since the beginning.
        num_backwards: backwards of this step.
        num_reductions: reductions by DistributedDataParallel for this step.
        gradient: used by the optimizer; zeros if there was none.
        line: line of the step.
    """

    forwards: list[int] = field(default_factory=list)
    cleared: list[list[int]] = field(default_factory=list)
    rescaled_lines: list[int | None] = field(default_factory=list)
    is_stale: bool = False
    is_cleared: bool = False
    num_forwards: int = 0
    num_backwards: int = 0
    num_reductions: int = 0
    gradient: TableGradient | None = None
    line: int | None = None
    _sum: TableGradient | None = None  # the gradient after the last backward
    _is_own_sum: bool = False  # the loop adds up gradients from torch.autograd.grad, which changes nothing here

    def add(self, forwards: list[int], incoming: TableGradient, before: TableGradient | None, line: int | None) -> None:
        """Add a backward: the gradient it computed, and the gradient it added that to, None if it added it to none."""
        self.num_backwards += 1
        if before is None:
            self._is_own_sum = True
        elif self._sum is None:
            self.is_stale = bool(before.any())
        elif not before.any() and self._sum.any():
            self.cleared.append(self.forwards)
            self.forwards = []
        elif before.any() and not is_close(before, self._sum):
            self.rescaled_lines.append(line)
        self.forwards = [*self.forwards, *forwards]
        self._sum = incoming if before is None else before + incoming

    def end(self, gradient: TableGradient, num_forwards: int, line: int | None) -> None:
        """Add the optimizer step."""
        self.gradient, self.num_forwards, self.line = gradient, num_forwards, line
        if self._is_own_sum:  # the weights show whether the loop adds up correctly
            self.forwards = [number for numbers in (*self.cleared, self.forwards) for number in numbers]
            self.cleared, self.is_stale = [], False
        elif self._sum is not None:
            self.is_cleared = bool(not gradient.any() and self._sum.any())


@dataclass(slots=True)
class LoopTrace:
    """The actions of a loop on one rank, in order.

    Attributes:
        forwards: all forwards.
        steps: all optimizer steps.
        open_step: backwards since the last step.
        backward_line: line of the first backward.
        output_gradients: the first gradient of each sample's outputs.
        has_wrapper: whether DistributedDataParallel was used.
        unsynced_too_late: whether a forward would have been reduced and its backward was inside no_sync().
        late_change_lines: lines of steps after which the gradient was changed, but not cleared.
        returned_loss: the function's result, if that is one loss.
        call_ends: number of forwards at the end of each call of the function.
        ended: whether the loop ended by itself or after the passes that are looked at.
        has_more_passes: whether it would have made further passes.
        guesses: settings that the loop asked for and that are unknown, with the values it got.
    """

    forwards: list[Forward] = field(default_factory=list)
    steps: list[RankStep] = field(default_factory=list)
    open_step: RankStep = field(default_factory=RankStep)
    backward_line: int | None = None
    output_gradients: dict[int, Tensor] = field(default_factory=dict)
    has_wrapper: bool = False
    unsynced_too_late: bool = False
    late_change_lines: list[int | None] = field(default_factory=list)
    returned_loss: float | None = None
    call_ends: list[int] = field(default_factory=list)
    ended: bool = True
    has_more_passes: bool = False
    guesses: dict[str, Any] = field(default_factory=dict)

    @property
    def rescaled_lines(self) -> list[int | None]:
        """Lines of backwards that found the gradient so far changed, but not cleared."""
        return [line for step in (*self.steps, self.open_step) for line in step.rescaled_lines]


class Recorder:
    """Records a loop between `watch` and the end of the context.

    Args:
        file: the user's file, for line numbers.
        gain: divides gradients.
        time_limit_seconds: the loop is stopped after that.
        num_passes: the loop is stopped after that many passes over the loader in which it trains.
    """

    def __init__(self, file: str | None, gain: float, time_limit_seconds: float, num_passes: int = 2) -> None:
        self.trace = LoopTrace()
        self._file, self._gain, self._num_passes = file, gain, num_passes
        self._limit = TimeLimit(time_limit_seconds)
        self._pass, self._finished, self._trained = 0, set[int](), set[int]()
        self._in_closure = False
        self._optimizers: list[Optimizer] = []
        self._pending: dict[int, None] = {}  # forwards that the current backward went through
        self._incoming: TableGradient | None = None  # computed, and not added to .grad yet
        self._used: tuple[Tensor, TableGradient] | None = None  # .grad after the last step, and a copy of it
        self._wrapper: DistributedDataParallel | None = None

    def watch(self, table: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
        """Begin with this parameter; optimizers that the loop makes itself are found at their first step."""
        self._table = table
        self._optimizers = list(optimizers)
        self._handles = [
            table.register_hook(self._receive),
            table.register_post_accumulate_grad_hook(self._end_backward),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
            register_module_forward_pre_hook(self._find_wrapper),
        ]

    def __enter__(self) -> Self:
        self._limit.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._limit.cancel()
        for handle in self._handles:
            handle.remove()
        self._take_unadded()
        self._look_for_late_change()
        self.trace.ended = kind is not LoopStopped
        self.trace.has_more_passes = kind is SeenEnoughStopped
        return kind is not None and issubclass(kind, LoopStopped)  # the trace of a stopped loop is a result too

    def forward(self, ids: Sequence[int], outputs: Tensor) -> None:
        """Record a forward, and the gradient of its outputs."""
        if self._in_closure:  # a line search computes the same gradient again, with other parameters
            return
        self._take_unadded()
        self._look_for_late_change()
        self._stop_if_due()
        number = len(self.trace.forwards)
        rates = tuple(float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        self.trace.forwards.append(Forward(tuple(ids), rates, self._is_synced(), self._line()))

        def receive(gradient: Tensor) -> None:
            self._pending[number] = None
            rows = gradient.detach().double().cpu()
            for row, sample in zip(rows if rows.dim() > 2 else rows.unsqueeze(1), ids, strict=True):  # noqa: PLR2004
                self.trace.output_gradients.setdefault(sample, row)

        outputs.register_hook(receive)

    def begin_pass(self) -> int:
        """Record the beginning of a pass over the loader, and return its number."""
        self._pass += 1
        return self._pass

    def end_pass(self, number: int) -> None:
        """Record the end of a pass."""
        self._finished.add(number)

    def _stop_if_due(self) -> None:
        if self._pass not in self._trained and len(self._trained & self._finished) >= self._num_passes:
            raise SeenEnoughStopped
        self._trained.add(self._pass)
        if len(self.trace.forwards) >= MAX_FORWARDS:
            raise LoopStopped
        self._limit.check()

    def _receive(self, gradient: Tensor) -> None:
        if not self._in_closure:
            self._take_unadded()
            self._incoming = self._unscaled(gradient)

    def _end_backward(self, _: Tensor) -> None:
        """Record a backward; its gradient is in .grad already, and not reduced yet."""
        if self._incoming is None:
            return
        before = self._gradient() - self._incoming
        before[before.abs() <= 1e-12 * self._incoming.abs().max()] = 0.0  # rounding
        self._add_backward(before)

    def _take_unadded(self) -> None:
        """Record a gradient that was not added to .grad: `torch.autograd.grad` computed it."""
        if self._incoming is not None:
            self._add_backward(None)

    def _add_backward(self, before: TableGradient | None) -> None:
        assert self._incoming is not None
        forwards, self._pending = list(self._pending), {}
        line = self._line()
        if self.trace.backward_line is None:
            self.trace.backward_line = line
        if forwards and self.trace.forwards[forwards[0]].is_synced and self._is_synced() is False:
            self.trace.unsynced_too_late = True
        self.trace.open_step.add(forwards, self._incoming, before, line)
        self._incoming = None

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 (a hook)
        if not any(each is self._table for group in optimizer.param_groups for each in group["params"]):
            return None  # the hook is called for every optimizer of the process
        self._limit.check()
        self._take_unadded()
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        closure = next((value for value in (*args[1:], *kwargs.values()) if callable(value)), None)
        if closure is None:
            self._take_step()
            return None

        def observed() -> Any:  # noqa: ANN401 (the user's loss)
            loss = closure()
            if not self._in_closure:  # the gradient of the first call is the gradient of the step
                self._take_unadded()
                self._take_step()
                self._in_closure = True
            return loss

        swapped = tuple(observed if value is closure else value for value in args)
        return swapped, {name: observed if value is closure else value for name, value in kwargs.items()}

    def _take_step(self) -> None:
        self.trace.open_step.end(self._gradient(), len(self.trace.forwards), self._line())
        self.trace.steps.append(self.trace.open_step)
        self.trace.open_step = RankStep()

    def _end_step(self, *_: object) -> None:
        self._in_closure = False
        self._used = None if self._table.grad is None else (self._table.grad, self._gradient())

    def _look_for_late_change(self) -> None:
        """Record whether the gradient of the last step was changed after it, and not only cleared."""
        if self._used is not None and self.trace.steps:
            gradient = self._unscaled(self._used[0])
            if gradient.any() and not is_close(gradient, self._used[1]):
                self.trace.late_change_lines.append(self.trace.steps[-1].line)
        self._used = None

    def _find_wrapper(self, module: nn.Module, *_: object) -> None:
        """Count the reductions of the wrapper around the model, from its first call on."""
        if self._wrapper is not None or not isinstance(module, DistributedDataParallel):
            return
        if not any(each is self._table for each in module.parameters()):
            return
        self._wrapper, self.trace.has_wrapper = module, True
        trace, group = self.trace, module.process_group  # the hook holds no reference to its wrapper

        def reduce(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            trace.open_step.num_reductions += bucket.is_last()
            return allreduce_hook(group, bucket)  # the reduction that the wrapper makes without a hook

        module.register_comm_hook(None, reduce)

    def _is_synced(self) -> bool | None:
        return None if self._wrapper is None else bool(self._wrapper.require_backward_grad_sync)

    def _gradient(self) -> TableGradient:
        gradient = self._table.grad
        return self._unscaled(torch.zeros_like(self._table) if gradient is None else gradient)

    def _unscaled(self, gradient: Tensor) -> TableGradient:
        return gradient.detach().to_dense().to("cpu", torch.float64, copy=True) / self._gain

    def _line(self) -> int | None:
        """Return the line of the user's file that led here."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return None if frame is None else frame.f_lineno


class TimeLimit:
    """Raises `LoopStopped` in the main thread when the time is over, as if Ctrl-C had been pressed."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, float("inf")
        self._is_running = False
        self._timer = threading.Timer(seconds, _thread.interrupt_main)

    def start(self) -> None:
        """Begin to count."""
        self._end = time.monotonic() + self._seconds
        self._is_running = True
        self._before = signal.signal(signal.SIGINT, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def check(self) -> None:
        """Raise `LoopStopped` if the time is over: the loop may have caught the first one."""
        if time.monotonic() > self._end:
            raise LoopStopped

    def cancel(self) -> None:
        """Stop counting."""
        self._is_running = False
        self._timer.cancel()
        self._timer.join()
        signal.signal(signal.SIGINT, self._before)

    def _stop(self, *_: object) -> None:
        if self._is_running:
            raise LoopStopped


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def near(found: float, expected: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected))
