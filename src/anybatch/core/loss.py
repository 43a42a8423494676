"""Declarations of losses: the user declares the items over which a loss is a mean, and the engine divides once.

Each term of a loss has a sum over items and a count of these items. The loss of an effective batch is

    loss = sum over terms j of weight_j * (total of sum_j) / (total of count_j)

where totals are over all micro-batches and ranks. So each micro-batch back-propagates its own sums divided by the
*whole batch's* counts, and the gradients add up to the gradient of the unsplit batch, for any split. Dividing by the
number of micro-batches instead is right only if all counts are equal. A term that is declared as a sum is not divided.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor

from anybatch.core.geometry import checked_int, is_number, require
from anybatch.core.loss_kinds import (
    COUNTED,
    ONE_NUMBER,
    ONLY_TERM,
    TOKENS,
    Count,
    LossFunction,
    LossKind,
    Term,
    name_of,
)
from anybatch.core.tree import Batch
from anybatch.errors import LossError


@dataclass(frozen=True, slots=True)
class LossSum:
    """The value of a loss or metric as a sum over items, and the number of these items.

    Args:
        total: scalar tensor, the sum over the items.
        count: number of items (or the sum of their weights); a scalar tensor if it is computed on the device.
    """

    total: Num[Tensor, ""]
    count: "int | float | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function with its declaration; made by the functions of this module."""

    function: LossFunction
    kind: LossKind

    def __repr__(self) -> str:
        """Return the declaration in words: `mean over samples of classify`."""
        return self.kind.describe(name_of(self.function))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, in the order of counts and sums."""
        return tuple(self.kind.terms)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term, by name."""
        return {name: term.weight for name, term in self.kind.terms.items()}

    @property
    def functions(self) -> dict[str, LossFunction]:
        """The functions that are called with the model, by the name under which checkpoints save their parameters."""
        return {"loss": self.function} | ({} if self.kind.encode is None else {"encode": self.kind.encode})

    @property
    def needs_data_to_count(self) -> bool:
        """Whether counts are known only after the micro-batches are loaded."""
        return any(term.count is not None for term in self.kind.terms.values())

    @property
    def allows_other_rows(self) -> bool:
        """Whether the loss's count is right for micro-batches whose rows are not samples, such as packed sequences."""
        return self.needs_data_to_count or self.kind.returns_count or self.kind.encode is not None


def samples(*, weight: float = 1.0) -> Term:
    """Declare a term as a mean over the samples of the batch; `weight` is the term's factor in the loss."""
    return Term(None, _weight(weight))


def tokens(
    labels: "str | Callable[[Batch], torch.Tensor]" = "labels",
    *,
    ignore_index: int = -100,
    shift: bool = True,
    weight: float = 1.0,
) -> Term:
    """Declare a term as a mean over the unmasked targets.

    Args:
        labels: name of the labels in the batch (key or attribute), or a function of the batch that returns them: an
            integer tensor (samples, positions).
        ignore_index: label value that marks a masked target.
        shift: True if the first position is not a target, as in a causal language model, which predicts position t from
            the positions before it. False for masked-language, sequence-to-sequence and token-classification heads.
        weight: the term's weight in the loss.
    """
    is_valid = isinstance(labels, str) or callable(labels)
    require(is_valid, "labels", labels, "the name of the labels, or a function of the batch", LossError)
    checked_int("ignore_index", ignore_index, minimum=None, error=LossError)
    require(isinstance(shift, bool), "shift", shift, "True or False", LossError)

    def count(batch: Batch) -> torch.Tensor:
        targets = labels(batch) if callable(labels) else _lookup(batch, labels)
        if shift:
            targets = targets[..., 1:]
        return torch.as_tensor(targets != ignore_index).sum()

    return Term(count, _weight(weight), TOKENS)


def counted(count: Count, *, weight: float = 1.0) -> Term:
    """Declare a term as a mean over `count(batch)` items: class weights, boxes, pairs.

    Args:
        count: `count(batch)` returns the number of items of a micro-batch, 0 or more: a number, or a tensor of one
            element. It is called before the forward, with the batch only.
        weight: the term's weight in the loss.
    """
    require(callable(count), "count", count, "a function of a batch", LossError)
    return Term(count, _weight(weight), COUNTED)


def _weight(weight: float) -> float:
    require(is_number(weight), "weight", weight, "a finite number", LossError)
    return weight


def mean_over_samples(function: LossFunction) -> Loss:
    """Declare that `function(model, batch)` returns the mean over its samples, or one loss per sample.

    In plain PyTorch: `(function(model, micro_batch) * len(micro_batch) / len(effective_batch)).backward()`.
    """
    return Loss(_callable(function), LossKind({ONLY_TERM: samples()}))


def sum_over_samples(function: LossFunction) -> Loss:
    """Declare that `function(model, batch)` returns the sum over its samples, and that the loss should stay a sum.

    In plain PyTorch: `function(model, micro_batch).backward()`. The loss is not divided, so its gradient grows with the
    effective batch, and a learning rate that suits one size does not suit another: declare most losses as means
    instead. `Engine.evaluate` reports the mean of the loss over samples.

    Args:
        function: returns a scalar tensor, one loss per item, or a `LossSum`, whose count is ignored.
    """
    return Loss(_callable(function), LossKind({ONLY_TERM: Term(None, is_sum=True)}))


def mean_over_tokens(
    function: LossFunction,
    *,
    labels: "str | Callable[[Batch], torch.Tensor]" = "labels",
    ignore_index: int = -100,
    shift: bool = True,
) -> Loss:
    """Declare that `function(model, batch)` returns the mean over unmasked targets (or one loss per target).

    `output.loss` of a causal language model in transformers is such a mean.

    Args:
        function: returns a scalar tensor, or one loss per target.
        labels: name of the labels in the batch, or a function of the batch; see `tokens`.
        ignore_index: label value that marks a masked target.
        shift: True if the first position is not a target; see `tokens`.
    """
    terms = {ONLY_TERM: tokens(labels, ignore_index=ignore_index, shift=shift)}
    return Loss(_callable(function), LossKind(terms))


def mean_over(function: LossFunction, count: Count) -> Loss:
    """Declare that `function(model, batch)` returns a mean over `count(batch)` items.

    A class-weighted cross-entropy is a mean over the sum of its targets' weights:
    `mean_over(loss, count=lambda batch: class_weights[batch["label"]].sum())`.

    Args:
        function: returns a scalar tensor, or one loss per item.
        count: returns the number of items of a micro-batch; see `counted`.
    """
    return Loss(_callable(function), LossKind({ONLY_TERM: counted(_callable(count))}))


def sum_of(function: LossFunction, **terms: Term) -> Loss:
    """Declare that `function(model, batch)` returns a dict with the mean of each term.

    `sum_of(loss, lm=tokens(), aux=samples(weight=0.01))`: the loss is `lm + 0.01 * aux`, where `lm` is a mean over
    tokens and `aux` a mean over samples.

    Raises:
        LossError: no term is declared, or a term was not made with `samples`, `tokens` or `counted`.
    """
    if not terms:
        message = "sum_of needs at least one term, such as sum_of(loss, lm=ab.tokens(), aux=ab.samples(weight=0.01))."
        raise LossError(message)
    for name, term in terms.items():
        if not isinstance(term, Term):
            message = f"sum_of term {name}={term!r} must be made with ab.samples, ab.tokens or ab.counted."
            raise LossError(message, term=name)
    return Loss(_callable(function), LossKind(dict(terms), named=True))


def joint(encode: LossFunction, function: LossFunction) -> Loss:
    """Declare a loss across samples: `function` needs the outputs of the whole effective batch.

    For contrastive losses (CLIP, SimCSE, SupCon), triplets mined in the batch, Barlow Twins, VICReg. In plain PyTorch:

    ```python
    outputs = concatenate([encode(model, micro_batch) for micro_batch in effective_batch])
    function(model, outputs).backward()
    ```

    The engine computes the same gradient, but holds the activations of only one micro-batch at a time: it encodes the
    micro-batches, gathers the outputs of all ranks once, and computes the gradient with respect to these outputs. Then
    it encodes every micro-batch except the last again, with the same random numbers, to back-propagate its rows of that
    gradient.

    Args:
        encode: `encode(model, batch)` returns a tensor, or a dict, tuple or dataclass of tensors, whose first axis is
            the samples. Include labels and other inputs of `function`; they need no gradient.
        function: `function(model, outputs)` gets the outputs of `encode` for the whole effective batch, in the order of
            the batch, and returns the loss, a scalar tensor. It may use parameters of the model (a temperature, say),
            or be a module with parameters.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    return Loss(_callable(function), LossKind({ONLY_TERM: samples()}, encode=_callable(encode)))


def declared(loss: "Loss | LossFunction") -> Loss:
    """Return a declared loss unchanged; declare a bare function as returning a `LossSum` or one loss per item."""
    return (
        loss if isinstance(loss, Loss) else Loss(_callable(loss), LossKind({ONLY_TERM: samples()}, returns_count=True))
    )


def unit_counts(loss: Loss, batch: Batch, num_samples: int) -> tuple[float, ...]:
    """Return each term's count in one micro-batch, as CPU numbers; refuse negative or non-finite counts."""
    counts = []
    for name, term in loss.kind.terms.items():
        # On the host, because the divisors are computed before the first forward.
        returned = num_samples if term.count is None else term.count(batch)
        try:
            count = float(returned)
        except (TypeError, ValueError, RuntimeError):
            message = f"the count of loss term {name!r} is {returned!r}; return a number, or a tensor of one element."
            raise LossError(message, term=name, unit=term.items.name) from None
        if not 0.0 <= count < float("inf"):
            message = f"the count of loss term {name!r} is {count}; it must be a finite number that is not negative."
            raise LossError(message, term=name, unit=term.items.name, code="bad_count")
        counts.append(count)
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class TermFactors:
    """Factors by which the value of one term in one micro-batch is multiplied before the backward.

    A mean is multiplied by `of_mean` = weight x `count` of the micro-batch / count of the effective batch; a sum by
    `of_sum` = weight / count of the effective batch, or by the weight alone if the term is declared as a sum. With
    `adds_without_count`, a count of 0 may still add to the loss: a focal loss is not 0 for images without objects.
    """

    of_mean: float
    of_sum: float
    count: float
    adds_without_count: bool = False

    @property
    def has_value(self) -> bool:
        """Whether the term contributes to the loss. A mean over zero items is NaN, and is left out."""
        return self.count > 0 or self.adds_without_count


def factors_of(
    loss: Loss,
    counts: Sequence[float],
    divisors: Sequence[float],
    unit_weight: float,
    sums: Collection[str] = (),
) -> tuple[TermFactors, ...]:
    """Return the factors of each term for a micro-batch with `counts`, in an effective batch with `divisors`.

    A term whose divisor is 0 has no items in the whole effective batch and gets the factor 0. `unit_weight` is 0 for a
    filler, a repeated micro-batch that only keeps ranks in lockstep, and 1 otherwise. `sums` contains the names of the
    terms for which the loss function returns sums.
    """
    factors = []
    for (name, term), count, divisor in zip(loss.kind.terms.items(), counts, divisors, strict=True):
        if term.is_sum:
            of_sum = of_mean = unit_weight * term.weight
        else:
            # The only division of a loss: by the count of the whole effective batch, before the backward.
            of_sum = unit_weight * term.weight / divisor if divisor else 0.0
            of_mean = of_sum * count
        factors.append(TermFactors(of_mean, of_sum, count, name in sums and divisor > 0))
    return tuple(factors)


def scaled(loss: Loss, output: object, factors: Sequence[TermFactors]) -> list[torch.Tensor]:
    """Return each term's contribution to the loss of the effective batch, as scalar tensors for the backward.

    Means over 0 items are left out: they are NaN, and NaN times 0 is NaN. Raises a `LossError` if the output of the
    loss function does not match the declaration.
    """
    if not loss.kind.named:
        return [_contribution(loss, ONLY_TERM, output, factors[0])] if factors[0].has_value else []
    # A missing term would not be trained, and an extra one has no divisor.
    if not isinstance(output, Mapping) or set(output) != set(loss.names):
        returned = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        message = (
            f"the loss function was declared with the terms {sorted(loss.names)} but returned {returned}. "
            "Return a dict with one value for each term, or change the declaration."
        )
        raise LossError(message)
    return [
        _contribution(loss, name, output[name], factor)
        for name, factor in zip(loss.names, factors, strict=True)
        if factor.has_value
    ]


def without_graph() -> LossError:
    """Return the error for a loss that does not require a gradient."""
    if torch.is_grad_enabled():
        return LossError(
            "the loss has no autograd graph, so nothing can be trained. Compute it from the model's output without "
            ".detach(), .item(), torch.tensor(...) or torch.no_grad(), and check that the model's parameters require "
            "a gradient."
        )
    return LossError("gradients are switched off, so nothing can be trained. Call the engine outside torch.no_grad().")


def returned_count(output: object) -> "int | float | torch.Tensor":
    """Return the count of an undeclared loss: of its `LossSum`, or the number of elements of the returned tensor."""
    if isinstance(output, LossSum):
        return output.count
    assert isinstance(output, torch.Tensor)  # checked by `scaled`
    return output.numel()


def _contribution(loss: Loss, name: str, value: object, factor: TermFactors) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dim():
            # Check before summing: the sum no longer shows the number of values.
            loss.kind.check_items(name, value, factor.count)
            return _times(value.sum(), factor.of_sum)
        if loss.kind.returns_count:
            raise LossError(ONE_NUMBER)
        return _times(value, factor.of_mean)
    if isinstance(value, LossSum):
        _check_loss_sum(loss, name, value, factor)
        return _times(value.total, factor.of_sum)
    if isinstance(value, Mapping) and not loss.kind.named:
        message = (
            f"the loss function returned a dict with the terms {sorted(value)}, but was not declared with terms. "
            "Every term needs its own divisor: use ab.sum_of(loss, name=ab.tokens(), other=ab.samples(weight=0.01))."
        )
        raise LossError(message)
    message = (
        f"the loss function returned {type(value).__name__} for term {name!r}; it must return a tensor "
        "(a mean, or one loss per item) or ab.LossSum(total, count)."
    )
    raise LossError(message, term=name)


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `value * factor` in new memory, even for a factor of 1.

    Never return the same tensor: the user may have kept it, and add the next micro-batch's value to it in place. Its
    storage may also be far larger than one number: the mean of `mse_loss` keeps the memory of all squared errors.
    """
    return value.clone() if factor == 1.0 else value * factor  # the backward of a copy computes nothing


def _check_loss_sum(loss: Loss, name: str, value: LossSum, factor: TermFactors) -> None:
    is_tensor = isinstance(value.total, torch.Tensor)
    require(is_tensor, f"LossSum.total of term {name!r}", value.total, "a tensor, the sum", LossError)
    is_count = value.count.numel() == 1 if isinstance(value.count, torch.Tensor) else is_number(value.count)
    require(is_count, f"LossSum.count of term {name!r}", value.count, "one finite number", LossError)
    if value.total.dim():
        message = (
            f"LossSum.total of term {name!r} has shape {tuple(value.total.shape)}; it must be one number, the sum."
        )
        raise LossError(message, term=name)
    count = value.count
    # Reading a device tensor would wait for it, and a fake tensor (of a plan) cannot be read.
    if not isinstance(count, torch.Tensor) or (type(count) is torch.Tensor and count.device.type == "cpu"):
        loss.kind.check_count(name, float(count), factor.count)


def _lookup(batch: Batch, name: str) -> torch.Tensor:
    try:
        value = batch[name] if isinstance(batch, Mapping) else getattr(batch, name)
    except (KeyError, AttributeError):
        has = sorted(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        message = (
            f"labels={name!r} is not in the batch, which has {has}. Pass the name of a field of the batch, or a "
            "function of the batch."
        )
        raise LossError(message, code="no_labels") from None
    if not isinstance(value, torch.Tensor):
        message = f"labels={name!r} is a {type(value).__name__} in the batch; it must be a tensor to be counted."
        raise LossError(message)
    return value


def _callable(function: Any) -> Any:  # noqa: ANN401 (any value, checked and returned)
    if not callable(function):
        message = f"a loss declaration needs a function f(model, batch), not {type(function).__name__} {function!r}."
        raise LossError(message, code="not_a_function")
    return function
