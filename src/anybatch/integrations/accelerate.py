"""Effective batches in a script of Accelerate: `ab.windows(accelerator, loader, effective_batch_size=...)`.

A window is one effective batch. `accelerator.sync_gradients` is True only for its last micro-batch.
Private name: `_schedulers`; methods that are replaced: decision 0086.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.torch_internals import num_changes, uncompiled
from anybatch.core.tree import tensors_of
from anybatch.data.options import batch_samplers, upper_limit
from anybatch.errors import UserError, warn_user
from anybatch.integrations import loops
from anybatch.integrations.divisor import ItemCounter, StepItems
from anybatch.integrations.loops import Count, HostStep, Share, ShareLoader, World, share_loader

NUM_CHECKED_WINDOWS = 2  # must begin without gradients; the check waits for the device if these are zeros
HALVED = "_anybatch_micro_batch_size"  # of the script's loader: the size after out of memory, for later epochs
CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
WRONG_LOOPS: Mapping[str, str] = {
    "scale_outside": "window.scale() belongs into a loop over window.micro_batches(model)",
    "other_micro_batch": "no tensor of the batch given to window.scale() has as many rows as this micro-batch: "
    "pass the current micro-batch, and filter samples in the data set",
    "accumulate_inside": "the loop has changed accelerator.sync_gradients, so the optimizer would act too early: "
    "remove accelerator.accumulate()",
    "scaled_twice": "window.scale() has scaled this loss before, and would count it twice: keep its result",
    "not_scaled": "a micro-batch ended without window.scale(), so its loss has a wrong weight: call "
    "accelerator.backward(window.scale(loss, batch)) in every micro-batch",
    "incomplete_window": "the loop left window.micro_batches() before the last micro-batch, so the gradient is "
    "incomplete: leave it only if accelerator.sync_gradients is True",
    "unprepared_model": "the model's gradients would not be reduced over ranks: pass the model that "
    "accelerator.prepare() returned",
    "leftover_gradients": "the model has gradients before the first backward of the window, and both would be "
    "added: call optimizer.zero_grad() after optimizer.step()",
    "updated_within_window": "parameters have changed before the last micro-batch of the window: prepare the "
    "optimizer, so that its step() acts on the last micro-batch only",
    "cleared_gradients": "the gradients of a micro-batch were cleared or changed before the last one: call "
    "accelerator.backward(), then step() and zero_grad() of the prepared optimizer, in this order",
}


def windows(
    accelerator: Any,
    loader: DataLoader[Any],
    *,
    effective_batch_size: int,
    count: Count = None,
    epoch: int = 0,
    seed: int = 0,
    start: int = 0,
) -> "Windows":
    """Return the effective batches of an epoch, as windows of micro-batches, for a script of Accelerate.

    Each sample is used once, by one rank; the last window has the remaining samples (none with `drop_last`). Two forms:

        for window in ab.windows(accelerator, loader, effective_batch_size=512, epoch=epoch):
            for batch in window.micro_batches(model):
                accelerator.backward(window.scale(loss_function(model, batch), batch))
                optimizer.step(); scheduler.step(); optimizer.zero_grad()  # act on the last micro-batch only

        for window in ab.windows(accelerator, loader, effective_batch_size=512, epoch=epoch):
            loss = window.backward(lambda batch: loss_function(model, batch), model)  # repeated after out of memory
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

    The accelerator must have prepared model, optimizer and scheduler. In windows, `gradient_accumulation_steps` is 1,
    clipping acts on the last micro-batch only, and prepared schedulers step once per optimizer step (`split_batches`).

    Args:
        accelerator: the Accelerator.
        loader: the loader, before or after `accelerator.prepare`. Its batch size is the maximum size of a micro-batch.
        effective_batch_size: samples of an optimizer step, over all ranks.
        count: the items that the loss averages over, if the loss does not show them, as for `ab.exact`.
        epoch: number of the epoch; with the seed, it decides the order of samples.
        seed: seed of the order, and of the random numbers with which samples are loaded.
        start: windows to skip at the beginning of the epoch, to resume from a checkpoint.

    Raises:
        UserError: an option makes exact steps impossible; later, if the loop uses a window in a wrong way.
        DataError: the data set is iterable, or the loader has a custom batch sampler.
        LossError: the loss does not show which items it averages over, or shows others than `count`.
    """
    _refuse_types(accelerator, loader)
    ranks, size = accelerator.num_processes, upper_limit(loader)
    size = vars(loader).get(HALVED, ceil_div(size, ranks) if accelerator.split_batches else size)
    shares = share_loader(loader, effective_batch_size, size, World(accelerator.process_index, ranks), seed=seed)
    _refuse_options(accelerator, loader)  # after the data set, which decides how the loader is prepared
    shares.set_epoch(checked_int("epoch", epoch, minimum=0))
    reason = f"start={start}, but the epoch has {len(shares)} windows: pass the windows since its beginning"
    loops.refuse("ab.windows", {"start_beyond_epoch": reason * (checked_int("start", start, minimum=0) > len(shares))})
    counters = defaultdict[tuple[int, int], ItemCounter](lambda: ItemCounter(count))
    return Windows(accelerator, shares, counters, start, vars(loader), (seed, epoch))


@dataclass(eq=False)
class Windows:
    """The windows of an epoch, in order; `len()` is their number, without those that `start` skips."""

    accelerator: Any
    shares: ShareLoader
    counters: defaultdict[tuple[int, int], ItemCounter]
    start: int
    memory: dict[str, Any]
    _order: tuple[int, int]
    _steps: dict[int, HostStep] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shares) - self.start

    def __iter__(self) -> Iterator["Window"]:
        """Yield the windows."""
        finished = self.memory.setdefault("_anybatch_epochs", set())
        if self._order in finished:
            seed, epoch = self._order
            message = f"epoch {epoch} with seed {seed} was used before: pass ab.windows(..., epoch=) for another order."
            warn_user(message, "same_epoch")
        # Accelerate's function also works for loaders that it has not prepared.
        skip, data = import_module("accelerate").skip_first_batches, self.shares.dataset
        try:
            with _one_step_per_window(self.accelerator):
                for number, share in enumerate(skip(self.shares, self.start) if self.start else self.shares):
                    window = Window(self, data.at_current_size(share), is_early=number < NUM_CHECKED_WINDOWS)  # type: ignore[attr-defined]
                    yield window
                    window.check_finished()
                for counter in self.counters.values():
                    counter.settle()
        finally:
            for step in self._steps.values():
                step.close()
            self._steps.clear()
        finished.add(self._order)

    def step_of(self, model: nn.Module) -> HostStep:
        """Return the object that runs the windows of a model; ranks call it together."""
        if id(model) not in self._steps:
            self._steps[id(model)] = HostStep(model, self.accelerator.device)
        return self._steps[id(model)]


class Window:
    """This rank's micro-batches of one effective batch; `ids` are its samples in the data set, over all ranks."""

    def __init__(self, owner: Windows, share: Share, *, is_early: bool) -> None:
        self.ids = share.key.sample_ids
        self._owner = owner
        self._accelerator = owner.accelerator
        self._share = share
        self._is_early = is_early
        self._num_passes = 0
        self._batch, self._weight, self._is_last = None, 0.0, True  # of the micro-batch, as it was loaded
        self._losses: list[weakref.ref[Tensor]] | None = None  # of the micro-batch, before and after `scale`
        self._items: dict[tuple[int, int], StepItems] = {}
        self._total = torch.zeros((), device=owner.accelerator.device)
        self._guard = _Guard(())

    def micro_batches(self, model: nn.Module, *others: nn.Module) -> Iterator[Any]:
        """Yield the micro-batches, on the accelerator's device.

        Ranks have the same number of micro-batches. A rank with fewer samples repeats one, whose loss counts 0 times.
        The gradients of the prepared model, and of others that the loop trains, are reduced in the last micro-batch.
        """
        models = (model, *others)
        self._begin(models)
        last = len(self._share.micro_batches) - 1
        for number, (batch, weight) in enumerate(self._share.pairs):
            self._batch, self._weight, self._is_last, self._losses = batch, weight, number == last, []
            self._accelerator.sync_gradients = number == last
            with ExitStack() as stack:
                for module in models if number < last else ():
                    stack.enter_context(self._accelerator.no_sync(module))
                yield self._on_device(batch)
            self._check_scaled()
            if number < last:
                self._guard.end_micro_batch()

    def scale(self, loss: Tensor, batch: Any) -> Tensor:
        """Return the part of a micro-batch's loss, a mean over items, in that of the effective batch.

        Fields of the micro-batch may have been changed, but not its samples.
        """
        if self._losses is None:
            _refuse_loop("scale_outside")
        rows, found = ({len(tensor) for tensor in tensors_of(tree) if tensor.dim()} for tree in (self._batch, batch))
        if rows and found and not rows & found:
            _refuse_loop("other_micro_batch")
        if any(known() is loss for known in self._losses):
            _refuse_loop("scaled_twice")
        if not self._losses:
            if self._accelerator.sync_gradients is not self._is_last:
                _refuse_loop("accumulate_inside")
            self._guard.begin_backward(is_early=self._is_early)
        items = self._items_of((self._num_passes, len(self._losses) // 2), lambda: None)
        scaled, _ = items.weighted(loss, self._batch, self._weight)
        self._losses += [weakref.ref(loss), weakref.ref(scaled)]  # whose graphs are not kept alive
        self._total = self._total + scaled.detach()
        return scaled

    def backward(self, loss_function: Callable[[Any], Tensor], model: nn.Module) -> Tensor:
        """Run all micro-batches, reduce the gradient once, and return the loss of the effective batch over all ranks.

        The function is called with micro-batches on the accelerator's device, and returns a mean over items. After an
        out-of-memory error on any rank, all ranks repeat the window with micro-batches of half the size, unless a
        single sample does not fit (DoesNotFitError), or FSDP's ranks wait for each other (CannotRedoError).
        """
        self._begin((model,))
        step = self._owner.step_of(model)
        self._guard.begin_backward(is_early=self._is_early)
        self._accelerator.sync_gradients = True
        items = self._items_of((self._num_passes, 0), step.check_other_ranks)

        def run(batch: Any, weight: float) -> Tensor:
            scaled, _ = items.weighted(loss_function(self._on_device(batch)), batch, weight)
            self._accelerator.backward(scaled)
            return scaled

        shares: Any = self._owner.shares.dataset
        self._total = step.run(self._share, shares, run, lambda: None)
        if step.repeated:
            self._owner.memory[HALVED] = shares.micro_batch_size
        return self.loss()

    def loss(self) -> Tensor:
        """Return the loss of the effective batch over all ranks, after the last micro-batch; ranks call it together."""
        loss: Tensor = self._accelerator.reduce(self._total, "sum") / self._accelerator.num_processes
        return loss

    def check_finished(self) -> None:
        """Raise unless the loop has used no micro-batch, or all of them."""
        self._check_scaled()
        if not self._is_last:
            _refuse_loop("incomplete_window")

    def _begin(self, models: tuple[nn.Module, ...]) -> None:
        for model in map(uncompiled, models):
            if self._accelerator.num_processes > 1 and not isinstance(model, (DistributedDataParallel, FSDPModule)):
                _refuse_loop("unprepared_model")
        self.check_finished()
        self._losses, self._is_last = None, True
        self._num_passes += 1
        self._total = torch.zeros_like(self._total)
        self._guard = _Guard(models)

    def _check_scaled(self) -> None:
        if self._losses == []:
            _refuse_loop("not_scaled")

    def _items_of(self, key: tuple[int, int], check_other_ranks: Callable[[], None]) -> StepItems:
        """Return the items of a loss: the losses of a micro-batch are numbered, since each has its own items."""
        if key not in self._items:
            counter, ranks = self._owner.counters[key], self._accelerator.num_processes
            self._items[key] = StepItems(counter, self._share, self._accelerator.device, ranks, check_other_ranks)
        return self._items[key]

    def _on_device(self, batch: Any) -> Any:
        # Items are counted in the micro-batch as loaded, so the loop may remove fields from its copy.
        batch = copy.copy(batch) if isinstance(batch, Mapping) else batch
        if not self._accelerator.device_placement:
            return batch
        send_to_device = import_module("accelerate.utils").send_to_device
        return send_to_device(batch, self._accelerator.device, non_blocking=self._accelerator.non_blocking)


class _Guard:
    """Detects updates and cleared gradients between the micro-batches of a window."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        is_sharded = any(isinstance(uncompiled(model), FSDPModule) for model in models)
        # FSDP keeps gradients elsewhere until it reduces them.
        self._parameters = [] if is_sharded else [p for m in models for p in m.parameters() if p.requires_grad]
        self._last: tuple[list[int], list[int], list[int]] | None = None

    def begin_backward(self, *, is_early: bool) -> None:
        """Raise if gradients exist before the first backward, or have changed since the micro-batch before."""
        state = self._state()
        gradients = [parameter.grad for parameter in self._parameters if is_early and self._last is None]
        if any(bool(gradient.any()) for gradient in gradients if gradient is not None):
            _refuse_loop("leftover_gradients")
        if self._last not in (None, state):
            _refuse_loop("cleared_gradients")
        self._last = state

    def end_micro_batch(self) -> None:
        """Raise if the loop has updated parameters, or if there are no gradients."""
        state = self._state()
        if self._last is not None and state[0] != self._last[0]:
            _refuse_loop("updated_within_window")
        if self._parameters and not state[1]:
            _refuse_loop("cleared_gradients")
        self._last = state

    def _state(self) -> tuple[list[int], list[int], list[int]]:
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        weights, changes = (num_changes(tensors, "ab.windows") for tensors in (self._parameters, gradients))
        return weights, [id(gradient) for gradient in gradients], changes


def _refuse_loop(code: str) -> NoReturn:
    message = f"{WRONG_LOOPS[code]}."
    raise UserError(message, code=code)


@contextmanager
def _one_step_per_window(accelerator: Any) -> Iterator[None]:
    """Let backward, schedulers and clipping follow `accelerator.sync_gradients`; restore all but the schedulers."""

    def on_last(clip: Callable[..., Any]) -> Callable[..., Any]:
        def clip_on_last(*args: Any, **options: Any) -> Any:
            return clip(*args, **options) if accelerator.sync_gradients else torch.zeros((), device=accelerator.device)

        return clip_on_last

    steps, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, 1
    for scheduler in accelerator._schedulers:  # noqa: SLF001
        scheduler.split_batches = True
    try:
        with loops.replaced(accelerator, **{name: on_last(getattr(accelerator, name)) for name in CLIPPING}):
            yield
    finally:
        accelerator.gradient_accumulation_steps = steps
        accelerator.sync_gradients = True


def _refuse_types(accelerator: Any, loader: Any) -> None:
    is_accelerator = any(kind.__module__ == "accelerate.accelerator" for kind in type(accelerator).__mro__)
    if not is_accelerator or not isinstance(loader, DataLoader):
        message = (
            "ab.windows(accelerator, loader) takes an Accelerator and a DataLoader, not "
            f"{type(accelerator).__name__} and {type(loader).__name__}. For a Trainer, call ab.exact(trainer, ...)."
        )
        raise UserError(message, code="unsupported_trainer")
    loops.refuse_other_versions(["accelerate"])


def _refuse_options(accelerator: Any, loader: Any) -> None:
    kind, config = accelerator.distributed_type.value, accelerator.parallelism_config
    is_dispatched = isinstance(loader, import_module("accelerate.data_loader").DataLoaderDispatcher)
    reasons = {
        "deepspeed": "DeepSpeed sums the gradients itself: use DDP or FSDP2" * (kind == "DEEPSPEED"),
        "megatron": "Megatron-LM runs the step itself: use DDP or FSDP2" * (kind == "MEGATRON_LM"),
        "fsdp1": "FSDP1 is not supported: set fsdp_version=2" * (kind == "FSDP" and not accelerator.is_fsdp2),
        "xla": "XLA is not supported: use GPUs or CPUs" * (kind == "XLA"),
        "parallelism": "tensor, context and sequence parallelism are not supported: use data parallelism"
        * (config is not None and config.non_data_parallel_size > 1),
        "dispatch_batches": "every rank loads its own samples: set dispatch_batches=False"
        * bool(accelerator.dispatch_batches or is_dispatched),
        "skipped_batches": "the loader skips batches, not windows: pass the original loader, and start="
        * any(getattr(wrapper, "skip_batches", 0) for wrapper in [loader, *batch_samplers(loader)]),
    }
    loops.refuse("ab.windows", reasons)
