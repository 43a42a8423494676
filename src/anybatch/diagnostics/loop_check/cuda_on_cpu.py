"""Lets a loop that names CUDA, joins a process group or scales its loss run where it is judged: on the CPU of one host.

Tensors that are asked to go to "cuda" stay where they are. A few functions of torch, which need a driver or a launcher,
are replaced meanwhile; so this is for a process that runs nothing but the loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_STAYS = frozenset({Tensor.cuda, Tensor.pin_memory})
_NOTHING_TO_DO = ("synchronize", "set_device", "reset_peak_memory_stats", "init")


class CudaOnCpu(TorchFunctionMode):
    """Makes "cuda" mean the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the function returns)
        """Run a function of torch with its devices replaced."""
        if func in _STAYS:
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:  # noqa: ANN401 (any argument)
    is_cuda = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_cuda else value


@contextmanager
def cuda_on_cpu(loss_scale: float) -> Iterator[None]:
    """Stand in for CUDA, for joining a group that is joined already, and for the scale of every GradScaler.

    Args:
        loss_scale: what gradient scalers that the loop makes multiply losses with.
    """
    make_scaler = torch.amp.GradScaler.__init__

    def make_on_cpu(scaler: Any, device: str = "cpu", init_scale: float = 0.0, **kwargs: Any) -> None:  # noqa: ANN401, ARG001
        make_scaler(scaler, "cpu", loss_scale, **kwargs)

    def nothing(*_args: object, **_kwargs: object) -> None:
        """Do nothing."""

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.amp.GradScaler, "__init__", make_on_cpu))
        for name in _NOTHING_TO_DO:
            stack.enter_context(replaced(torch.cuda, name, nothing))
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: 0))
        if dist.is_initialized():
            stack.enter_context(replaced(dist, "init_process_group", nothing))
            stack.enter_context(replaced(dist, "destroy_process_group", nothing))
        stack.enter_context(CudaOnCpu())
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:  # noqa: ANN401 (a module or a class)
    """Let an attribute be another one meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
