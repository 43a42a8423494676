"""Reject steps that a trace cannot follow, with the line of the user's code; make up values that fake tensors lack."""

import linecache
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from anybatch.core.torch_internals import is_compiled
from anybatch.errors import CannotPlanError, LossError, UserError
from anybatch.memory.torch_internals import DataDependentOutputException, FakeTensor, TorchDispatchMode
from anybatch.memory.trace import Phase
from anybatch.parallel.strategy import Strategy
from anybatch.planner.torch_internals import operation


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
def as_planning_errors(modules: nn.Module, read_at: Callable[[], str | None] = str) -> Iterator[None]:
    """Convert errors of a step on fake tensors to `CannotPlanError`, with the place where it stopped.

    torch's own long log message about the error is suppressed.
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

_DRAWS = (operation("rand.default"), operation("rand.generator"))

WATCHED = frozenset({_CHECKS_OVERFLOW, *_READS, *_DRAWS})
"""Operations that must reach `HostReads` every time, so their results are not cached."""


class HostReads(TorchDispatchMode):
    """Makes up the values of `.item()`, `if tensor:` and `torch.equal` on fake tensors, which would raise otherwise.

    The check of fp16 gradients for overflow finds no overflow, since the update would be skipped otherwise. A number
    drawn by `torch.rand` is near 1, so that randomly dropped layers are kept. If it `refuses`, reads are rejected.
    """

    def __init__(self, phase: Callable[[], Phase], *, refuses: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at: str | None = None  # location of the first read in forward or backward
        self._phase = phase
        self._refuses = refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation; make up the result if it reads a value of a fake tensor."""
        del types
        try:
            result = func(*args, **(kwargs or {}))  # the value may be known, because the program has set it
            if func is _CHECKS_OVERFLOW and isinstance(args[1], FakeTensor):
                # Later reads of this flag return no overflow.
                args[1].constant = getattr(torch.tensor(0.0), "constant")  # noqa: B009 (of fake tensors only)
            is_drawn = func in _DRAWS and isinstance(result, FakeTensor) and result.numel() == 1
            # `torch.tensor` makes a fake tensor with a known value.
            return torch.tensor(1 - 2**-24).expand(result.shape).clone() if is_drawn else result
        except DataDependentOutputException:
            if func not in _READS:
                raise
            return self._substitute(func, args[0])

    def _substitute(self, func: Any, read: torch.Tensor) -> float:  # noqa: ANN401 (as above)
        """Return a made-up value for a read of a fake tensor."""
        if self.at is None and self._phase() in {"forward", "backward"}:
            self.at = user_location(reversed(list(traceback.walk_stack(None))))
            if self._refuses:
                message = f"cannot plan this step: it reads the value of a tensor{self.at}."
                raise CannotPlanError(message)
        if func is not _READS[0] or read.dtype is torch.bool:
            return False
        return 0.5 if read.dtype.is_floating_point or read.dtype.is_complex else 1
