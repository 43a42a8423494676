"""What a trace would not see, refused before it is made; and what ends a trace, with the place in the user's code."""

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
    """Refuse strategies whose other devices a trace of one rank's engine does not see.

    Raises:
        CannotPlanError: it is one of these.
    """
    if strategy == "data_parallel" or (callable(strategy) and strategy().capabilities.splits_micro_batches):
        message = (
            "cannot plan, will probe: replicas in threads of one process are not planned. Plan strategy='ddp', whose "
            "ranks hold less than the first of such replicas."
        )
        raise CannotPlanError(message)


def refuse_undescribed(modules: nn.Module, profile: Profile) -> None:
    """Refuse layers whose kernels on the device differ from a CPU's and keep memory that no description mentions.

    Raises:
        CannotPlanError: there is one.
    """
    for name, module in modules.named_modules():
        if profile == "cuda" and isinstance(module, nn.RNNBase):
            layer = f"{type(module).__name__} {name or 'model'!r}"
            message = (
                f"cannot plan, will probe: on a GPU, {layer} runs in a kernel of cuDNN, which keeps memory for its "
                "backward of which no description tells."
            )
            raise CannotPlanError(message)


MAX_OPERATIONS = 200_000
"""Operations of a traced step: above these a plan takes many minutes. GPT-2 XL has 13,500."""


def refuse_long_loop(num_operations: int) -> None:
    """Refuse a step of very many operations, as of a model that loops over its tokens in Python.

    Raises:
        CannotPlanError: it has more than `MAX_OPERATIONS`.
    """
    if num_operations > MAX_OPERATIONS:
        message = (
            f"cannot plan, will probe: the step has more than {MAX_OPERATIONS:,} operations, too many to trace. Models "
            "that take their tokens one by one in Python, such as Mamba without its own kernels, have some for each "
            "token: plan a shorter sequence_length, or let micro_batch_size='auto' try sizes on the device."
        )
        raise CannotPlanError(message)


def not_followed(modules: nn.Module, *, offloads: bool) -> tuple[str, ...]:
    """Return notes on what a trace does not follow, and what that does to the plan.

    Args:
        modules: what is trained.
        offloads: what is saved for the backward was seen to go to the host.
    """
    notes = []
    if any(map(is_compiled, modules.modules())):
        notes.append(
            "the model is compiled, and planned as it is without: compiled it takes less, 2 to 8% as published"
        )
    if offloads:
        notes.append(
            "torch.autograd.graph.save_on_cpu has no effect on this plan: what it moves to the host is counted here. "
            "Plan without it and with offload instead, which is planned as it is"
        )
    return tuple(notes)


_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


@contextmanager
def as_planning_errors(modules: nn.Module, read_at: Callable[[], str] = str) -> Iterator[None]:
    """Say of a step that does not run without data that it cannot be planned, and where it stopped.

    torch logs at length what it is about to raise; it is said here, in a sentence.

    Args:
        modules: what is trained, for the name of the module that was running.
        read_at: returns where the step had read a number or truth value from a tensor, empty if it had not.

    Raises:
        CannotPlanError: with why.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A branch on data may be why the loss has no graph. Every other UserError passes unchanged.
        if isinstance(error, UserError) and not (isinstance(error, LossError) and read_at()):
            raise
        first = next(iter(str(error).splitlines()), "")
        names = {id(module): name for name, module in modules.named_modules() if name}
        is_slip = isinstance(error, (AttributeError, ImportError, LookupError, NameError, TypeError))
        why = (
            "An error of this kind mostly comes with data too: run the loss on one batch."
            if is_slip
            else "What depends on the data, or on a kernel that torch has no description of, has to be run."
        )
        message = (
            "cannot plan, will probe: the step does not run on tensors without data "
            f"({type(error).__name__}: {first}){place(traceback.walk_tb(error.__traceback__), names)}. {why}"
        )
        if read_at():
            message += f" It had read a number or truth value that no tensor has here{read_at()}."
        raise CannotPlanError(message) from error
    finally:
        log.disabled = was_disabled


def place(frames: Iterable[tuple[FrameType, int]], names: Mapping[int, str] | None = None) -> str:
    """Return the innermost module and line that is neither torch's nor ours: ", in head (Head) at file.py:3".

    Args:
        frames: with the numbers of their lines, the innermost last.
        names: of modules by `id`, others are not looked at; None names any module of the user's by its class.
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
    """Whether a file is one of Python's own; installed packages lie below these, and are not."""
    return file.resolve().is_relative_to(_STANDARD) and "site-packages" not in file.parts
