"""Effective batches in the loop of another library: a DataLoader of them, and the step of one.

The host (a trainer) owns the model wrapper, optimizer, clipping and loop. A step reduces gradients once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from anybatch.core.batch import Placement
from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.loss_kinds import Term
from anybatch.core.splitting import BatchPlan, SplitOptions
from anybatch.core.token_budget import TokenBudget
from anybatch.core.torch_internals import BufferKeeper, uncompiled
from anybatch.data.collate import KnownLengths, Lengths
from anybatch.data.indexed import sample_order, sampled_order
from anybatch.data.loading import UnitKey, UnitLoader
from anybatch.data.options import batch_samplers, check_sampler_order
from anybatch.data.random_state import HostDraws
from anybatch.engine.accumulate import Randomness
from anybatch.engine.micro_batch_size.oom_retry import free_cached_memory, release_frames
from anybatch.engine.updater import StepState
from anybatch.errors import BatchSizeError, CannotRedoError, DataError, DoesNotFitError, UserError, warn_user
from anybatch.norms.layers import batch_norms

Count = Term | Callable[[Any], Any] | None  # `count=`: a term, or a function of a micro-batch
KEPT = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers")
SHUFFLED = ("RandomSampler", "SeedableRandomSampler")  # torch's, and the one by which Accelerate replaces it
OTHER_RANK_FAILED = "another rank ran out of memory"
VERSIONS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("5.23.", "5.24."),
    "accelerate": ("1.14.", "1.15."),
    "lightning": ("2.5.", "2.6."),
    "trl": ("1.16.",),  # 1.15 needs a GPU, so the tests were not run with it
    "sentence_transformers": ("6.1.", "6.2."),
}
"""The versions with which the tests were run; others may have another loop."""
RunMicroBatch = Callable[[Any, float], Tensor]


class World(NamedTuple):
    """This rank, and the number of ranks."""

    rank: int
    num_ranks: int


class Tokens(NamedTuple):
    """A limit on the tokens of a micro-batch, and the lengths of the samples."""

    budget: TokenBudget
    lengths: Lengths


class StepKey(NamedTuple):
    """The samples of one effective batch, over all ranks."""

    epoch: int
    sample_ids: tuple[int, ...]


class Share(NamedTuple):
    """This rank's share of an effective batch."""

    key: StepKey
    micro_batches: list[Any]  # of the same number on all ranks, since some losses communicate
    weights: list[float]  # 1.0; 0.0 for a filler, a repeated micro-batch that must not count
    micro_batch_size: int  # the maximum, in samples or tokens

    @property
    def pairs(self) -> list[tuple[Any, float]]:
        """The micro-batches with their weights."""
        return list(zip(self.micro_batches, self.weights, strict=True))


class Shares(torch.utils.data.Dataset[Any]):
    """A data set whose items are shares of effective batches; it can be used in the workers of a DataLoader."""

    def __init__(self, loader: UnitLoader, limit: int | Tokens, world: World) -> None:
        self.loader, self._world = loader, world
        tokens, size = (limit, limit.budget.tokens) if isinstance(limit, Tokens) else (None, limit)
        self.micro_batch_size = checked_int("micro_batch_size", size, error=BatchSizeError)
        self.items = "tokens" if tokens else "samples"
        self._budget = tokens and tokens.budget
        collate = getattr(loader.collate, "data_collator", loader.collate)  # transformers' wrapper removes columns
        self._known = tokens and KnownLengths(tokens.lengths, collate, loader.dataset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.loader.dataset)

    def plan(self, ids: Sequence[int]) -> BatchPlan:
        """Return the micro-batches of all ranks for the samples of an effective batch."""
        split = SplitOptions(micro_batch_size=self.micro_batch_size, lockstep=True)
        budget = self._budget and replace(self._budget, current_tokens=self.micro_batch_size)
        placement = Placement(split, self._world.num_ranks, self._world.rank, budget)
        return placement.plan(len(ids), self._known.of(ids) if self._known else None)

    def __getitems__(self, key: StepKey) -> Share:
        """Load this rank's share of an effective batch."""
        plan = self.plan(key.sample_ids)
        units = plan.shares[self._world.rank]
        ids = [tuple(key.sample_ids[position] for position in plan.positions(unit)) for unit in units]
        loaded = [self.loader(UnitKey(key.epoch, of_unit)) for of_unit in ids]
        return Share(key, loaded, [unit.weight for unit in units], self.micro_batch_size)

    def at_current_size(self, share: Share) -> Share:
        """Return the share in micro-batches of the current size: a worker keeps the size that it started with."""
        return share if share.micro_batch_size <= self.micro_batch_size else self.__getitems__(share.key)

    def halve(self, share: Share, reason: str) -> Share:
        """Halve the micro-batch size from now on, and return the share, split again; raise if the size is 1."""
        ids = share.key.sample_ids
        plan, lengths = self.plan(ids), self._known.of(ids).occupied_tokens if self._known else [1] * len(ids)
        units = [plan.positions(unit) for unit in plan.units if unit.num_samples > 1]
        # A batch may be smaller than the limit.
        size = max((len(unit) * max(lengths[position] for position in unit) for unit in units), default=0)
        if not size:
            message = f"not even 1 sample at a time fits into memory. torch says: {reason}"
            raise DoesNotFitError(message, micro_batch_size=1)
        self.micro_batch_size = ceil_div(size, 2)
        return self.__getitems__(share.key)


class EffectiveBatchSampler:
    """Yields the sample ids of each effective batch of an epoch, in an order that does not depend on the ranks."""

    def __init__(
        self, num_samples: int, effective_batch_size: int, *, seed: int, sampler: Any, drop_last: bool = False
    ) -> None:
        self.epoch = 0
        self.num_skipped = 0  # effective batches that the next iteration leaves out; 0 again after it has begun
        self._size = checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
        self._num_samples, self._seed, self._sampler, self._drop_last = num_samples, seed, sampler, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of effective batches in an epoch."""
        return self._num_samples // self._size if self._drop_last else ceil_div(self._num_samples, self._size)

    def __iter__(self) -> Iterator[StepKey]:
        """Yield the effective batches of the current epoch."""
        epoch, ids = self.epoch, self._order()
        first, self.num_skipped = self.num_skipped, 0
        for number in range(first, len(self)):
            yield StepKey(epoch, tuple(ids[number * self._size : (number + 1) * self._size]))

    def _order(self) -> Sequence[int]:
        order = {"seed": self._seed, "epoch": self.epoch}
        shuffled = type(self._sampler).__name__ in SHUFFLED and not getattr(self._sampler, "replacement", False)
        if shuffled or isinstance(self._sampler, SequentialSampler):
            return sample_order(self._num_samples, shuffle=shuffled, **order).tolist()
        return sampled_order(self._sampler, self._num_samples, **order).tolist()


class ShareLoader(DataLoader[Any]):
    """A DataLoader over `Shares`; trainers call its `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def share_loader(
    loader: DataLoader[Any], effective_batch_size: int, limit: int | Tokens, world: World, *, seed: int
) -> ShareLoader:
    """Return a loader of effective batches with the data set, sampler, collate function and workers of another loader.

    The seed is that of the sample order, and of each sample's augmentation. Data without steps is a DataError.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        message = (
            f"effective_batch_size= needs a data set with a length and an index, not {type(dataset).__name__}: a step "
            "takes samples by number. Convert it, for example to a list. For streams, use ab.Engine with ab.shares, or "
            "ab.exact(trainer) without effective_batch_size."
        )
        raise DataError(message, code="iterable_data")
    batch_sampler = batch_samplers(loader)[-1]
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or sampler is None:
        message = (
            f"effective_batch_size= chooses the samples of each step, and so does the loader's batch sampler "
            f"({type(batch_sampler).__name__}). Pass a loader with a sampler instead."
        )
        raise DataError(message, code="batch_sampler")
    if not isinstance(sampler, RandomSampler):  # whose generator is not used
        check_sampler_order(sampler)
    drop_last = bool(batch_sampler.drop_last)
    steps = EffectiveBatchSampler(len(dataset), effective_batch_size, seed=seed, sampler=sampler, drop_last=drop_last)
    if not len(steps):
        remedy = ", and the loader drops them: set drop_last=False" * drop_last
        message = f"no step: {len(dataset)} samples are fewer than an effective batch ({effective_batch_size}){remedy}."
        raise DataError(message, code="no_step")
    return ShareLoader(
        Shares(UnitLoader(dataset, loader.collate_fn, seed), limit, world),
        batch_sampler=steps,  # type: ignore[arg-type]
        collate_fn=itself,
        **{name: getattr(loader, name) for name in KEPT},
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # seeds workers, for which each iteration would draw a global random number
    )


def itself(value: Any, *_: Any, **__: Any) -> Any:
    """Return the first argument."""
    return value


class OtherRankFailedError(Exception):
    """Another rank ran out of memory; raised inside a micro-batch, to leave it."""


def warn_batch_norms(model: nn.Module) -> None:
    """Warn if BatchNorm layers use the statistics of each micro-batch."""
    if training := [name for name, layer in batch_norms(model).items() if layer.training]:
        message = (
            f"{len(training)} BatchNorm layers (first {training[0]!r}) use the statistics of each micro-batch, "
            "not of the effective batch. Use GroupNorm, or ab.Engine(norms='exact') in a loop of your own."
        )
        warn_user(message, "batch_norm_by_micro_batch")


class HostStep:
    """Runs the micro-batches of one effective batch, with the model that the host calls: a module, DDP or FSDP2."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self._module = uncompiled(model)
        is_static = isinstance(self._module, DistributedDataParallel) and bool(self._module.static_graph)
        reason = "it reduces in fixed backwards, but a step reduces once: leave static_graph out"
        refuse("DDP(static_graph=True)", {"static_graph": reason * is_static})
        self.repeated = ""  # how the step was repeated, for a message
        self._device = device
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # A group of its own, so that a vote cannot be paired with a gradient.
        self._votes = dist.new_group(backend="gloo") if is_distributed else None
        self._state = StepState(BufferKeeper(model), Randomness(device).generators)
        warn_batch_norms(model)

    def run(self, share: Share, shares: Shares, run: RunMicroBatch, undo: Callable[[], None]) -> Tensor:
        """Accumulate the gradient of an effective batch, reduced once over ranks, and return the sum of the losses.

        After an out-of-memory error on any rank, all ranks repeat the step with micro-batches of half the size, unless
        a single sample does not fit (DoesNotFitError), or the model is sharded over ranks (CannotRedoError).
        `run` runs forward and backward of a micro-batch with a weight, and returns the loss whose gradient it added;
        `undo` restores all that it has changed, but gradients, buffers and random numbers.
        """
        share = shares.at_current_size(share)
        begin_step(self._module)
        draws, before, self.repeated = HostDraws(), shares.micro_batch_size, ""
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
            limit = f"{shares.micro_batch_size} {shares.items} instead of {before}"
            self.repeated = f"repeated with micro-batches of at most {limit}, also from now on"
        self._state.release()
        if not self._is_sharded:
            reduce_gradients(self._module)
        return total

    def _no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward does not reduce gradients over ranks."""
        if self._is_sharded:
            return fsdp_no_sync(self._module)
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else nullcontext()

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
        except (OtherRankFailedError, torch.OutOfMemoryError) as error:
            if self._is_sharded and self._votes is not None and isinstance(error, torch.OutOfMemoryError):
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


class _Zero(torch.autograd.Function):
    """Returns 0, as a function of parameters, with gradients of zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand_as(parameter) for parameter in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(ctx.zeros)


class _Zeros(nn.Module):
    """Stands in for the module inside of DDP for one call; it contains the module, whose buffers DDP collects."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, parameters: list[Tensor]) -> Tensor:
        """Return 0 as a function of the parameters."""
        return _Zero.apply(*parameters)  # type: ignore[no-any-return,no-untyped-call]


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
    try:
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def begin_step(model: nn.Module) -> None:
    """Run the collectives of DDP's first forward, for which ranks would wait if one ran out of memory before it."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync(), _zeros_inside(model):
            model([next(parameter for parameter in model.parameters() if parameter.requires_grad)])


def reduce_gradients(model: nn.Module) -> None:
    """Reduce the gradients of a DDP model over all ranks, with its hooks, by a backward of zeros through DDP."""
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


def refuse_other_versions(packages: Iterable[str]) -> None:
    """Raise UserError if one of the packages has a version without tests."""
    for package in VERSIONS.keys() & set(packages):
        version, tested = import_module(package).__version__, VERSIONS[package]
        if not version.startswith(tested):
            message = f"anybatch does not support {package} {version}: install {package} {tested[-1]}*."
            raise UserError(message, code="unsupported_version")


def print_line(line: str, *, on_this_rank: bool) -> None:
    """Print a line for the user."""
    if on_this_rank:
        print(f"anybatch: {line}", flush=True)  # noqa: T201 (for the user)


def refuse(function: str, reasons: Mapping[str, str], kind: type[UserError] = UserError) -> None:
    """Raise the first reason that is not empty; its key is the code of the error."""
    for code, reason in reasons.items():
        if reason:
            message = f"{function}: {reason}."
            raise kind(message, code=code)


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
