"""One effective batch in the loop of another library: one reduction of gradients, and repeats after out of memory.

The host (a trainer) owns the model wrapper, optimizer, clipping and loop. This module runs a step's micro-batches.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.torch_internals import BufferKeeper
from anybatch.data.random_state import HostDraws
from anybatch.engine.micro_batch_size.oom_retry import free_cached_memory, release_frames
from anybatch.engine.updater import StepState
from anybatch.errors import CannotRedoError, UserError, warn_user
from anybatch.integrations.effective_batches import Share, Shares
from anybatch.norms.layers import batch_norms

OTHER_RANK_FAILED = "another rank ran out of memory"
NoSync = Callable[[], AbstractContextManager[Any]]
RunMicroBatch = Callable[[Any, float], Tensor]


class OtherRankFailedError(Exception):
    """Another rank ran out of memory; raised inside a micro-batch, to leave it."""


def warn_batch_norms(model: nn.Module) -> None:
    """Warn if BatchNorm layers use the statistics of each micro-batch."""
    training = [name for name, layer in batch_norms(model).items() if layer.training]
    if training:
        message = (
            f"{len(training)} BatchNorm layers (first {training[0]!r}) use the statistics of each micro-batch, "
            "not of the effective batch. Use GroupNorm, or ab.Engine(norms='exact') in a loop of your own."
        )
        warn_user(message, "batch_norm_by_micro_batch")


class HostStep:
    """Runs the micro-batches of one effective batch after another.

    The model is the one that the host calls: a module, DDP or a module after FSDP2's `fully_shard`. `no_sync` returns a
    context in which a backward does not reduce gradients over ranks.
    """

    def __init__(self, model: nn.Module, device: torch.device, no_sync: NoSync) -> None:
        if isinstance(model, DistributedDataParallel) and model.static_graph:
            message = (
                "DDP(static_graph=True) reduces in fixed backwards, but a step reduces once: leave static_graph out."
            )
            raise UserError(message, code="static_graph")
        self.model = model
        self.was_repeated = False
        self._device = device
        self._no_sync = no_sync
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # A group of its own, so that a vote cannot be paired with a gradient.
        self._votes = dist.new_group(backend="gloo") if is_distributed else None
        generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        self._state = StepState(BufferKeeper(model), generators)
        warn_batch_norms(model)

    def run(self, share: Share, shares: Shares, run: RunMicroBatch, undo: Callable[[], None]) -> Tensor:
        """Accumulate the gradient of an effective batch, reduced once over ranks, and return the sum of the losses.

        After an out-of-memory error on any rank, all ranks repeat the step with micro-batches of half the size.

        Args:
            share: this rank's share.
            shares: the data set of the share.
            run: runs forward and backward of a micro-batch with this weight; returns the loss whose gradient it added.
            undo: called before the step is repeated; restores all that `run` has changed but gradients, buffers and
                random numbers.

        Raises:
            DoesNotFitError: a single sample does not fit.
            CannotRedoError: an FSDP model on several ranks ran out of memory.
        """
        share = shares.at_current_size(share)
        begin_step(self.model)
        draws, self.was_repeated = HostDraws(), False
        self._state.keep()
        while True:
            total, reason = self._attempt(share, run)
            # A rank that another rank's error has stopped has voted already, in `check_other_ranks`.
            if reason != OTHER_RANK_FAILED and not self.any_rank(failed=reason is not None):
                break
            free_cached_memory(self._device)
            self.model.zero_grad()  # a failed backward has added to some gradients
            self._state.restore()
            draws.restore()
            undo()
            share = shares.halve(share, reason or OTHER_RANK_FAILED)
            self.was_repeated = True
        self._state.release()
        if not self._is_sharded:
            reduce_gradients(self.model)
        return total

    def _attempt(self, share: Share, run: RunMicroBatch) -> tuple[Tensor, str | None]:
        """Run all micro-batches; return the sum of the losses, and the message of an out-of-memory error."""
        total, reason = torch.zeros((), device=self._device), None
        last = len(share.micro_batches) - 1
        try:
            for number, (batch, weight) in enumerate(share.pairs):
                # FSDP can reduce only in a backward; all others after the vote.
                reduces = self._is_sharded and number == last
                with nullcontext() if reduces else self._no_sync():
                    total = total + run(batch, weight).detach()
        except OtherRankFailedError as error:
            release_frames(error)
            reason = str(error)
        except torch.OutOfMemoryError as error:
            if self._is_sharded and self._votes is not None:
                message = (
                    f"out of memory in micro-batches of {share.micro_batch_size} samples. With FSDP the step cannot be "
                    "repeated, because other ranks wait in its collectives. Resume from the last checkpoint with a "
                    f"smaller micro-batch size. torch says: {error}"
                )
                raise CannotRedoError(message, micro_batch_size=share.micro_batch_size) from error
            reason = str(error)
            release_frames(error)
        return total, reason

    def any_rank(self, *, failed: bool) -> bool:
        """Return whether this or another rank has failed."""
        if self._votes is None:
            return failed
        flag = torch.tensor(float(failed))
        dist.all_reduce(flag, group=self._votes)
        return bool(flag)

    def close(self) -> None:
        """Destroy the group of the votes, on all ranks."""
        if self._votes is not None and dist.is_initialized():
            dist.destroy_process_group(self._votes)
            self._votes = None

    def check_other_ranks(self) -> None:
        """Raise OtherRankFailedError if another rank has failed; call it before a collective inside a micro-batch."""
        if self.any_rank(failed=False):
            raise OtherRankFailedError(OTHER_RANK_FAILED)


class _ZeroOf(torch.autograd.Function):
    """0 as a function of parameters, with gradients of zeros that take no memory."""

    @staticmethod
    def forward(context: Any, *parameters: Tensor) -> Tensor:
        """Return 0."""
        context.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, ...]:
        """Return zeros for each parameter."""
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in context.saved_tensors)


class _Zeros(nn.Module):
    """Stands in for the module inside of DDP for one call; it contains the module, whose buffers DDP collects."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, parameters: list[Tensor]) -> Tensor:
        """Return 0, as a function of the parameters."""
        zero: Tensor = _ZeroOf.apply(*parameters)  # type: ignore[no-untyped-call]  # torch's
        return zero


@contextmanager
def _zeros_inside(model: DistributedDataParallel) -> Iterator[None]:
    module, model.module = model.module, _Zeros(model.module)
    try:
        yield
    finally:
        model.module = module


@contextmanager
def fsdp_no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards add to the gradients of each rank, without a reduction, in modules after FSDP2's `fully_shard`."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def begin_step(model: nn.Module) -> None:
    """Run the collectives of DDP's first forward in a step, which are the broadcast of buffers and new buckets.

    In a forward of the user, a rank that ran out of memory before it would leave the other ranks waiting.
    """
    if isinstance(model, DistributedDataParallel):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with model.no_sync(), _zeros_inside(model):
            model(parameters[:1])


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the accumulated gradients of a DDP model over ranks, once, by a backward of zeros through DDP.

    DDP's buckets and communication hooks are used. Ranks without samples take part too.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.find_unused_parameters:
        # Zeros for a parameter that no rank used would replace None, and the optimizer would move it.
        parameters = [parameter for parameter in parameters if parameter.grad is not None] or parameters[:1]
    with _zeros_inside(model):
        model(parameters).backward()


def gather_objects(value: Any) -> list[Any]:
    """Return the value of each rank; ranks call it together."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_ragged(gather: Callable[[Tensor], Tensor], tensor: Tensor, *, counts: bool) -> Tensor:
    """Gather rows over ranks whose numbers of rows differ; a rank contributes none unless its micro-batch counts."""
    rows = torch.atleast_1d(tensor)[: None if counts else 0]
    lengths = gather(torch.tensor([len(rows)], device=tensor.device)).tolist()
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = gather(padded).split(max(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def refuse(function: str, reasons: Mapping[str, str]) -> None:
    """Raise the first reason that is not empty; its key is the code of the error."""
    for code, reason in reasons.items():
        if reason:
            message = f"{function}: {reason}."
            raise UserError(message, code=code)


def print_line(line: str, *, is_first_rank: bool) -> None:
    """Print a line for the user, on one rank."""
    if is_first_rank:
        print(f"anybatch: {line}", flush=True)  # noqa: T201 (for the user)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object within the context."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)


def copied_state(value: Any) -> Any:
    """Return a copy of nested dicts and lists, which shares their numbers (a deep copy takes 100 times as long)."""
    if isinstance(value, dict):
        twin = copy.copy(value)  # also of a defaultdict
        twin.update({key: copied_state(entry) for key, entry in value.items()})
        return twin
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
