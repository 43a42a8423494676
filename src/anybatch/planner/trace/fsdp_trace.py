"""Memory of FSDP2 without devices: a plain accumulating loop over `fully_shard`, on fake tensors and fake ranks.

torch's own `fully_shard` is traced as it gathers, computes, reduces and frees, so that nothing about it is assumed
here: prefetched gathers, buffers kept for the next group, padding of dimensions that do not divide evenly.

    for number in range(accumulation_steps):
        loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from anybatch.core.blocks import repeated_blocks
from anybatch.core.loss import LossSum, declared
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.tree import Batch
from anybatch.engine.update.precision import OptimizerFunction
from anybatch.errors import PlanError
from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.torch_internals import tree_leaves
from anybatch.memory.trace import MemoryTrace
from anybatch.planner.torch_internals import local_part
from anybatch.planner.trace.cuda_emulation import allocating_as
from anybatch.planner.trace.data_reads import HostReads
from anybatch.planner.trace.fake_model import fake_batch, fake_twin
from anybatch.planner.trace.fake_ranks import fake_ranks
from anybatch.planner.trace.fake_tensor_cache import FakeLedger, fake_mode
from anybatch.planner.trace.step_spec import StepSpec, built
from anybatch.planner.trace.step_trace import as_planning_errors, without_garbage_collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP2 is used.

    Args:
        reshard_after_forward: whether a block frees its gathered weights after its forward and gathers them again in
            the backward.
        reshard_last_block: the same for the last block, whose backward comes first.
        param_dtype: what weights are gathered and computed in; None for their own.
        reduce_dtype: what gradients are reduced in; None for that of the gradients.
        accumulation_steps: micro-batches per optimizer step.
        defer: reduce in the last micro-batch only, and keep whole gradients until then; otherwise shards are reduced
            in every micro-batch.
    """

    reshard_after_forward: bool = True
    reshard_last_block: bool = True
    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    accumulation_steps: int = 2
    defer: bool = False


@dataclass(frozen=True, slots=True)
class ShardedTrace:
    """Allocations of one optimizer step of rank 0.

    Attributes:
        memory: the trace; memory from before the step comes first.
        pools: of each allocation, the stream whose pool it comes from: 0 is where the model computes. Memory that is
            freed in one pool is not used again in another.
    """

    memory: MemoryTrace
    pools: tuple[int, ...]


@without_garbage_collection()
def trace_sharded(spec: StepSpec, micro_batch_size: int, sharding: Sharding | None = None) -> ShardedTrace:
    """Trace the memory of an optimizer step on rank 0 of `spec.world_size`, without ranks and without data.

    Rank 0 holds the most where something does not divide evenly. Of the spec, its model, optimizer, loss, sample,
    world size and profile count: the engine has no such strategy yet, so number formats are those of `sharding`, and
    nothing is clipped. An optimizer whose `foreach` is left open works on one shard after the other, as on CUDA.

    Args:
        spec: what is trained; its optimizer must be a function, since sharding makes new parameters.
        micro_batch_size: samples of each micro-batch of a rank.
        sharding: how it is sharded; None for the defaults.

    Raises:
        PlanError: the spec cannot be sharded.
        CannotPlanError: the step cannot run without data, or this process is in a real process group.
    """
    sharding = sharding or Sharding()
    ready, _ = built(spec)
    refuse_what_cannot_be_sharded(ready)
    mode = fake_mode()
    model, loss = fake_twin((cast("nn.Module", ready.trained.model), declared(ready.trained.loss).function), mode)
    model.train()
    batch = partial(fake_batch, ready.sample, micro_batch_size, mode)
    ledger = FakeLedger(mode, pool=_Pools(), cache=spec.cache)
    reads = HostReads(lambda: ledger.current_phase)
    with fake_ranks(spec.world_size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real run shows them
        mesh = init_device_mesh("cpu", (spec.world_size,))
        with as_planning_errors(), mode, reads, allocating_as(spec.profile):
            shard(model, mesh, sharding)
            # Sharding replaces the parameters, so the optimizer is made after it.
            optimizer = cast("OptimizerFunction", ready.trained.optimizer)(model.named_parameters())
            loop = ShardedLoop(model, optimizer, loss, batch, sharding)
            loop.begin()
            return loop.trace(ledger)


def refuse_what_cannot_be_sharded(spec: StepSpec) -> None:
    """Refuse a spec that FSDP2 has no form for.

    Args:
        spec: the step, whose model is made.

    Raises:
        PlanError: says what stands in the way.
    """
    train, what = spec.trained, ""
    if spec.world_size < 2:  # noqa: PLR2004 (one rank has no other to share with)
        what = f"world_size={spec.world_size} leaves nothing to share: it must be at least 2"
    elif not isinstance(train.model, nn.Module):
        what = f"the model is a {type(train.model).__name__}: it must be one module, whose forward gathers its weights"
    elif isinstance(train.optimizer, Optimizer):
        what = "the optimizer is made already: it must be a function named_parameters -> optimizer, for the shards"
    elif declared(train.loss).kind.encode is not None:
        what = "the loss looks at the outputs of all samples: it must be one that is computed per micro-batch"
    if what:
        message = f"FSDP2 cannot be planned for this spec, since {what}."
        raise PlanError(message)


def shard(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shard every block, then the rest of the model.

    Args:
        model: changed in place.
        mesh: of one axis, over all ranks.
        sharding: number formats, and which blocks gather their weights again.
    """
    policy = MixedPrecisionPolicy(param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype)
    blocks = [block for row in repeated_blocks(model) for block in row.modules]
    # Blocks first: on the root, `fully_shard` takes the parameters that no block has taken.
    for block in blocks:
        reshard = sharding.reshard_after_forward and (sharding.reshard_last_block or block is not blocks[-1])
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@dataclass(frozen=True, slots=True)
class ShardedLoop:
    """The plain loop over a model that is sharded, with or without data.

    Args:
        model: the root of what `fully_shard` was called on.
        optimizer: over its shards.
        loss: function (model, batch) -> one number, one per item, `LossSum`, or a dict of those.
        batch: function () -> micro-batch.
        sharding: when gradients are reduced, and how many micro-batches there are.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: LossFunction
    batch: Callable[[], Batch]
    sharding: Sharding

    def begin(self) -> None:
        """Take what all later steps find there: gather each weight once, and update once, without a gradient.

        The first update makes the optimizer's state. It also works out, with tensors of whole size, how operations on
        shards are sharded, and remembers that; in a trace these would look like memory.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trace(self, ledger: MemoryLedger) -> ShardedTrace:
        """Run one step, with the optimizer's state there already, and return its allocations.

        Args:
            ledger: that has not been entered.
        """
        ledger.phase = "setup"
        ledger.hold("weights", map(local_part, self.model.parameters()))
        ledger.hold("buffers", self.model.buffers())
        ledger.hold("optimizer", map(local_part, _tensors(list(self.optimizer.state.values()))))
        ledger.phase = None
        try:
            with resizes_booked(ledger), ledger:
                self.step(ledger)
        finally:
            ledger.forget()
        return ShardedTrace(_with_gradients(ledger.trace()), ledger.pools)

    def step(self, ledger: MemoryLedger) -> None:
        """Run one optimizer step, and mark its phases and micro-batches in the ledger."""
        root = cast("FSDPModule", self.model)
        for number in range(self.sharding.accumulation_steps):
            last = number == self.sharding.accumulation_steps - 1
            reduce = last or not self.sharding.defer
            # Deferring keeps whole gradients until the last micro-batch: less traffic for more memory.
            root.set_requires_gradient_sync(reduce)
            # A backward that reduces, but is not said to be the last, keeps its last buffer into the next forward.
            root.set_is_last_backward(reduce)
            ledger.mark(f"micro-batch {number} begins")
            batch = self.batch()
            ledger.hold("inputs", _tensors(batch))
            loss = _total(self.loss(self.model, batch))
            loss.backward()
            # The next micro-batch is loaded before these names are assigned again, and would be in memory beside them.
            del loss, batch
            ledger.mark(f"micro-batch {number} ends")
        ledger.phase = "update"
        ledger.mark("update begins")
        self.optimizer.step()
        self.optimizer.zero_grad()
        ledger.mark("update ends")
        ledger.phase = None


def _total(output: Any) -> torch.Tensor:  # noqa: ANN401 (whatever a loss function returns)
    """Return one number for any form of loss. Its divisor is left out: it takes no memory to speak of."""
    if isinstance(output, Mapping):
        return torch.stack([_total(value) for value in output.values()]).sum()
    total: torch.Tensor = output.total if isinstance(output, LossSum) else output
    return total.sum() if total.dim() else total


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_gradients(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace in which what a backward has made and left is gradients."""
    gone_at = {-event - 1: position for position, event in enumerate(trace.events) if event < 0}
    ends = [position for position, name in trace.marks if name.startswith("micro-batch") and name.endswith("ends")]
    kept = set()
    for position, event in enumerate(trace.events):
        one = trace.allocations[abs(event) - 1]
        if event > 0 and one.phase == "backward" and one.category == "temporaries":
            # A backward's result that is still there when its micro-batch ends is a gradient; the rest was temporary.
            end = next((end for end in ends if end > position), None)
            if end is not None and gone_at.get(event - 1, end) >= end:
                kept.add(event - 1)
    allocations = (
        replace(one, category="gradients") if number in kept else one for number, one in enumerate(trace.allocations)
    )
    return replace(trace, allocations=tuple(allocations))


class _Pools:
    """Numbers the streams in which memory is taken, in the order in which they are first seen.

    FSDP2 takes its buffers for gathering and reducing in streams of their own, and CPU streams, which do nothing else,
    say which one is current.
    """

    def __init__(self) -> None:
        self._streams: list[Any] = [torch.cpu.current_stream()]

    def __call__(self) -> int:
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)


@contextmanager
def resizes_booked(ledger: MemoryLedger) -> Iterator[None]:
    """Record resized storages, too: that is how FSDP2 frees gathered weights, and it is no operation."""
    storage_class: Any = torch.UntypedStorage
    resize = storage_class.resize_

    def resize_and_book(storage: torch.UntypedStorage, num_bytes: int) -> Any:  # noqa: ANN401 (what torch returns)
        resized = resize(storage, num_bytes)
        ledger.resized("weights", storage)
        return resized

    storage_class.resize_ = resize_and_book
    try:
        yield
    finally:
        storage_class.resize_ = resize
