"""Records the forwards and optimizer steps of a loop, with PyTorch's public hooks."""

import inspect
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

TableGradient = Float64[Tensor, "sample position output"]
MAX_FORWARDS = 200
"""A loop that makes more forwards on 31 samples does not end."""
TOLERANCE = 1e-5
"""Relative; rounding in float32 is smaller, and the smallest fault is 0.1."""


class LoopStopped(BaseException):
    """Stops a loop that does not end. Not an Exception, so that loops do not catch it."""


class SeenEnoughStopped(LoopStopped):
    """Stops a loop after all the passes over its data that are looked at."""


@dataclass(slots=True, eq=False)
class Forward:
    """A micro-batch: a forward that a backward can follow."""

    ids: tuple[int, ...]
    learning_rates: tuple[float, ...]
    is_synced: bool | None  # whether DistributedDataParallel would reduce its backward; None without that wrapper
    line: int | None
    has_gradient: bool = False  # whether a backward came, with a gradient other than zero
    rank: int = 0
    epoch: int = 0


@dataclass(slots=True)
class RankStep:
    """An optimizer step on one rank."""

    gradient: TableGradient = field(default_factory=lambda: torch.zeros(0))  # used by the optimizer
    forwards: set[int] = field(default_factory=set)  # numbers of forwards whose backward came since the step before
    num_forwards: int = 0  # until this step, since the beginning
    num_reductions: int = 0  # by DistributedDataParallel, since the step before
    is_stale: bool = False  # the first backward found a gradient
    is_accumulated: bool = False  # backwards added to .grad; otherwise the loop adds up gradients itself
    line: int | None = None


@dataclass(slots=True)
class LoopTrace:
    """The actions of a loop on one rank, in order."""

    forwards: list[Forward] = field(default_factory=list)
    steps: list[RankStep] = field(default_factory=list)
    backward_line: int | None = None  # of the first backward
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # the first one of each sample
    has_late_no_sync: bool = False  # whether no_sync() was around a backward, and not around its forward
    changed_lines: list[int | None] = field(default_factory=list)  # backwards that found the gradient so far changed
    changed_after_lines: list[int | None] = field(default_factory=list)  # steps whose gradient was changed afterwards
    returned_loss: float | None = None
    call_ends: list[int] = field(default_factory=list)  # number of forwards at the end of each call
    ended: bool = True  # without help, or after the passes that are looked at
    has_more_passes: bool = False
    guesses: dict[str, Any] = field(default_factory=dict)  # unknown settings that the loop asked for


class Recorder:
    """Records a loop between `watch` and the end of the context, and stops it after `num_passes` over the loader."""

    def __init__(self, file: str | None, gain: float, num_passes: int = 2) -> None:
        self.trace = LoopTrace()
        self._file, self._gain, self._num_passes = file, gain, num_passes
        self._step = RankStep()  # the next one
        self._pass, self._finished, self._trained = 0, set[int](), set[int]()
        self._in_closure = False
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []
        self._incoming = self._sum = torch.zeros(0)  # gradient of the current backward, and .grad after the last one
        self._used: tuple[Tensor, TableGradient] | None = None  # .grad at the last step, and a copy of it
        self._wrapper: DistributedDataParallel | None = None

    def watch(self, table: nn.Parameter, optimizers: Sequence[Optimizer]) -> None:
        """Begin with this parameter; optimizers that the loop makes itself are found at their first step."""
        self._table, self._optimizers = table, list(optimizers)
        self._handles = [
            table.register_hook(self._receive),
            table.register_post_accumulate_grad_hook(self._accumulate),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
            register_module_forward_pre_hook(self._find_wrapper),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for handle in self._handles:
            handle.remove()
        self._compare_with_used()
        self.trace.ended = kind is not LoopStopped
        self.trace.has_more_passes = kind is SeenEnoughStopped
        return kind is not None and issubclass(kind, LoopStopped)  # the trace of a stopped loop is a result too

    def one_pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass over the loader, and record its beginning and end."""
        self._pass = number = self._pass + 1
        yield from batches
        self._finished.add(number)

    def forward(self, ids: Sequence[int], outputs: Tensor) -> None:
        """Record a forward, and the gradient of its outputs."""
        if self._in_closure and tuple(ids) in {self.trace.forwards[number].ids for number in self._step.forwards}:
            return  # a line search computes the same gradient again
        self._compare_with_used()
        if self._pass not in self._trained and len(self._trained & self._finished) >= self._num_passes:
            raise SeenEnoughStopped
        self._trained.add(self._pass)
        if len(self.trace.forwards) >= MAX_FORWARDS:
            raise LoopStopped
        number = len(self.trace.forwards)
        rates = tuple(float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        forward = Forward(tuple(ids), rates, self._is_synced(), self._line())
        self.trace.forwards.append(forward)

        def receive(gradient: Tensor) -> None:
            self._step.forwards.add(number)
            forward.has_gradient |= bool(gradient.any())
            self.trace.backward_line = self.trace.backward_line or self._line()
            self.trace.has_late_no_sync |= bool(forward.is_synced) and self._is_synced() is False
            rows = gradient.detach().double().cpu()
            for sample, row in zip(ids, rows if rows.dim() == 3 else rows.unsqueeze(1), strict=True):  # noqa: PLR2004
                self.trace.output_gradients.setdefault(sample, row)

        outputs.register_hook(receive)

    def _receive(self, gradient: Tensor) -> None:
        self._incoming = self._unscaled(gradient)

    def _accumulate(self, _: Tensor) -> None:
        """Record a backward whose gradient was added to .grad, and not reduced yet."""
        gradient = self._gradient()
        before = gradient - self._incoming
        if not self._step.is_accumulated:
            self._step.is_accumulated, self._step.is_stale = True, bool(before.any())
        # DistributedDataParallel decides in the forward whether it reduces the backward.
        self._step.num_reductions += any(forward.is_synced for forward in self.trace.forwards[-1:])
        if self._sum.any() and before.any() and not is_close(before, self._sum):
            self.trace.changed_lines.append(self._line())
        self._sum = gradient

    def _has_table(self, optimizer: Optimizer) -> bool:
        return any(parameter is self._table for group in optimizer.param_groups for parameter in group["params"])

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._has_table(optimizer):  # the hook is called for every optimizer of the process
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._in_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
        if not self._in_closure:
            self._take_step()

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._has_table(optimizer):
            if self._in_closure:  # which has computed the gradient now
                self._take_step()
            self._in_closure = False
            self._used = None if self._table.grad is None else (self._table.grad, self._gradient())

    def _take_step(self) -> None:
        step, self._step, self._sum = self._step, RankStep(), torch.zeros(0)
        step.gradient, step.num_forwards, step.line = self._gradient(), len(self.trace.forwards), self._line()
        self.trace.steps.append(step)

    def _compare_with_used(self) -> None:
        """Record whether the gradient of the last step was changed after it, and not only cleared."""
        if self._used is not None:
            gradient = self._unscaled(self._used[0])
            if gradient.any() and not is_close(gradient, self._used[1]):
                self.trace.changed_after_lines.append(self.trace.steps[-1].line)
        self._used = None

    def _find_wrapper(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, DistributedDataParallel) and self._table in set(module.parameters()):
            self._wrapper = module

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


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `LoopStopped` in the main thread after some time; on Windows, nothing is raised."""

    def stop(*_: object) -> None:
        raise LoopStopped

    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again every second, for loops that catch everything
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def near(found: float, expected: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected))
