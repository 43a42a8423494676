"""The exact step inside other trainers: `ab.exact(trainer)`.

Each library has a module of its own, which is imported when a trainer of that library is given.
"""

from typing import Any, TypeVar

from anybatch.core.token_budget import TokenBudget
from anybatch.data.collate import Lengths
from anybatch.errors import UserError
from anybatch.integrations.loops import Count, Tokens, refuse
from anybatch.integrations.sentence_transformers import Joint

__all__ = ["Joint", "exact"]

Trainer = TypeVar("Trainer")


def exact(
    trainer: Trainer | None = None,
    *,
    effective_batch_size: int | None = None,
    micro_batch_size: TokenBudget | None = None,
    lengths: Lengths = "input_ids",
    count: Count = None,
) -> Trainer | Any:
    """Make every optimizer step of a trainer use the gradient of all its micro-batches as one batch.

    Supported: transformers' `Trainer` and its subclasses, such as TRL's `SFTTrainer`, and Lightning. The trainer keeps
    its data, loop, arguments, logs and checkpoints; only the factor of each micro-batch's loss changes.

        trainer = ab.exact(Trainer(model, args, train_dataset=data), effective_batch_size=512)
        trainer = L.Trainer(callbacks=[ab.exact(effective_batch_size=512)])

    With `effective_batch_size`, a step of the trainer is one effective batch: epochs, `max_steps`, logs, callbacks and
    checkpoints count such steps. The last step of an epoch has the remaining samples (none with `drop_last`).
    `per_device_train_batch_size` is the maximum size of a micro-batch; after an out-of-memory error on any rank, all
    ranks repeat the step with half the size. `gradient_accumulation_steps` becomes 1, and callbacks' `on_substep_end`
    is not called. The order of samples depends on `data_seed` (or `seed`), so a run resumes on any number of ranks.

    The first step calls the model on a few samples, without training it, to find out which items its loss averages
    over, or to check `count`, and prints the result. All later micro-batches are compared with it, as far as their
    autograd graphs show a divisor. With dropout, other splits draw other random numbers.

    Args:
        trainer: the trainer, before `train()`. It is changed in place, and returned. None returns a callback.
        effective_batch_size: samples of a step over all ranks; None keeps a `Trainer`'s batches and accumulation.
        micro_batch_size: `ab.token_budget(8192)` limits micro-batches by tokens instead of samples.
        lengths: the lengths of the samples for a token budget, as for `ab.batches`.
        count: the items that the loss averages over, where they cannot be found out: `ab.tokens(shift=False)`,
            `ab.samples()`, or a function of a micro-batch that returns their number.

    Raises:
        UserError: the trainer's library is not supported, or one of its options makes an exact step impossible.
        LossError: in the first step, if the loss is not a sum or mean over items that can be counted, or not over those
            of `count`; in later steps, if this shows only there.
        DataError: in `train()`, for an iterable data set, a custom batch sampler, or a loader that drops all samples.
        DoesNotFitError: in `train()`, if a single sample does not fit into memory.
    """
    tokens = None if micro_batch_size is None else Tokens(micro_batch_size, lengths)
    is_valid = tokens is None or (isinstance(micro_batch_size, TokenBudget) and effective_batch_size)
    reason = "micro_batch_size= must be a token budget, such as ab.token_budget(8192), and needs effective_batch_size="
    refuse("ab.exact", {"micro_batch_size": reason * (not is_valid)})
    if trainer is None and effective_batch_size is not None:
        return _lightning_callback(effective_batch_size, count, tokens)
    if any(kind.__module__ == "transformers.trainer" for kind in type(trainer).__mro__):
        from anybatch.integrations.transformers import make_exact  # noqa: PLC0415 (imported only when used)

        make_exact(trainer, count, effective_batch_size, tokens)
        return trainer
    message = (
        f"ab.exact(trainer) takes a Trainer of transformers or a subclass, such as TRL's SFTTrainer, not "
        f"{type(trainer).__name__}. For Lightning, pass Trainer(callbacks=[ab.exact(effective_batch_size=...)]); for "
        "Accelerate, call ab.windows(accelerator, loader, ...); in a loop of your own, use ab.Engine."
    )
    raise UserError(message, code="unsupported_trainer")


def _lightning_callback(effective_batch_size: int, count: Count, tokens: Tokens | None) -> object:
    try:
        from anybatch.integrations.lightning import ExactSteps  # noqa: PLC0415 (imported only when used)
    except ModuleNotFoundError as error:
        message = (
            f"{error}. ab.exact without a trainer is for Lightning: pip install 'anybatch[lightning]'. For "
            "transformers' Trainer, call ab.exact(trainer, ...)."
        )
        raise UserError(message, code="missing_package") from error
    return ExactSteps(effective_batch_size, count, tokens)
