"""Reject steps that a trace cannot follow, with the line of the user's code; make up values that fake tensors lack."""

import linecache
import logging
import operator
import sysconfig
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from anybatch.core.torch_internals import is_compiled, num_changes
from anybatch.errors import CannotPlanError, LossError, UserError
from anybatch.memory.torch_internals import DataDependentOutputException, TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.parallel.strategy import Strategy
from anybatch.planner.torch_internals import known_operations, operation


def check_strategy(strategy: str | Callable[[], Strategy]) -> None:
    """Reject strategies that use several devices in one process, since a trace sees only one."""
    if strategy == "data_parallel" or (callable(strategy) and strategy().capabilities.splits_micro_batches):
        message = (
            "cannot plan this step: several replicas in one process are not supported. Plan strategy='ddp', whose "
            "ranks need less memory than the first replica."
        )
        raise CannotPlanError(message)


MAX_OPERATIONS = 200_000
"""Maximum operations of a traced step: more would take many minutes. GPT-2 XL has 13,500."""


def check_loop_length(num_operations: int) -> None:
    """Reject a step with too many operations, such as a model that loops over tokens in Python."""
    if num_operations > MAX_OPERATIONS:
        message = (
            f"cannot plan this step: the step has more than {MAX_OPERATIONS:,} operations, too many to trace. Models "
            "that loop over tokens in Python, such as Mamba without its CUDA kernels, run several per token. Plan "
            "a shorter sequence_length, or let micro_batch_size='auto' try sizes on the device."
        )
        raise CannotPlanError(message)


def untraced_features(modules: nn.Module) -> tuple[str, ...]:
    """Return notes on features that a trace does not follow, and how they affect the plan."""
    notes = []
    if any(map(is_compiled, modules.modules())):
        notes.append("planned without torch.compile; published compiled runs need 2 to 8% less memory")
    if any(isinstance(module, nn.RNNBase) for module in modules.modules()):
        notes.append("recurrent layers are planned with torch's own kernels; cuDNN and oneDNN keep other memory")
    return tuple(notes)


_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


@contextmanager
def as_planning_errors(modules: nn.Module, read_at: Callable[[], str] = str) -> Iterator[None]:
    """Convert errors of a step on fake tensors to `CannotPlanError`, with the place where it stopped.

    torch's own long log message about the error is suppressed.

    Raises:
        CannotPlanError: the step failed, with the reason.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # The loss may have no graph because of a branch on data. Other UserErrors are raised unchanged.
        if isinstance(error, UserError) and not (isinstance(error, LossError) and read_at()):
            raise
        first = next(iter(str(error).splitlines()), "")
        names = {id(module): name for name, module in modules.named_modules() if name}
        is_user_error = isinstance(error, (AttributeError, ImportError, LookupError, NameError, TypeError))
        why = (
            "Real data probably raises this error too: run the loss on one batch."
            if is_user_error
            else "Steps that depend on data values, or use kernels without a fake implementation, cannot be planned."
        )
        message = (
            "cannot plan this step: the step does not run on tensors without data "
            f"({type(error).__name__}: {first}){user_location(traceback.walk_tb(error.__traceback__), names)}. {why}"
        )
        if read_at():
            message += f" Before that, the step read the value of a tensor{read_at()}; fake tensors have no values."
        raise CannotPlanError(message) from error
    finally:
        log.disabled = was_disabled


def user_location(frames: Iterable[tuple[FrameType, int]], names: Mapping[int, str] | None = None) -> str:
    """Return the innermost module and line of the user's code, such as ", in head (Head) at file.py:3"."""
    inside = at = ""
    for frame, number in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            if names is None and not type(module).__module__.startswith(("torch.", "anybatch.")):
                inside = f" in {type(module).__name__}"
            elif names is not None and id(module) in names:
                inside = f" in {names[id(module)]} ({type(module).__name__})"
        file = Path(frame.f_code.co_filename)
        if not any(file.resolve().is_relative_to(library) for library in (_OURS, _TORCH)) and not _is_standard(file):
            line = linecache.getline(frame.f_code.co_filename, number).strip()
            at = f" at {file.name}:{number}{f', `{line}`' if line else ''}"
    return f",{inside}{at}" if inside or at else ""


def _is_standard(file: Path) -> bool:
    """Whether a file belongs to Python's standard library, which contains site-packages as a folder."""
    return file.resolve().is_relative_to(_STANDARD) and "site-packages" not in file.parts


_CHECKS_OVERFLOW = operation("_amp_foreach_non_finite_check_and_unscale_.default")
_READS = (operation("_local_scalar_dense.default"), torch.ops.aten.equal.default)
_DRAWS = known_operations(("rand.default", "rand.generator"))
_COMPARES: Mapping[Any, Callable[[Any, Any], bool]] = {
    operation("gt.Scalar"): operator.gt,
    operation("ge.Scalar"): operator.ge,
    operation("lt.Scalar"): operator.lt,
    operation("le.Scalar"): operator.le,
}
_FOLLOWING = "Following a random number"

WATCHED = frozenset({_CHECKS_OVERFLOW, *_READS, *_DRAWS, *_COMPARES})
"""Operations that must reach `HostReads` every time, so their results are not cached."""


class HostReads(TorchDispatchMode):
    """Makes up the values of `.item()`, `if tensor:` and `torch.equal` on fake tensors, which would raise otherwise.

    The check of fp16 gradients for overflow finds no overflow, since the update would be skipped otherwise.

    With real data the program might branch differently. To detect this, the program runs again with other made-up
    values (`other`), and the two traces are compared. A number drawn by `torch.rand` is near 1 (with `other`: near 0),
    also in comparisons, and never 0, so that a layer with drop probability 0 is never dropped.
    """

    def __init__(self, phase: Callable[[], Phase], *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: Counter[Phase] = Counter()
        self.truths: Counter[Phase] = Counter()
        self.at = ""
        self.is_drawn = False
        self._phase = phase
        self._other = other
        self._overflows: list[torch.Tensor] = []
        # Weak references: keeping the tensors alive would change the memory of the step.
        self._drawn: dict[int, tuple[weakref.ref[torch.Tensor], int, float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation; make up the result if it reads a value of a fake tensor."""
        del types
        if func is _CHECKS_OVERFLOW:
            # The tensor with the operation's flag; later reads of it return no overflow.
            self._overflows.append(args[1])
        if func not in _READS:
            result = func(*args, **(kwargs or {}))
            if func in _DRAWS and result.numel() == 1:
                self._remember(result, 2**-24 if self._other else 1 - 2**-24)
            elif func in _COMPARES and (drawn := self._draw_in(args[0])) is not None:
                self._remember(result, _COMPARES[func](drawn, args[1]))
            return result
        try:
            return func(*args, **(kwargs or {}))  # the value is known, because the program has set it
        except DataDependentOutputException:
            return self._substitute(func, args[0])

    def _substitute(self, func: Any, read: torch.Tensor) -> float:  # noqa: ANN401 (as above)
        """Return a made-up value for a read of a fake tensor, and count the read."""
        # Compare identities, since comparing values would be another read.
        if any(read is overflow for overflow in self._overflows):
            return 0.0
        drawn = None if func is torch.ops.aten.equal.default else self._draw_in(read)
        if not self.at and self._phase() in {"forward", "backward"}:
            self.at = user_location(reversed(list(traceback.walk_stack(None))))
            self.is_drawn = drawn is not None
        is_truth = func is not _READS[0] or read.dtype is torch.bool
        (self.truths if is_truth else self.numbers)[self._phase()] += 1
        if drawn is not None:
            return drawn
        if is_truth:
            return self._other
        if read.dtype.is_floating_point or read.dtype.is_complex:
            return -1.5 if self._other else 0.5
        return 2 if self._other else 1

    def _remember(self, tensor: torch.Tensor, drawn: float) -> None:
        if not tensor.is_inference():  # torch does not count changes of inference tensors
            self._drawn[id(tensor)] = weakref.ref(tensor), num_changes([tensor], _FOLLOWING)[0], drawn

    def _draw_in(self, tensor: torch.Tensor) -> float | None:
        """Return a tensor's drawn number, or the result of comparing one; None for other tensors."""
        reference, changes, drawn = self._drawn.get(id(tensor), (None, 0, None))
        is_it = reference is not None and reference() is tensor and [changes] == num_changes([tensor], _FOLLOWING)
        return drawn if is_it else None
