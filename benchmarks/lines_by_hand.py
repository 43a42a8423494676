"""Lines to change in a plain PyTorch loop for each way of using devices: by hand, and with anybatch.

Each function is a complete and correct loop with exact divisors. `loss_share(model, micro_batch)` is the sum of the
micro-batch's losses divided by the count of the whole effective batch, so shares only have to be added. `steps` yields
this rank's micro-batches for each step. The set-up of several ranks (launcher, `init_process_group`, sampler) is the
same for all loops and omitted. The table of `anybatch compare` has these numbers.

    python benchmarks/lines_by_hand.py
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.core.batch import EffectiveBatch
from anybatch.core.loss import Loss
from anybatch.core.tree import Batch
from anybatch.engine.engine import Engine

LossShare = Callable[[Any, Batch], Tensor]
Steps = Iterable[Sequence[Batch]]
OptimizerFunction = Callable[[Iterable[nn.Parameter]], Optimizer]


def plain(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train on one device with unsplit batches: the loop that all others are compared with."""
    optimizer = make_optimizer(model.parameters())
    for (batch,) in steps:
        loss_share(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train on one device in micro-batches whose gradients add up."""
    optimizer = make_optimizer(model.parameters())
    for micro_batches in steps:
        for batch in micro_batches:
            loss_share(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train in one process with a replica on each device."""
    optimizer = make_optimizer(model.parameters())
    wrapper = nn.DataParallel(model)
    for (batch,) in steps:
        loss_share(wrapper, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train on several ranks, each with its samples as one micro-batch."""
    optimizer = make_optimizer(model.parameters())
    wrapper = DistributedDataParallel(model)
    for (batch,) in steps:
        # DDP divides by the number of ranks.
        (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_without_no_sync(
    model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps
) -> None:
    """Train on several ranks in micro-batches, and reduce after each: correct, but with many reductions."""
    optimizer = make_optimizer(model.parameters())
    wrapper = DistributedDataParallel(model)
    for micro_batches in steps:
        for batch in micro_batches:
            # DDP divides by the number of ranks.
            (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_accumulated(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train on several ranks in micro-batches, and reduce after the last one."""
    optimizer = make_optimizer(model.parameters())
    wrapper = DistributedDataParallel(model)
    for micro_batches in steps:
        for number, batch in enumerate(micro_batches, start=1):
            # Around the forward too, or DDP prepares a reduction in it.
            with nullcontext() if number == len(micro_batches) else wrapper.no_sync():
                # DDP divides by the number of ranks.
                (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def zero1(
    model: nn.Module, optimizer_class: type[Optimizer], settings: dict[str, Any], loss_share: LossShare, steps: Steps
) -> None:
    """Train as `ddp_accumulated` does, with optimizer state sharded over ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 (takes a second, and warns)

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **settings)
    wrapper = DistributedDataParallel(model)
    for micro_batches in steps:
        for number, batch in enumerate(micro_batches, start=1):
            # Around the forward too, or DDP prepares a reduction in it.
            with nullcontext() if number == len(micro_batches) else wrapper.no_sync():
                # DDP divides by the number of ranks.
                (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp(
    model: nn.Module,
    make_optimizer: OptimizerFunction,
    loss_share: LossShare,
    steps: Steps,
    blocks: Iterable[nn.Module] = (),
) -> None:
    """Train on several ranks with everything sharded, and reduce after the last micro-batch."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415 (takes two seconds)

    for block in blocks:
        fully_shard(block)
    root = fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Set on the root alone, the other modules would still average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    optimizer = make_optimizer(model.parameters())
    for micro_batches in steps:
        for number, batch in enumerate(micro_batches, start=1):
            root.set_requires_gradient_sync(number == len(micro_batches))
            root.set_is_last_backward(number == len(micro_batches))
            loss_share(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_engine(
    model: nn.Module, make_optimizer: OptimizerFunction, loss: Loss, batches: Iterable[EffectiveBatch], way: str
) -> None:
    """Train in any of these ways, chosen by the strategy's name."""
    engine = Engine(model, make_optimizer(model.parameters()), loss, micro_batch_size="auto", strategy=way)
    for batch in batches:
        engine.step(batch)


def lines_changed(loop: Callable[..., None]) -> int:
    """Return how many lines of a loop are not in `plain`: the lines to write to get from one to the other."""
    matcher = difflib.SequenceMatcher(a=_body(plain), b=_body(loop), autojunk=False)
    return sum(stop - start for kind, *_, start, stop in matcher.get_opcodes() if kind in ("insert", "replace"))


def _body(loop: Callable[..., None]) -> list[str]:
    lines = inspect.getsource(loop).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith('"""')) + 1
    return [line.strip() for line in lines[begin:] if line.strip() and not line.strip().startswith("#")]


if __name__ == "__main__":
    for loop in (accumulated, data_parallel, ddp, ddp_without_no_sync, ddp_accumulated, zero1, fsdp, with_engine):
        print(f"{loop.__name__:<20} {lines_changed(loop)}")
