"""Hand-written training loops in plain PyTorch, one for each way and one with anybatch, and the compared ways.

Each function is a complete and correct loop with exact divisors. `loss_share(model, micro_batch)` is the sum of the
micro-batch's losses divided by the count of the whole effective batch, so shares only have to be added. `steps` yields
this rank's micro-batches for each step. The set-up of several ranks (launcher, `init_process_group`, sampler) is the
same for all loops and omitted.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.core.batch import EffectiveBatch
from anybatch.core.geometry import ceil_div
from anybatch.core.loss import Loss
from anybatch.core.tree import Batch
from anybatch.engine.engine import Engine
from anybatch.errors import BatchSizeError

LossShare = Callable[[Any, Batch], Tensor]
Steps = Iterable[Sequence[Batch]]
OptimizerFunction = Callable[[Iterable[nn.Parameter]], Optimizer]
Wrap = Callable[[nn.Module], DistributedDataParallel]
"""Makes the wrapper: torch's class, unless its reductions are watched."""
_DDP: Wrap = DistributedDataParallel


def plain(model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps) -> None:
    """Train on one device with the batch as it comes: the loop that all others are compared with."""
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
    """Train on several ranks, each with its share in one piece."""
    optimizer = make_optimizer(model.parameters())
    wrapper = DistributedDataParallel(model)
    for (batch,) in steps:
        # DDP divides by the number of ranks.
        (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_without_no_sync(
    model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps, wrap: Wrap = _DDP
) -> None:
    """Train on several ranks in micro-batches, and reduce after each: correct, but with many reductions."""
    optimizer = make_optimizer(model.parameters())
    wrapper = wrap(model)
    for micro_batches in steps:
        for batch in micro_batches:
            # DDP divides by the number of ranks.
            (loss_share(wrapper, batch) * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_accumulated(
    model: nn.Module, make_optimizer: OptimizerFunction, loss_share: LossShare, steps: Steps, wrap: Wrap = _DDP
) -> None:
    """Train on several ranks in micro-batches, and reduce after the last one."""
    optimizer = make_optimizer(model.parameters())
    wrapper = wrap(model)
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
    """Train as `ddp_accumulated` does, with optimizer states shared out over ranks."""
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
            # On the root alone the others would still average.
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
    """Train in any of these ways: the strategy has a name."""
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


Cut = Literal["small", "whole", "micro-batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of using devices."""

    name: str
    strategy: str | None  # of the engine; None: a loop by hand
    num_devices: int
    num_ranks: int
    num_samples: int  # of one update
    micro_batch_size: int  # at most, per forward on a rank
    lines_by_hand: int  # changed lines in a plain loop
    lines_with_anybatch: int
    unmeasured: str = ""  # why it is not measured

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the largest rank share."""
        return ceil_div(ceil_div(self.num_samples, self.num_ranks), self.micro_batch_size)


_WAYS: tuple[tuple[str, str | None, bool, Cut, Callable[..., None]], ...] = (
    ("small batch", "single", False, "small", plain),
    ("native", "single", False, "whole", plain),
    ("accumulated", "single", False, "micro-batches", accumulated),
    ("DataParallel", "data_parallel", True, "whole", data_parallel),
    ("DDP", "ddp", True, "whole", ddp),
    ("DDP without no_sync", None, True, "micro-batches", ddp_without_no_sync),
    ("DDP accumulated", "ddp", True, "micro-batches", ddp_accumulated),
    ("all_reduce accumulated", "all_reduce", True, "micro-batches", ddp_accumulated),
    ("ZeRO-1 accumulated", "zero1", True, "micro-batches", zero1),
    ("FSDP accumulated", "fsdp", True, "micro-batches", fsdp),
)
"""Name, strategy, whether it uses all devices, how the batch is cut, and the loop by hand."""


def ways_of(*, effective_batch_size: int, micro_batch_size: int, num_devices: int) -> tuple[Way, ...]:
    """Return the ways of training with one effective batch size."""
    if not 1 <= micro_batch_size <= effective_batch_size:
        message = f"{micro_batch_size=} must be from 1 to the {effective_batch_size} samples of the batch."
        raise BatchSizeError(
            message,
            code="size_out_of_range",
            effective_batch_size=effective_batch_size,
            micro_batch_size=micro_batch_size,
        )
    if num_devices > effective_batch_size:
        message = f"{effective_batch_size=} is less than one sample for each of {num_devices} devices."
        raise BatchSizeError(
            message, code="too_few_samples", effective_batch_size=effective_batch_size, world_size=num_devices
        )
    with_anybatch = lines_changed(with_engine)
    ways = []
    for name, strategy, uses_all, cut, loop in _WAYS:
        num_ranks = num_devices if uses_all and strategy != "data_parallel" else 1
        num_samples = micro_batch_size if cut == "small" else effective_batch_size
        share = ceil_div(num_samples, num_ranks)
        unmeasured = ""
        if uses_all and num_devices == 1:
            unmeasured = "it needs several devices, and one is used"
        elif cut == "micro-batches" and micro_batch_size >= share:
            unmeasured = f"a share of {share} samples is one micro-batch, so nothing is accumulated"
        ways.append(
            Way(
                name=name,
                strategy=strategy,
                num_devices=num_devices if uses_all else 1,
                num_ranks=num_ranks,
                num_samples=num_samples,
                micro_batch_size=min(share, micro_batch_size if cut == "micro-batches" else share),
                lines_by_hand=lines_changed(loop),
                lines_with_anybatch=0 if loop is plain else with_anybatch,
                unmeasured=unmeasured,
            )
        )
    return tuple(ways)
