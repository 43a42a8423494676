"""What a trace would not see, refused before it is made."""

from collections.abc import Callable

from torch import nn

from anybatch.errors import CannotPlanError
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
