"""Losses are declared, not guessed. Sums everywhere, one division.

Every term of a loss is a sum over items and a count of items. The loss of an effective batch is

    loss = sum over terms j of weight_j * (sum over all micro-batches and ranks of sum_j) / (the same of count_j)

so each micro-batch back-propagates its own sums over the *whole batch's* counts, and gradients add up to the gradient
of the un-split batch, however the batch was cut. Dividing by the number of micro-batches instead is right only when all
counts happen to be equal. A term that is declared as a sum is not divided.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor

from anybatch.core.geometry import checked_int, is_number, refuse_unless
from anybatch.core.loss_kinds import (
    COUNTED,
    ONLY_TERM,
    TOKENS,
    AcrossSamples,
    Count,
    CountedBefore,
    CountedByLoss,
    LossFunction,
    LossKind,
    Term,
    name_of,
    times,
)
from anybatch.core.tree import Batch
from anybatch.errors import LossError


@dataclass(frozen=True, slots=True)
class LossSum:
    """The exact value of a loss or metric: the `total` over some items, and the `count` of these items.

    Args:
        total: zero-axis tensor, the sum over the items.
        count: number of items (or the sum of their weights); a zero-axis tensor if only the device has it.
    """

    total: Num[Tensor, ""]
    count: "int | float | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function together with its declaration; made by the functions of this module."""

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
        """The functions that are called with the model, by the name under which their parameters are saved."""
        return {"loss": self.function} | ({} if self.kind.encode is None else {"encode": self.kind.encode})

    @property
    def needs_data_to_count(self) -> bool:
        """Whether counts are known only after the micro-batches are loaded."""
        return any(term.count is not None for term in self.kind.terms.values())

    @property
    def allows_other_rows(self) -> bool:
        """Whether its count stays right if a micro-batch has more or fewer rows than samples, as packed ones do."""
        return self.needs_data_to_count or self.kind.brings_count or self.kind.encode is not None


def samples(*, weight: float = 1.0) -> Term:
    """Declare a term as the mean over the samples of the batch, with a weight in the loss."""
    return Term(None, _weight(weight))


def tokens(
    labels: "str | Callable[[Batch], torch.Tensor]" = "labels",
    *,
    ignore_index: int = -100,
    shift: bool = True,
    weight: float = 1.0,
) -> Term:
    """Declare a term as the mean over the unmasked targets.

    Args:
        labels: name of the labels in the batch (key or attribute), or a function of the batch; integer tensor (samples,
            positions).
        ignore_index: label value that marks a masked target.
        shift: the first position is not a target, as in a causal language model, which predicts position t from the
            positions before it. False for masked-language, sequence-to-sequence and token-classification heads.
        weight: the term's weight in the loss.
    """
    is_valid = isinstance(labels, str) or callable(labels)
    refuse_unless(is_valid, "labels", labels, "the name of the labels, or a function of the batch", LossError)
    checked_int("ignore_index", ignore_index, least=None, error=LossError)
    refuse_unless(isinstance(shift, bool), "shift", shift, "True or False", LossError)

    def count(batch: Batch) -> torch.Tensor:
        targets = labels(batch) if callable(labels) else _lookup(batch, labels)
        if shift:
            targets = targets[..., 1:]
        return torch.as_tensor(targets != ignore_index).sum()

    return Term(count, _weight(weight), TOKENS)


def counted(count: Count, *, weight: float = 1.0) -> Term:
    """Declare a term as the mean over `count(batch)` items: class weights, boxes, pairs.

    Args:
        count: `count(batch)` returns the number of items of a micro-batch, 0 or more: a number, or a tensor of one
            element. It is called before the forward, with the batch only.
        weight: the term's weight in the loss.
    """
    refuse_unless(callable(count), "count", count, "a function of a batch", LossError)
    return Term(count, _weight(weight), COUNTED)


def _weight(weight: float) -> float:
    refuse_unless(is_number(weight), "weight", weight, "a finite number", LossError)
    return weight


def mean_over_samples(function: LossFunction) -> Loss:
    """Declare that `function(model, batch)` returns the mean over its samples, or one loss per sample.

    The plain loop: `(function(model, micro_batch) * len(micro_batch) / len(effective_batch)).backward()`.
    """
    return Loss(_callable(function), CountedBefore({ONLY_TERM: samples()}))


def sum_over_samples(function: LossFunction) -> Loss:
    """Declare that `function(model, batch)` returns the sum over its samples, and that the loss should stay a sum.

    The plain loop: `function(model, micro_batch).backward()`. It is not divided, so its gradient grows with the
    effective batch, and a learning rate that suits one size does not suit another: declare most losses as means
    instead. `Engine.evaluate` reports its mean over samples.

    Args:
        function: returns a tensor without axes, one loss per item, or a `LossSum`, whose count is ignored.
    """
    return Loss(_callable(function), CountedBefore({ONLY_TERM: Term(None, is_sum=True)}))


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
        function: returns a tensor without axes, or one loss per target.
        labels: name of the labels in the batch, or a function of the batch; see `tokens`.
        ignore_index: label value that marks a masked target.
        shift: the first position is not a target; see `tokens`.
    """
    terms = {ONLY_TERM: tokens(labels, ignore_index=ignore_index, shift=shift)}
    return Loss(_callable(function), CountedBefore(terms))


def mean_over(function: LossFunction, count: Count) -> Loss:
    """Declare that `function(model, batch)` is a mean over `count(batch)` items.

    A class-weighted cross-entropy is a mean over the sum of its targets' weights:
    `mean_over(loss, count=lambda batch: class_weights[batch["label"]].sum())`.

    Args:
        function: returns a tensor without axes, or one loss per item.
        count: as for `counted`.
    """
    return Loss(_callable(function), CountedBefore({ONLY_TERM: counted(_callable(count))}))


def sum_of(function: LossFunction, **terms: Term) -> Loss:
    """Declare that `function(model, batch)` runs once and returns a dict with the mean of each term.

    `sum_of(loss, lm=tokens(), aux=samples(weight=0.01))`: the loss is `lm + 0.01 * aux`, each over its own count.

    Raises:
        LossError: no term was declared, or a term was not made with `samples`, `tokens` or `counted`.
    """
    if not terms:
        message = "sum_of needs at least one term, such as sum_of(loss, lm=ab.tokens(), aux=ab.samples(weight=0.01))."
        raise LossError(message)
    for name, term in terms.items():
        if not isinstance(term, Term):
            message = f"sum_of term {name}={term!r} must be made with ab.samples, ab.tokens or ab.counted."
            raise LossError(message, term=name)
    return Loss(_callable(function), CountedBefore(dict(terms), named=True))


def joint(encode: LossFunction, function: LossFunction) -> Loss:
    """Declare a loss across samples: `function` needs the outputs of the whole effective batch.

    For contrastive losses (CLIP, SimCSE, SupCon), triplets mined in the batch, Barlow Twins, VICReg. The plain loop:

    ```python
    outputs = concatenate([encode(model, micro_batch) for micro_batch in effective_batch])
    function(model, outputs).backward()
    ```

    The gradient is the same, with the activations of one micro-batch at a time: the engine encodes the micro-batches,
    gathers the outputs of all ranks once, computes the gradient with respect to them, and encodes every micro-batch but
    the last again, under the same random numbers, to back-propagate its rows of that gradient.

    Args:
        encode: `encode(model, batch)` returns a tensor, or a dict, tuple or dataclass of tensors, whose first axis is
            the samples. Include labels and other inputs of `function`; they need no gradient.
        function: `function(model, outputs)` gets these for the whole effective batch, in its order, and returns the
            loss, one number. It may use parameters of the model (a temperature, say), or be a module with its own.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    return Loss(_callable(function), AcrossSamples(_callable(encode)))


def declared(loss: "Loss | LossFunction") -> Loss:
    """Return `loss` if it is declared; otherwise treat it as a function that returns `LossSum` or one loss per item."""
    return loss if isinstance(loss, Loss) else Loss(_callable(loss), CountedByLoss())


def unit_counts(loss: Loss, batch: Batch, num_samples: int) -> tuple[float, ...]:
    """Return each term's count in one micro-batch, as CPU numbers; refuse negative or non-finite counts."""
    counts = []
    for name, term in loss.kind.terms.items():
        # On the host, because the first forward needs the divisors.
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
    """Factors for one micro-batch's value of one term, before the backward.

    A mean is multiplied by weight x `count` of the micro-batch / count of the effective batch, a sum by weight / count
    of the effective batch, or by the weight alone if the term has no divisor. With `adds_without_count` a micro-batch
    without items may still add something: a focal loss on background alone, for example.
    """

    of_mean: float
    of_sum: float
    count: float
    adds_without_count: bool = False

    @property
    def has_value(self) -> bool:
        """Whether the term adds something. A mean over zero items is NaN, and does not."""
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
    filler micro-batch, and `sums` names the terms that return sums.
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
    """Return each term's contribution to the loss of the effective batch, as zero-axis tensors ready for the backward.

    Means with count 0 are left out: a mean over zero items is NaN, and NaN times 0 is NaN.

    Args:
        loss: the declaration.
        output: the value that the loss function returned for this micro-batch.
        factors: one per term, from `factors_of`.

    Raises:
        LossError: the output does not match the declaration.
    """
    if not loss.kind.named:
        return [_contribution(loss, ONLY_TERM, output, factors[0])] if factors[0].has_value else []
    # A missing term would not be trained, and an extra one has no divisor.
    if not isinstance(output, Mapping) or set(output) != set(loss.names):
        found = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        message = (
            f"the loss function was declared with the terms {sorted(loss.names)} but returned {found}. "
            "Return a dict with one value for each of them, or declare what it returns."
        )
        raise LossError(message)
    return [
        _contribution(loss, name, output[name], factor)
        for name, factor in zip(loss.names, factors, strict=True)
        if factor.has_value
    ]


def without_graph() -> LossError:
    """Return the error for a loss without a gradient."""
    if torch.is_grad_enabled():
        return LossError(
            "the loss has no graph, so nothing can be trained. Return it as computed from the model's output: without "
            ".detach(), .item(), torch.tensor(...) or torch.no_grad(), and from parameters that require a gradient."
        )
    return LossError("gradients are switched off, so nothing can be trained. Call the engine outside torch.no_grad().")


def returned_count(output: object) -> "int | float | torch.Tensor":
    """Return the count of an undeclared loss: from its `LossSum`, or the number of its losses per item."""
    if isinstance(output, LossSum):
        return output.count
    assert isinstance(output, torch.Tensor)  # checked by `scaled`
    return output.numel()


def _contribution(loss: Loss, name: str, value: object, factor: TermFactors) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dim():
            # Check before summing: the sum no longer shows the number of values.
            loss.kind.check_items(name, value, factor.count)
            return times(value.sum(), factor.of_sum)
        return loss.kind.mean(value, factor.of_mean)
    if isinstance(value, LossSum):
        _check_loss_sum(loss, name, value, factor)
        return times(value.total, factor.of_sum)
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


def _check_loss_sum(loss: Loss, name: str, value: LossSum, factor: TermFactors) -> None:
    is_tensor = isinstance(value.total, torch.Tensor)
    refuse_unless(is_tensor, f"LossSum.total of term {name!r}", value.total, "a tensor, the sum", LossError)
    is_count = value.count.numel() == 1 if isinstance(value.count, torch.Tensor) else is_number(value.count)
    refuse_unless(is_count, f"LossSum.count of term {name!r}", value.count, "one finite number", LossError)
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
        message = f"labels={name!r} is not in the batch, which has {has}. Pass its name, or a function of the batch."
        raise LossError(message, code="no_labels") from None
    if not isinstance(value, torch.Tensor):
        message = f"labels={name!r} is a {type(value).__name__} in the batch; it must be a tensor to be counted."
        raise LossError(message)
    return value


def _callable(function: Any) -> Any:  # noqa: ANN401 (any value, checked and returned)
    if not callable(function):
        message = (
            f"a loss is declared from a function f(model, batch), not from {type(function).__name__} {function!r}."
        )
        raise LossError(message, code="not_a_function")
    return function
