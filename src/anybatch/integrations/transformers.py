"""transformers' `Trainer` and its subclasses: one divisor for all micro-batches of a step, on all ranks.

The trainer calls `get_batch_samples` for the micro-batches of a step and their number of items, and `compute_loss` for
each micro-batch. Both are replaced on the trainer object, so that subclasses of any kind keep their own methods, and
nothing is changed for other trainers. Evaluation is passed on unchanged.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.core.loss_kinds import Term
from anybatch.core.tensors import widest_dtype
from anybatch.engine.evaluation import evaluation_mode
from anybatch.errors import LossError, UserError
from anybatch.integrations.probe import Batch, Reduction, counts_for, divides, find_reduction, num_rows

MIN_SAMPLES = 5
ALONE = "Without ab.exact the"
QA_POSITIONS = ("start_positions", "end_positions")


class _Refusal(NamedTuple):
    code: str
    applies: bool
    reason: str


def make_exact(trainer: Any, count: Term | Callable[[Batch], Any] | None) -> None:  # noqa: ANN401 (optional package)
    """Replace the methods of a trainer that count items and compute losses."""
    _refuse(trainer)
    exact = _ExactLoss(trainer, count.count or num_rows if isinstance(count, Term) else count)
    trainer.get_batch_samples, trainer.compute_loss = exact.get_batch_samples, exact.compute_loss
    trainer.loss_is_scaled_for_ga = True  # by `compute_loss`: the trainer does not divide by the accumulation steps


def _refuse(trainer: Any) -> None:  # noqa: ANN401
    args, config = trainer.args, getattr(trainer.model, "config", None)
    reasons = (
        _Refusal(
            "already_exact",
            "get_batch_samples" in vars(trainer),
            "the trainer's get_batch_samples has been replaced already: call ab.exact once, before anything else does",
        ),
        _Refusal(
            "old_transformers",
            not hasattr(type(trainer), "loss_is_scaled_for_ga"),
            "this version of transformers has no Trainer.loss_is_scaled_for_ga: install transformers 5.23 or newer",
        ),
        _Refusal(
            "data_parallel",
            args.n_gpu > 1,
            f"the trainer uses nn.DataParallel on {args.n_gpu} GPUs, which divides for each copy by itself: start it "
            "with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU",
        ),
        _Refusal(
            "deepspeed",
            bool(trainer.is_deepspeed_enabled),
            "DeepSpeed scales and sums the gradients itself: remove the option deepspeed",
        ),
        _Refusal(
            "fsdp",
            bool(trainer.is_fsdp_enabled),
            "FSDP inside the trainer has not been tested: use DDP, or ab.Engine with strategy='fsdp'",
        ),
        _Refusal(
            "auto_find_batch_size",
            bool(args.auto_find_batch_size),
            "auto_find_batch_size=True starts the training again with another batch size: set it to False",
        ),
        _Refusal(
            "lomo",
            "lomo" in str(args.optim).lower(),
            f"{args.optim} updates parameters during the backward, before a step is complete: use another optimizer",
        ),
        _Refusal(
            "router_loss",
            bool(getattr(config, "output_router_logits", False)),
            "the model adds the auxiliary loss of its router, a product of means over tokens that no divisor makes "
            "exact: set model.config.output_router_logits = False",
        ),
    )
    for refusal in reasons:
        if refusal.applies:
            message = f"ab.exact: {refusal.reason}."
            raise UserError(message, code=refusal.code)


class _ExactLoss:
    """The replaced methods of one trainer."""

    def __init__(self, trainer: Any, count: Callable[[Batch], Any] | None) -> None:  # noqa: ANN401
        self._trainer = trainer
        self._given_count = count
        self._get_batch_samples = trainer.get_batch_samples
        self._compute_loss = trainer.compute_loss
        self._labels = (trainer.label_names or ["labels"])[0]
        self._probed_model: Any = None
        self._reduction = Reduction(divides=False, items="samples")
        self._count: Callable[[Batch], Any] = num_rows

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and their number of items on all ranks: a tensor of one element."""
        window, host_count = self._get_batch_samples(epoch_iterator, num_batches, device)
        is_new = self._trainer.model is not self._probed_model
        if is_new:
            self._find_reduction(window)
        _refuse_ignored_positions(window)
        # One dtype on all ranks: counts may be fractions, and a rank may have no micro-batch.
        total = torch.zeros((), dtype=widest_dtype(device), device=device)
        for batch in window:
            total += torch.as_tensor(self._count(batch), device=device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        total = torch.where(total > 0, total, 1.0)
        if is_new and self._trainer.is_world_process_zero():
            print(f"anybatch: {self._found(window, host_count, total)}", flush=True)  # noqa: T201 (for the user)
        return window, total

    def compute_loss(
        self,
        model: Any,  # noqa: ANN401
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 (the trainer's signature)
        num_items_in_batch: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return the part of a micro-batch in the loss of the step, times the ranks, over which DDP averages."""
        if num_items_in_batch is None or not model.training:
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        reduction, ranks = self._reduction, self._trainer.accelerator.num_processes
        items = torch.as_tensor(self._count(inputs), device=num_items_in_batch.device)  # before labels are popped
        divisor = num_items_in_batch if reduction.divides else None
        result = self._compute_loss(model, inputs, return_outputs, num_items_in_batch=divisor)
        loss, outputs = result if return_outputs else (result, None)
        if reduction.divides:
            loss = loss * (ranks / reduction.factor)
        elif reduction.items == "sum":
            loss = loss * ranks
        else:
            # The mean over no items is NaN, and is left out.
            loss = torch.where(items > 0, loss, loss.nan_to_num(0.0)) * (items * ranks / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _find_reduction(self, window: Sequence[Batch]) -> None:
        found: Reduction | LossError | None = None
        if window:
            try:
                found = self._probe(window[0])
            except LossError as error:
                found = error
        if dist.is_available() and dist.is_initialized():  # one rank may refuse, or have no samples
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, found)
        else:
            everywhere = [found]
        for one in everywhere:
            if isinstance(one, LossError):
                raise one
        kinds = list(dict.fromkeys(one for one in everywhere if one is not None))
        if len(kinds) > 1:
            found_kinds = "; ".join(map(str, kinds))
            message = f"ranks found different losses: {found_kinds}. Name the items: ab.exact(trainer, count=...)."
            raise LossError(message, code="unknown_items")
        self._reduction = kinds[0] if kinds else self._reduction
        self._count = self._given_count or counts_for(self._labels).get(self._reduction.items, num_rows)
        self._probed_model = self._trainer.model

    def _probe(self, batch: Batch) -> Reduction:
        trainer = self._trainer
        send_to_device = import_module("accelerate.utils").send_to_device  # the trainer has imported it
        module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)

        def loss(part: Batch, divisor: Tensor | None) -> float:
            inputs = send_to_device(dict(part), trainer.args.device)
            divisor = divisor if divisor is None else divisor.to(trainer.args.device)
            return float(self._compute_loss(module, inputs, False, num_items_in_batch=divisor))  # noqa: FBT003

        with _undisturbed(trainer, module):
            collated = _collated(trainer)
            rows = batch if num_rows(batch) > 1 or collated is None else collated([0, 1])
            if self._given_count is not None:
                factor = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
                is_divided = divides(loss, rows)
                return Reduction(is_divided, "counted by count=", float(factor if is_divided else 1))
            num_classes = getattr(getattr(module, "config", None), "num_labels", 2)
            return find_reduction(loss, rows, self._labels, num_classes, collated)

    def _found(self, window: Sequence[Batch], host_count: Any, total: Tensor) -> str:  # noqa: ANN401
        """Return what was found, and what the trainer alone would have done; called once."""
        trainer, found = self._trainer, f"the loss is {self._reduction}."
        if self._reduction.items == "sum":
            return f"{found} Its gradient is the sum over the step."
        if self._reduction.divides:
            times = float(total) / float(host_count) if host_count else 1.0
            same = "The trainer divides by the same number."
            return f"{found} {same if times == 1 else f'{ALONE} gradient would have been {times:.4g} times as large.'}"
        is_undivided = (trainer.model_accepts_loss_kwargs and host_count is not None) or trainer.compute_loss_func
        if is_undivided:
            return f"{found} {ALONE} gradient would have been {len(window)} times as large, a sum of means."
        return f"{found} {ALONE} micro-batches would have had equal weights, whatever their numbers of items."


def _refuse_ignored_positions(window: Sequence[Batch]) -> None:
    """Refuse question answering where the mean is not one over samples: each of its two means has its own divisor."""
    batches = [batch for batch in window if isinstance(batch, Mapping) and all(key in batch for key in QA_POSITIONS)]
    lengths = {batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch}
    if len(lengths) > 1:
        message = (
            "a question-answering model chooses among all positions, padding included, and the micro-batches of this "
            f"step have {min(lengths)} to {max(lengths)} tokens: pad all samples to one length (padding='max_length')."
        )
        raise LossError(message, code="unequal_lengths")
    if any(bool((batch[key] >= batch["input_ids"].shape[-1]).any()) for batch in batches for key in QA_POSITIONS):
        message = (
            "a question-answering model leaves out answers beyond the end of the text, so its two means have different "
            "divisors: give these samples the position of the first token, or remove them."
        )
        raise LossError(message, code="ignored_positions")


def _collated(trainer: Any) -> Callable[[list[int]], Batch] | None:  # noqa: ANN401
    """Return a function that collates samples of the training data as the trainer's loader does; None for a stream."""
    loader = trainer.callback_handler.train_dataloader
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) < MIN_SAMPLES:
        return None
    return lambda numbers: loader.collate_fn([dataset[number] for number in numbers])


@contextmanager
def _undisturbed(trainer: Any, module: torch.nn.Module) -> Iterator[None]:  # noqa: ANN401
    """Call the loss in eval mode, without gradients, and without a trace in random numbers or TRL's metrics."""
    metrics = {
        key: copy.deepcopy(value) for key, value in vars(trainer).items() if key.startswith(("_metrics", "_total"))
    }
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    # TRL gathers metrics in every loss, but ranks may call it a different number of times here.
    vars(trainer.accelerator).update(gather=_itself, gather_for_metrics=_itself)
    try:
        with evaluation_mode(module), torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        del trainer.accelerator.gather, trainer.accelerator.gather_for_metrics
        vars(trainer).update(metrics)


def _itself(value: Any, *_: Any, **__: Any) -> Any:  # noqa: ANN401
    return value
