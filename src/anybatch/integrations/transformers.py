"""transformers' `Trainer` and its subclasses: one divisor for all micro-batches of a step, on all ranks.

Methods are replaced on the trainer object, so that subclasses of any kind keep their own: decision 0085.
Private names: `_track_num_input_tokens`, and the attributes `_metrics...` and `_total...` of TRL's metrics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from anybatch.core.geometry import checked_int
from anybatch.core.torch_internals import uncompiled
from anybatch.core.tree import copied, map_tensors, moved_to, tensors_of
from anybatch.data.loading import UnitKey
from anybatch.engine.evaluation import evaluation_mode
from anybatch.errors import BatchSizeError, LossError
from anybatch.integrations import loops, probe
from anybatch.integrations.divisor import ItemCounter, findings_of_ranks, num_items, total_items, weighted_mean
from anybatch.integrations.loops import Count, HostStep, Share, ShareLoader, Tokens, World, itself, share_loader
from anybatch.integrations.probe import MAX_ROWS, Batch, Reduction

MIN_SAMPLES = 5
ALONE = "Without ab.exact the"
STATE = "anybatch"  # key of the trainer's state
QA_POSITIONS = ("start_positions", "end_positions")


def make_exact(trainer: Any, count: Count, effective_batch_size: int | None, tokens: Tokens | None) -> None:
    """Replace the methods of a trainer that count items, compute losses and, with an effective batch size, load it."""
    loops.refuse_other_versions({"accelerate", *(kind.__module__.partition(".")[0] for kind in type(trainer).__mro__)})
    loops.refuse("ab.exact", _reasons(trainer, effective_batch_size))
    if effective_batch_size is None:
        exact = _ExactLoss(trainer, count)
    else:
        checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
        loops.refuse("ab.exact", _reasons_for_batches(trainer))
        exact = _EffectiveBatches(trainer, count, effective_batch_size, tokens)
    for name in exact.host:
        setattr(trainer, name, getattr(exact, name))
    trainer.loss_is_scaled_for_ga = True  # by `compute_loss`: the trainer does not divide by the accumulation steps


def _reasons(trainer: Any, effective_batch_size: int | None) -> dict[str, str]:
    args, config = trainer.args, getattr(trainer.model, "config", None)
    is_fsdp, is_fsdp2 = trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled, trainer.accelerator.is_fsdp2
    if effective_batch_size is None:
        is_fsdp, is_fsdp2 = is_fsdp or isinstance(uncompiled(trainer.model), FSDPModule), False
    return {
        "already_exact": "the trainer's get_batch_samples has been replaced already: call ab.exact once, before "
        "anything else does" * ("get_batch_samples" in vars(trainer)),
        "data_parallel": f"the trainer uses nn.DataParallel on {args.n_gpu} GPUs, which divides for each copy by "
        "itself: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU" * (args.n_gpu > 1),
        "deepspeed": "DeepSpeed scales and sums the gradients itself: remove the option deepspeed"
        * bool(trainer.is_deepspeed_enabled),
        "fsdp": "of FSDP, only version 2 works, and only with effective_batch_size=: use it or DDP"
        * bool(is_fsdp and not is_fsdp2),
        "auto_find_batch_size": "auto_find_batch_size=True starts the training again with another batch size: set it "
        "to False" * bool(args.auto_find_batch_size),
        "lomo": f"{args.optim} updates parameters during the backward, before a step is complete: use another "
        "optimizer" * ("lomo" in str(args.optim).lower()),
        "router_loss": "the model adds the auxiliary loss of its router, a product of means over tokens that no "
        "divisor makes exact: set model.config.output_router_logits = False"
        * bool(getattr(config, "output_router_logits", False)),
    }


def _reasons_for_batches(trainer: Any) -> dict[str, str]:
    kind, sizes = type(trainer).__name__, (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size())
    return {
        "batch_rebalance": "train_sampling_strategy='batch_rebalance' chooses the samples of each step, and so does "
        "effective_batch_size=: use 'random', 'sequential' or 'group_by_length'"
        * (trainer.args.train_sampling_strategy == "batch_rebalance"),
        "own_batches": f"{kind} chooses the samples of each batch: leave out effective_batch_size=; for a loss that "
        "compares samples, use anybatch.integrations.Joint(loss) instead" * hasattr(trainer, "get_batch_sampler"),
        "model_parallel": "with tensor, context or sequence parallelism several ranks have the same samples, but "
        "effective_batch_size= gives each rank samples of its own: leave it out" * (max(sizes) > 1),
        "generates_samples": f"{kind} generates samples and compares them within its own batches: leave out "
        "effective_batch_size=" * hasattr(trainer, "num_generations"),
    }


class _ExactLoss:
    """The replaced methods of one trainer."""

    replaced: tuple[str, ...] = ("get_batch_samples", "compute_loss")

    def __init__(self, trainer: Any, count: Count) -> None:
        self._trainer = trainer
        self._declared = count
        self.host = {name: getattr(trainer, name) for name in self.replaced}
        self._refuse = partial(_refuse_ignored_positions, is_count_given=count is not None)
        self._print = partial(loops.print_line, on_this_rank=trainer.is_world_process_zero())
        self._labels = (trainer.label_names or ["labels"])[0]
        self._count = ItemCounter(count, self._labels)
        self._probed_model: Any = None
        self._reduction = Reduction(divides=False, items="samples")
        self._weight = 1.0
        self._patterns = set[frozenset[str]]()
        self._check_resumed: Callable[[Any], None] = lambda _: None
        ends = {"on_train_begin": lambda *_, **__: self._check_resumed(trainer)}
        ends["on_train_end"] = lambda *_, **__: self._count.settle()
        trainer.add_callback(type("ExactSteps", (import_module("transformers").TrainerCallback,), ends))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and their number of items on all ranks: a tensor of one element."""
        window, host_count = self.host["get_batch_samples"](epoch_iterator, num_batches, device)
        is_new = self._trainer.model is not self._probed_model
        if is_new:
            loops.warn_batch_norms(self._trainer.model.train())  # as `training_step` will
            self._find_reduction(window[0] if window else None)
        total = self._num_items([(batch, 1.0) for batch in window], device)
        if is_new:
            self._print(self._found(len(window), host_count, total))
        return window, total

    def _num_items(self, pairs: Sequence[tuple[Batch, float]], device: torch.device) -> Tensor:
        batches = [batch for batch, weight in pairs if weight]
        self._refuse(batches)
        if self._declared is not None and self._reduction.divides:
            self._check_declared(batches)
        return total_items(self._count, pairs, device)

    def _check_declared(self, batches: Sequence[Batch]) -> None:
        """Compare `count=` with the divisor in batches where it equals other items, or differs, for the first time."""
        for batch in batches:
            counts = {name: float(count) for name, count in self._count.counts(batch).items()}
            pattern = frozenset(name for name, count in counts.items() if count == counts[self._count.items])
            if pattern in self._patterns or isinstance(uncompiled(self._trainer.model), FSDPModule):
                continue
            self._patterns.add(pattern)
            for start in range(0, probe.num_rows(batch), MAX_ROWS):
                self._probe(probe.rows_of(batch, list(range(probe.num_rows(batch)))[start : start + MAX_ROWS]))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 (the trainer's signature)
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the part of a micro-batch in the loss of the step, times the ranks, over which DDP averages."""
        if num_items_in_batch is None or not model.training:
            return self.host["compute_loss"](model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        reduction, ranks = self._reduction, self._trainer.accelerator.num_processes * self._weight
        batch = dict(inputs)  # labels are popped
        divisor = num_items_in_batch if reduction.divides else None
        result = self.host["compute_loss"](model, inputs, return_outputs, num_items_in_batch=divisor)
        loss, outputs = result if return_outputs else (result, None)
        if reduction.divides:
            loss = loss * (ranks / reduction.factor)
        elif reduction.items == "sum":
            loss = loss * ranks
        else:
            self._count.observe(loss, batch)
            items = num_items(self._count, batch, num_items_in_batch.device)
            loss = weighted_mean(loss, items, num_items_in_batch, ranks)
        return (loss, outputs) if return_outputs else loss

    def _find_reduction(self, batch: Batch | None) -> None:
        # A rank may have no samples.
        kinds = list(dict.fromkeys(findings_of_ranks(lambda: None if batch is None else self._probe(batch))))
        if len(kinds) > 1:
            found_kinds = "; ".join(map(str, kinds))
            message = f"ranks found different losses: {found_kinds}. Name the items: ab.exact(trainer, count=...)."
            raise LossError(message, code="unknown_items")
        self._reduction = kinds[0] if kinds else self._reduction
        self._count = ItemCounter(self._declared, self._labels, self._reduction.items)
        self._probed_model = self._trainer.model

    def _probe(self, batch: Batch) -> Reduction:
        trainer = self._trainer
        module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)

        self._refuse([batch])

        def loss(part: Batch, divisor: Tensor | None) -> float:
            torch.manual_seed(0)  # a model that draws masks has the same loss for the same samples
            inputs = moved_to(dict(part), trainer.args.device)
            divisor = divisor if divisor is None else divisor.to(trainer.args.device)
            return float(self.host["compute_loss"](module, inputs, False, num_items_in_batch=divisor))  # noqa: FBT003

        with _undisturbed(trainer, module):
            collated = _collated(trainer)
            is_small = probe.num_rows(batch) == 1 and not self._patterns
            rows = collated([0, 1]) if is_small and collated is not None else batch
            if self._declared is not None:
                ranks = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
                return probe.check_declared(loss, rows, self._count, self._labels, ranks)
            num_classes = getattr(getattr(module, "config", None), "num_labels", 2)
            return probe.find_reduction(loss, rows, self._labels, num_classes, collated, module=module)

    def _found(self, num_micro_batches: int, host_count: Any, total: Tensor) -> str:
        """Return what was found, and what the trainer alone would have done with that many micro-batches."""
        trainer, found = self._trainer, f"the loss is {self._reduction}."
        if self._reduction.items == "sum":
            return f"{found} Its gradient is the sum over the step."
        if self._reduction.divides:
            times = float(total) / float(host_count) if host_count else 1.0
            same = "The trainer divides by the same number."
            return f"{found} {same if times == 1 else f'{ALONE} gradient would have been {times:.4g} times as large.'}"
        if num_micro_batches == 1 and trainer.accelerator.num_processes == 1:
            return f"{found} {ALONE} gradient would have been the same."
        is_undivided = (trainer.model_accepts_loss_kwargs and host_count is not None) or trainer.compute_loss_func
        if is_undivided:
            return f"{found} {ALONE} gradient would have been {num_micro_batches} times as large, a sum of means."
        return f"{found} {ALONE} micro-batches would have had equal weights, whatever their numbers of items."


class _EffectiveBatches(_ExactLoss):
    """The replaced methods of a trainer with an effective batch size: a batch of its loop is a `Share`."""

    replaced = (*_ExactLoss.replaced, "get_train_dataloader", "training_step", "get_total_train_batch_size")
    replaced += ("floating_point_ops", "_track_num_input_tokens")

    def __init__(self, trainer: Any, count: Count, effective_batch_size: int, tokens: Tokens | None) -> None:
        super().__init__(trainer, count)
        args = trainer.args
        self._size, self._limit = effective_batch_size, tokens or args.per_device_train_batch_size
        self._num_steps_alone, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        self._world = World(args.process_index, args.world_size)
        self._shares: Any = None  # the data set of the loader, once there is one
        self._host_step: HostStep | None = None

    def get_total_train_batch_size(self, _: Any) -> int:
        """Return the effective batch size."""
        return self._size

    def get_train_dataloader(self) -> ShareLoader:
        """Return a loader of effective batches, with the data, the workers and the kind of order of the trainer."""
        args = self._trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        loader, shares = self.host["get_train_dataloader"](), self._shares
        loader = share_loader(loader, self._size, self._limit, self._world, seed=seed)
        self._shares = loader.dataset
        self._shares.micro_batch_size = (shares or self._shares).micro_batch_size
        steps = {"effective_batch_size": self._size, "num_samples": len(self._shares), "seed": seed}
        self._check_resumed = partial(_check_resumed, steps, len(loader))
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Share], num_batches: int, device: torch.device
    ) -> tuple[list[Share], Any]:
        """Return this rank's share of an effective batch, and the number of items on all ranks."""
        del num_batches  # always 1
        share = next(epoch_iterator)
        is_new = self._trainer.model is not self._probed_model
        if is_new:
            # A micro-batch of the size that is only a limit may not fit.
            ids = share.key.sample_ids[:MAX_ROWS]
            self._find_reduction(self._shares.loader(UnitKey(share.key.epoch, ids)))
        total = self._num_items(share.pairs, device)
        if is_new:
            batches = share.micro_batches  # with fillers, or a rank might not take part in the count
            _, host_count = self.host["get_batch_samples"](iter(batches), len(batches), device)
            with_fillers = self._num_items([(batch, 1.0) for batch in batches], device)
            self._print(self._found(self._num_steps_alone, host_count, with_fillers))
            self._print(self._describe_split(share))
        return [share], total

    def _describe_split(self, share: Share) -> str:
        ranks, size = self._world.num_ranks, self._trainer.args.per_device_train_batch_size
        alone = size * self._num_steps_alone * ranks
        replaced = f" (instead of {ranks} x {self._num_steps_alone} x {size} = {alone})" if alone != self._size else ""
        return f"effective batch: {self._shares.plan(share.key.sample_ids)}{replaced}."

    def training_step(self, model: nn.Module, inputs: Share, num_items_in_batch: Any = None) -> Tensor:
        """Run all micro-batches of a share, and return the loss of the step, times the ranks."""
        model.train()
        if self._host_step is None or self._host_step.model is not model:
            self._host_step = HostStep(model, self._trainer.args.device)
        host_step = self._host_step

        def run_micro_batch(batch: Batch, weight: float) -> Tensor:
            self._weight = weight
            loss: Tensor = self.host["training_step"](model, batch, num_items_in_batch)
            return loss

        with self._ragged_gathers(), _undoable(self._trainer) as undo:
            total = host_step.run(inputs, self._shares, run_micro_batch, undo)
        if host_step.repeated:
            number, split = self._trainer.state.global_step, self._describe_split(inputs).capitalize()
            self._print(f"out of memory in step {number}: {host_step.repeated}. {split}")
        return total

    def floating_point_ops(self, inputs: Share) -> int:
        """Return the operations of this rank's share."""
        return sum(self.host["floating_point_ops"](batch) for batch, weight in inputs.pairs if weight)

    def _track_num_input_tokens(self, inputs: Share) -> None:
        with self._ragged_gathers():
            for batch, self._weight in inputs.pairs:
                self.host["_track_num_input_tokens"](batch)

    @contextmanager
    def _ragged_gathers(self) -> Iterator[None]:
        """Let the gathers of a micro-batch accept other lengths on other ranks, without the samples of fillers."""
        accelerator = self._trainer.accelerator
        gather, gather_objects = accelerator.gather, accelerator.gather_for_metrics

        def gather_all(value: Any, *args: Any, **options: Any) -> Any:
            assert self._host_step is not None
            self._host_step.check_other_ranks()
            if next(tensors_of(value), None) is None:
                return gather_objects(value, *args, **options)
            return map_tensors(value, lambda tensor: loops.gather_ragged(gather, tensor, counts=self._weight > 0))

        ragged = {"gather": gather_all, "gather_for_metrics": gather_all} if self._world.num_ranks > 1 else {}
        try:
            with loops.replaced(accelerator, **ragged):
                yield
        finally:
            self._weight = 1.0


def _check_resumed(steps: dict[str, int], steps_per_epoch: int, trainer: Any) -> None:
    """Refuse to resume within an epoch whose steps had other samples; store what decides them in its state."""
    state, args = trainer.state, trainer.args
    saved, is_resumed = state.stateful_callbacks.get(STATE), bool(state.global_step) and not args.ignore_data_skip
    # At the end of an epoch all samples are used; its number follows from that of the steps.
    is_between = float(state.epoch or 0).is_integer() and state.global_step == (state.epoch or 0) * steps_per_epoch
    reason = (
        f"the checkpoint of step {state.global_step} has steps with {saved or 'its own batches'}, but this run has "
        f"{steps}: samples would be skipped or repeated. Resume with the same numbers, or start a new run from it"
    )
    loops.refuse("ab.exact", {"other_effective_batches": reason * (is_resumed and saved != steps and not is_between)})
    state.stateful_callbacks[STATE] = steps


@contextmanager
def _undoable(trainer: Any) -> Iterator[Callable[[], None]]:
    """Hold logs back until the context ends, and yield a function that drops them and restores TRL's metrics."""
    logs = list[Any]()
    metrics = copied({name: value for name, value in vars(trainer).items() if name.startswith(("_metrics", "_total"))})

    def undo() -> None:
        logs.clear()
        vars(trainer).update(copied(metrics))

    with loops.replaced(trainer, log=lambda *args, **options: logs.append((args, options))):
        yield undo
    for args, options in logs:
        trainer.log(*args, **options)


def _refuse_ignored_positions(window: Sequence[Batch], *, is_count_given: bool) -> None:
    """Refuse question answering where the mean is not one over samples: each of its two means has its own divisor."""
    batches = [batch for batch in window if isinstance(batch, Mapping) and all(key in batch for key in QA_POSITIONS)]
    texts = [batch[key] for batch in batches for key in ("input_ids", "inputs_embeds") if key in batch]
    lengths = {text.shape[1] for text in texts}
    beyond = [batch[key] >= length for length in lengths for batch in batches for key in QA_POSITIONS]
    reasons = {
        "unknown_length": "without input_ids or inputs_embeds, pass count=ab.samples() if all answers are within the "
        "input" * (len(texts) < len(batches) and not is_count_given),
        "unequal_lengths": "a question-answering model chooses among all positions, padding included, and the "
        f"micro-batches of this step have {sorted(lengths)} tokens: pad all samples to one length "
        "(padding='max_length')" * (len(lengths) > 1),
        "ignored_positions": "a question-answering model leaves out answers beyond the end of the text, so its two "
        "means have different divisors: give these samples the position of the first token, or remove them"
        * any(bool(positions.any()) for positions in beyond),
    }
    loops.refuse("ab.exact", reasons, LossError)


def _collated(trainer: Any) -> Callable[[list[int]], Batch] | None:
    """Return a function that collates samples of the training data as the trainer's loader does; None for a stream."""
    loader = trainer.callback_handler.train_dataloader
    loader = loader.dataset.loader if isinstance(loader, ShareLoader) else loader  # type: ignore[attr-defined]
    dataset: Any = getattr(loader, "dataset", None)
    collate: Any = getattr(loader, "collate_fn", getattr(loader, "collate", None))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) < MIN_SAMPLES:
        return None
    return lambda numbers: collate([dataset[number] for number in numbers])


@contextmanager
def _undisturbed(trainer: Any, module: nn.Module) -> Iterator[None]:
    """Call the loss in eval mode, without gradients, and without a trace in random numbers, logs or TRL's metrics."""
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    # TRL gathers metrics in every loss, but ranks may call it a different number of times here.
    with (
        loops.replaced(trainer.accelerator, gather=itself, gather_for_metrics=itself),
        _undoable(trainer) as undo,
    ):
        try:
            with evaluation_mode(module), torch.no_grad(), torch.random.fork_rng(devices=devices):
                yield
        finally:
            undo()
