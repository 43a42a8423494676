"""Reject steps that a trace cannot follow, and report errors of a trace with the line of the user's code."""

import linecache
import logging
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from anybatch.engine.torch_internals import is_compiled
from anybatch.errors import CannotPlanError, LossError, UserError
from anybatch.parallel.strategy import Strategy
from anybatch.planner.trace.cuda_emulation import Profile


def refuse_strategy(strategy: str | Callable[[], Strategy]) -> None:
    """Reject strategies that use several devices in one process, since a trace sees only one.

    Raises:
        CannotPlanError: the strategy is not supported.
    """
    if strategy == "data_parallel" or (callable(strategy) and strategy().capabilities.splits_micro_batches):
        message = (
            "cannot plan, will probe: several replicas in one process are not supported. Plan strategy='ddp', whose "
            "ranks need less memory than the first replica."
        )
        raise CannotPlanError(message)


def refuse_undescribed(modules: nn.Module, profile: Profile) -> None:
    """Reject layers whose CUDA kernels save memory that a trace on the CPU does not show.

    Raises:
        CannotPlanError: the model has such a layer.
    """
    for name, module in modules.named_modules():
        if profile == "cuda" and isinstance(module, nn.RNNBase):
            layer = f"{type(module).__name__} {name or 'model'!r}"
            message = (
                f"cannot plan, will probe: on a GPU, {layer} runs in a cuDNN kernel, and how much memory it saves for "
                "its backward is not documented."
            )
            raise CannotPlanError(message)


MAX_OPERATIONS = 200_000
"""Maximum operations of a traced step: more would take many minutes. GPT-2 XL has 13,500."""


def refuse_long_loop(num_operations: int) -> None:
    """Reject a step with too many operations, such as a model that loops over tokens in Python.

    Raises:
        CannotPlanError: there are more than `MAX_OPERATIONS`.
    """
    if num_operations > MAX_OPERATIONS:
        message = (
            f"cannot plan, will probe: the step has more than {MAX_OPERATIONS:,} operations, too many to trace. Models "
            "that loop over tokens in Python, such as Mamba without its CUDA kernels, run several per token: plan "
            "a shorter sequence_length, or let micro_batch_size='auto' try sizes on the device."
        )
        raise CannotPlanError(message)


def not_followed(modules: nn.Module, *, offloads: bool) -> tuple[str, ...]:
    """Return notes on features that a trace does not follow, and how they affect the plan.

    Args:
        modules: the trained modules.
        offloads: saved activations are offloaded to the host.
    """
    notes = []
    if any(map(is_compiled, modules.modules())):
        notes.append(
            "the plan is for the model without torch.compile, which saves 2 to 8% of the memory in publications"
        )
    if offloads:
        notes.append(
            "the plan ignores torch.autograd.graph.save_on_cpu and counts offloaded tensors on the device. "
            "Remove it and plan with offload instead, which the plan takes into account"
        )
    return tuple(notes)


_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


@contextmanager
def as_planning_errors(modules: nn.Module, read_at: Callable[[], str] = str) -> Iterator[None]:
    """Convert errors of a step on fake tensors to `CannotPlanError`, with the place where it stopped.

    torch's own long log message about the error is suppressed.

    Args:
        modules: the trained modules, to name the one that was running.
        read_at: returns where the step read a number or truth value from a tensor; empty if it did not.

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
        # A branch on data may be why the loss has no graph. Other UserErrors pass unchanged.
        if isinstance(error, UserError) and not (isinstance(error, LossError) and read_at()):
            raise
        first = next(iter(str(error).splitlines()), "")
        names = {id(module): name for name, module in modules.named_modules() if name}
        is_slip = isinstance(error, (AttributeError, ImportError, LookupError, NameError, TypeError))
        why = (
            "Real data probably raises this error too: run the loss on one batch."
            if is_slip
            else "Steps that depend on data values, or use kernels without a meta implementation, cannot be planned."
        )
        message = (
            "cannot plan, will probe: the step does not run on tensors without data "
            f"({type(error).__name__}: {first}){place(traceback.walk_tb(error.__traceback__), names)}. {why}"
        )
        if read_at():
            message += f" Before that, it read a number or truth value, which fake tensors do not have{read_at()}."
        raise CannotPlanError(message) from error
    finally:
        log.disabled = was_disabled


def place(frames: Iterable[tuple[FrameType, int]], names: Mapping[int, str] | None = None) -> str:
    """Return the innermost user module and line, such as ", in head (Head) at file.py:3".

    Args:
        frames: frames with line numbers, the innermost last.
        names: module names by `id`, to consider only these; None: any user module, named by its class.
    """
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
