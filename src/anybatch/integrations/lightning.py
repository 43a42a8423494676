"""Lightning: a callback for its `Trainer`, after which each batch of the fit loop is one effective batch.

The callback replaces two methods of the fit loop: one that returns the training loader, and one that makes the closure
of the optimizer, which now runs all micro-batches. The user's module is not changed.
Private names (decision 0087): `_data_source`, `_make_closure`, `_training_step`, `_make_zero_grad_fn`,
`_make_backward_fn`, `_on_before_batch_transfer`, `_results`, `_update_count`, `_computed`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from anybatch.core.geometry import checked_int
from anybatch.core.tree import copied
from anybatch.data.options import upper_limit
from anybatch.errors import BatchSizeError, DataError, LossError, UserError
from anybatch.integrations import loops
from anybatch.integrations.divisor import ItemCounter, StepItems
from anybatch.integrations.loops import Count, HostStep, Share, Tokens, World, share_loader


class ExactSteps(pl.Callback):  # type: ignore[misc]
    """Makes each batch of the fit loop an effective batch; the loader's batch size limits that of micro-batches."""

    def __init__(self, effective_batch_size: int, count: Count, tokens: Tokens | None) -> None:
        loops.refuse_other_versions(["lightning"])
        self.effective_batch_size = checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
        self.count, self.tokens = count, tokens
        self.seed = 0
        self.saved: dict[str, int] = {}
        self.loader: _Loader | None = None
        self._host_step: HostStep | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be exact, and replace the source of the training loader."""
        if stage == "fit":
            _refuse(trainer, pl_module)
            self.seed = trainer.strategy.broadcast(torch.initial_seed() % 2**32)
            source = trainer.fit_loop._data_source  # noqa: SLF001 (see above)
            source.dataloader = lambda: _Loader(type(source).dataloader(source), self, trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the closure of the optimizer."""
        self._host_step = HostStep(trainer.strategy.model, trainer.strategy.root_device)
        steps = _Steps(self, trainer, pl_module, self._host_step)
        steps.automatic._make_closure = steps.make_closure  # noqa: SLF001
        self.on_train_end = lambda *_: steps.counter.settle()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch after a complete one; with `max_steps`, Lightning would resume the complete one instead."""
        del pl_module
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if trainer.ckpt_path and progress.current.completed >= trainer.num_training_batches:
            progress.reset_on_run()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the fit loop."""
        del pl_module
        if stage == "fit" and self._host_step is not None:
            self._host_step.close()
            vars(trainer.fit_loop._data_source).pop("dataloader")  # noqa: SLF001
            vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the numbers that decide the samples of each step; Lightning limits a `state_dict` to one callback."""
        del trainer, pl_module
        if self.loader is not None:
            checkpoint["callbacks"][self.state_key] = {"seed": self.seed, **self.loader.geometry}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue with the order of the samples in a checkpoint."""
        self.saved = dict(state_dict)
        self.seed = self.saved.pop("seed")
        if self.loader is not None:
            self.loader.build()

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse transformers' Trainer, which calls this and, for a callback that was added later, `on_train_begin`."""
        message = "this is a callback for Lightning. For transformers' Trainer, call ab.exact(trainer, ...) instead."
        raise UserError(message, code="not_lightning")

    on_train_begin = on_init_end


class _Loader:
    """The training loader: yields the first micro-batch of each effective batch, and keeps all for the closure.

    Lightning moves the yielded micro-batch to the device and passes it to hooks. It adds a `DistributedSampler` only to
    loaders of torch, so not to this one.
    """

    def __init__(self, loader: Any, callback: ExactSteps, trainer: Any) -> None:
        if not isinstance(loader, DataLoader):
            found = type(loader).__name__
            message = f"ab.exact needs one torch DataLoader, not {found}: join data sets with ConcatDataset."
            raise DataError(message, code="not_one_loader")
        self.dataset: Any = loader.dataset
        self._user_loader, self._callback, self._trainer = loader, callback, trainer
        self.build()
        callback.loader = self

    def build(self) -> None:
        """Create the loader of shares, and once more when a checkpoint has set the seed."""
        loader, options = self._user_loader, self._callback
        limit, world = options.tokens or upper_limit(loader), World(self._trainer.global_rank, self._trainer.world_size)
        self._loader = share_loader(loader, options.effective_batch_size, limit, world, seed=options.seed)
        self.shares: Any = self._loader.dataset
        self.sampler: Any = self._loader.batch_sampler  # whose `set_epoch` Lightning calls
        self.geometry = {"effective_batch_size": options.effective_batch_size, "num_samples": len(self.dataset)}

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield from the first effective batch after Lightning's progress in the epoch.

        Lightning sets the epoch and its progress after it has called this function, and before the first `next`.
        """
        callback, trainer = self._callback, self._trainer
        self.sampler.num_skipped = trainer.fit_loop.epoch_loop.batch_idx + 1
        is_other = bool(self.sampler.num_skipped and trainer.ckpt_path and callback.saved != self.geometry)
        reason = (
            f"the checkpoint is from within an epoch with {callback.saved or 'other batches'}, but this run has "
            f"{self.geometry}, so its steps have other samples. Resume from the end of an epoch"
        )
        loops.refuse("ab.exact", {"other_effective_batches": reason * is_other})
        for share in self._loader:
            self.share: Share = self.shares.at_current_size(share)
            yield self.share.micro_batches[0]

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, since Lightning saves the progress; it warns about loaders without this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""


class _Steps:
    """Runs effective batches in the closure of Lightning's optimizer."""

    def __init__(self, callback: ExactSteps, trainer: Any, module: Any, host_step: HostStep) -> None:
        self.automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        self.trainer, self.module, self.host_step, self._callback = trainer, module, host_step, callback
        self.counter = ItemCounter(callback.count)
        self._print = partial(loops.print_line, on_this_rank=trainer.is_global_zero)
        self.device: torch.device = trainer.strategy.root_device
        self.metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._make_closure = partial(type(self.automatic)._make_closure, self.automatic)  # noqa: SLF001

    def make_closure(self, kwargs: dict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Return a closure that runs a whole effective batch, where Lightning's would run one batch."""
        closure = self._make_closure(kwargs, optimizer, batch_idx)
        return type(closure)(step_fn=partial(self._run, kwargs, optimizer, batch_idx))

    def _run(self, kwargs: dict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Accumulate the gradient of an effective batch; return Lightning's result, with the loss of all samples."""
        trainer, loader, is_new = self.trainer, self._callback.loader, not self.counter.items
        _refuse_accumulation(trainer)
        assert loader is not None
        results = trainer._results  # noqa: SLF001
        self.automatic._make_zero_grad_fn(batch_idx, optimizer)()  # noqa: SLF001
        step = _Step(self, kwargs, loader.share, self.automatic._make_backward_fn(optimizer))  # noqa: SLF001
        with loops.replaced(results, log=step.log.collect):
            total = self.host_step.run(loader.share, loader.shares, step.run_micro_batch, step.undo)
        result, num_items = step.result(), step.items.total
        step.log.write(results.log, None if num_items is None else num_items / trainer.world_size)
        if is_new and self.counter.items:
            self._print(f"the loss is a mean over {self.counter.items}.")
        if self.host_step.repeated:
            self._print(f"out of memory in step {trainer.global_step}: {self.host_step.repeated}.")
        if result.closure_loss is None:
            return result
        return dataclasses.replace(result, closure_loss=trainer.strategy.reduce(total, reduce_op="mean"))

    def transferred(self, batch: Any) -> Any:
        """Return a micro-batch on the device, after the hooks that Lightning calls for a batch."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
        return self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)


class _Step:
    """One effective batch; `kwargs` are the arguments of `training_step`, with the first micro-batch on the device."""

    def __init__(self, steps: _Steps, kwargs: dict[str, Any], share: Share, backward: Callable[[Tensor], None]) -> None:
        self.log = _StepLog()
        ranks, check = steps.trainer.world_size, steps.host_step.check_other_ranks
        self.items = StepItems(steps.counter, share, steps.device, ranks, check)
        self._steps, self._kwargs, self._backward = steps, kwargs, backward
        self._first = share.micro_batches[0]
        self._results: list[Any] = []
        self._restore_metrics = _restoring(steps.metrics)

    def run_micro_batch(self, batch: Any, weight: float) -> Tensor:
        """Run forward and backward of a micro-batch; return its part in the loss of the step, times the ranks."""
        steps = self._steps
        inputs = self._kwargs["batch"] if batch is self._first else steps.transferred(batch)
        restore = _restoring([] if weight else steps.metrics)
        result = steps.automatic._training_step({**self._kwargs, "batch": inputs})  # noqa: SLF001
        restore()
        self._results.append(result)
        if result.closure_loss is None:
            self.log.micro_batches.append((torch.tensor(weight), weight))
            return torch.zeros((), device=steps.device)
        scaled, items = self.items.weighted(result.closure_loss, batch, weight)
        self._backward(scaled)
        self.log.micro_batches.append((items, weight))
        return scaled

    def undo(self) -> None:
        """Forget an attempt that ran out of memory."""
        self._results, self.log.calls, self.log.micro_batches = [], {}, []
        self._restore_metrics()

    def result(self) -> Any:
        """Return the result of the last micro-batch; raise LossError if only a part of the micro-batches has a loss."""
        skipped = sum(result.closure_loss is None for result in self._results)
        if skipped not in {0, len(self._results)}:
            message = (
                f"training_step returned None for {skipped} of {len(self._results)} micro-batches of a step, but the "
                "others are already divided by the items of all. Return a loss without targets, or filter the data."
            )
            raise LossError(message, code="skipped_micro_batch")
        return self._results[-1]


class _StepLog:
    """Collects what `self.log` receives in the micro-batches of a step, and logs it once: means over items, or sums."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], list[tuple[int, Any, dict[str, Any]]]] = {}  # by hook and name
        self.micro_batches: list[tuple[Tensor, float]] = []  # items, and the weight: 0 for a filler

    def collect(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Keep a value and the number of its micro-batch."""
        value = value.detach() if isinstance(value, Tensor) else value
        self.calls.setdefault((hook, name), []).append((len(self.micro_batches), value, options))

    def write(self, log: Callable[..., None], items_per_rank: Tensor | None) -> None:
        """Log each name once, in the order of the first calls, so that ranks communicate in the same order."""
        for (hook, name), calls in self.calls.items():
            _, value, options = calls[-1]
            if isinstance(value, Tensor):
                value, size = self._reduced(calls, items_per_rank if options["sync_dist"] else None)
                options = {**options, "batch_size": size}
            log(hook, name, value, **options)

    def _reduced(self, calls: list[Any], items_per_rank: Tensor | None) -> tuple[Tensor, Any]:
        """Return the value of a step on this rank, and its weight in means over steps and ranks."""
        reduce_fx, size = calls[-1][2]["reduce_fx"], calls[-1][2]["batch_size"]
        name = getattr(reduce_fx, "__name__", reduce_fx)
        counted = [call for call in calls if self.micro_batches[call[0]][1]] or calls
        values = torch.stack([value for _, value, _ in counted])
        if name in {"sum", "min", "max"}:
            return getattr(torch, name)(values), size
        sizes = torch.stack([self.micro_batches[number][0] for number, _, _ in counted])
        if size is not None:
            given = [options["batch_size"] * self.micro_batches[number][1] for number, _, options in counted]
            sizes = sizes.new_tensor(given)
        # With the items of all ranks, a mean over ranks is that over all items, even if their numbers differ.
        total = sizes.sum() if size is not None or items_per_rank is None else items_per_rank
        value = torch.where(sizes > 0, values * sizes, 0.0).sum() / torch.where(total > 0, total, 1.0)
        return value.to(values.dtype), total


def _restoring(metrics: list[Metric]) -> Callable[[], None]:
    """Return a function that gives metrics the state that they have now."""
    states = [(metric, copied(metric.metric_state), metric._update_count) for metric in metrics]  # noqa: SLF001

    def restore() -> None:
        for metric, state, update_count in states:
            vars(metric).update(copied(state), _update_count=update_count, _computed=None)

    return restore


def _refuse_accumulation(trainer: Any) -> None:
    reason = f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, but effective_batch_size= needs 1"
    loops.refuse("ab.exact", {"accumulate_grad_batches": reason * (trainer.accumulate_grad_batches != 1)})


def _refuse(trainer: Any, module: Any) -> None:
    if not isinstance(trainer, pl.Trainer):
        message = (
            f"ab.exact returns a callback of the package lightning, but the trainer is of {type(trainer).__module__}. "
            "Write `import lightning as L` instead of `import pytorch_lightning`."
        )
        raise UserError(message, code="pytorch_lightning")
    _refuse_accumulation(trainer)
    strategy, ranks, known = trainer.strategy, trainer.world_size, pl.strategies
    is_known = isinstance(strategy, (known.SingleDeviceStrategy, known.DDPStrategy, known.ModelParallelStrategy))
    is_other = not is_known or strategy.handles_gradient_accumulation or strategy.root_device.type == "xla"
    changing = ("GradientAccumulationScheduler", "BatchSizeFinder", "StochasticWeightAveraging")
    names = [kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__]
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", ranks)
    reasons = {
        "already_exact": "the trainer has several callbacks of ab.exact. Keep one" * (names.count("ExactSteps") > 1),
        "manual_optimization": "the module optimizes manually. Step an ab.Engine in training_step, see "
        "docs/your_loop.md#inside-lightning" * (not module.automatic_optimization),
        "dataloader_iter": "training_step loads its own batches. Let it take a batch instead of dataloader_iter"
        * ("dataloader_iter" in inspect.signature(module.training_step).parameters),
        "unsupported_strategy": f"{type(strategy).__name__} is not supported. Use strategy='ddp', or "
        "ModelParallelStrategy with fully_shard" * is_other,
        "tensor_parallel": f"{ranks} ranks have {replicas} copies of the model, so several ranks have the same "
        "samples. Use ModelParallelStrategy(tensor_parallel_size=1)" * (replicas != ranks),
        "accumulation_callback": f"{', '.join(changing)} change the size of a step. Remove them; after an "
        "out-of-memory error, micro-batches are halved automatically" * bool(set(names).intersection(changing)),
        "overfit_batches": "overfit_batches changes the order of samples. Use limit_train_batches without shuffling"
        * bool(trainer.overfit_batches),
    }
    loops.refuse("ab.exact", reasons)
