"""Chapter 6: losses are declared, not guessed. Sums everywhere, one division.

Every term of a loss is a sum over items and a count of items. The loss of an effective batch is

    loss = sum over terms j of weight_j * (sum over all micro-batches and ranks of sum_j) / (the same of count_j)

so each micro-batch back-propagates its own sums over the *whole batch's* counts, and gradients add up to the gradient
of the un-split batch, however the batch was cut. Dividing by the number of micro-batches instead is right only when
all counts happen to be equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor

from anybatch.core.tree import Batch
from anybatch.errors import LossError

LossFunction = Callable[[Any, Batch], Any]
Count = Callable[[Batch], "int | float | torch.Tensor"]
_ONLY_TERM = "loss"
ONE_NUMBER = (
    "the loss function returned one number and does not say over what it is a mean. Declare it: "
    "ab.mean_over_samples(loss) for a mean over samples, ab.mean_over_tokens(loss) for a mean over unmasked targets, "
    "ab.mean_over(loss, count) otherwise; or return one loss per item, or ab.LossSum(total, count)."
)
"""What an undeclared loss is told if it is not a mean over samples, or if that cannot be found out."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """What a loss or a metric knows exactly: the `total` over some items and how many items that were.

    Args:
        total: zero-axis tensor, the sum over the items.
        count: number of items (or the sum of their weights); a zero-axis tensor if it is known on the device only.
    """

    total: Num[Tensor, ""]
    count: "int | float | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a loss: what it is a mean over, and its weight in the loss.

    `count(batch)` must be computable before the forward, from the labels, say; None counts samples. Make terms with
    `samples`, `tokens` and `counted`.
    """

    count: Count | None
    weight: float = 1.0
    unit: str = "samples"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function together with what its values mean. Made by the declarations of this module.

    `terms` is None when only the function itself knows its count (it returns `LossSum` or one loss per item): then the
    gradients are divided once after the last micro-batch instead of before the first.
    `named` says that the function returns a dict with one value per term.
    `encode` is there for a loss across samples: `function` gets what it has made of the whole effective batch.
    """

    function: LossFunction
    terms: Mapping[str, Term] | None
    named: bool = False
    encode: LossFunction | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, in the order counts and sums are kept."""
        return (_ONLY_TERM,) if self.terms is None else tuple(self.terms)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term, by name."""
        return {_ONLY_TERM: 1.0} if self.terms is None else {name: term.weight for name, term in self.terms.items()}

    @property
    def needs_data_to_count(self) -> bool:
        """Whether counts are known only once the micro-batches are loaded."""
        return self.terms is not None and any(term.count is not None for term in self.terms.values())


def samples(*, weight: float = 1.0) -> Term:
    """Declare a term as the mean over the samples of the batch."""
    return Term(None, weight)


def tokens(
    labels: "str | Callable[[Batch], torch.Tensor]" = "labels",
    *,
    ignore_index: int = -100,
    shift: bool = True,
    weight: float = 1.0,
) -> Term:
    """Declare a term as the mean over the targets that are not masked.

    Args:
        labels: name of the labels in the batch (key or attribute), or a function of the batch; integer tensor
            (samples, positions).
        ignore_index: label value that marks a masked target.
        shift: the first position is no target, as in a causal language model, where position t is predicted from the
            positions before it. False for masked-language, sequence-to-sequence and token-classification heads.
        weight: the term's weight in the loss.
    """

    def count(batch: Batch) -> torch.Tensor:
        targets = labels(batch) if callable(labels) else _lookup(batch, labels)
        if shift:
            targets = targets[..., 1:]
        return (targets != ignore_index).sum()

    return Term(count, weight, "tokens")


def counted(count: Count, *, weight: float = 1.0) -> Term:
    """Declare a term as the mean over whatever `count(batch)` says: class weights, boxes, pairs."""
    return Term(count, weight, "counted")


def mean_over_samples(function: LossFunction) -> Loss:
    """Declare that `function(model, batch)` is the mean over the samples it is given, or one loss per sample.

    The plain loop: `(function(model, micro_batch) * len(micro_batch) / len(effective_batch)).backward()`.
    """
    return Loss(_callable(function), {_ONLY_TERM: samples()})


def mean_over_tokens(
    function: LossFunction,
    *,
    labels: "str | Callable[[Batch], torch.Tensor]" = "labels",
    ignore_index: int = -100,
    shift: bool = True,
) -> Loss:
    """Declare that `function(model, batch)` is the mean over unmasked targets (or one loss per target).

    This is what `output.loss` of a causal language model is. See `tokens` for the arguments.
    """
    return Loss(_callable(function), {_ONLY_TERM: tokens(labels, ignore_index=ignore_index, shift=shift)})


def mean_over(function: LossFunction, count: Count) -> Loss:
    """Declare that `function(model, batch)` is a mean over `count(batch)` items.

    A class-weighted cross-entropy is a mean over the sum of its targets' weights:
    `mean_over(loss, count=lambda batch: class_weights[batch["label"]].sum())`.
    """
    return Loss(_callable(function), {_ONLY_TERM: counted(_callable(count))})


def sum_of(function: LossFunction, **terms: Term) -> Loss:
    """Declare that `function(model, batch)` runs once and returns a dict with the mean of each term.

    `sum_of(loss, lm=tokens(), aux=samples(weight=0.01))`: the loss is `lm + 0.01 * aux`, each over its own count.

    Raises:
        LossError: no term was declared.
    """
    if not terms:
        message = "sum_of needs at least one term, such as sum_of(loss, lm=ab.tokens(), aux=ab.samples(weight=0.01))."
        raise LossError(message)
    for name, term in terms.items():
        if not isinstance(term, Term):
            message = f"sum_of term {name}={term!r} must be made with ab.samples, ab.tokens or ab.counted."
            raise LossError(message)
    return Loss(_callable(function), dict(terms), named=True)


def joint(encode: LossFunction, function: LossFunction) -> Loss:
    """Declare a loss that looks across samples: `function` needs the outputs of the whole effective batch.

    For contrastive losses (CLIP, SimCSE, SupCon), triplets mined in the batch, Barlow Twins, VICReg. The plain loop:

    ```python
    outputs = concatenate([encode(model, micro_batch) for micro_batch in effective_batch])
    function(model, outputs).backward()
    ```

    The gradient is the same, with the activations of one micro-batch at a time: micro-batches are encoded, the outputs
    of all ranks brought together once, the gradient with respect to them computed, and every micro-batch but the last
    is encoded again, under the same random numbers, to pass its rows of that gradient on.

    Args:
        encode: `encode(model, batch)` returns a tensor, or a dict, tuple or dataclass of tensors, whose first axis is
            the samples. Labels and whatever else `function` needs come along; they need no gradient.
        function: `function(model, outputs)` gets these for the whole effective batch, in its order, and returns the
            loss, one number. It may use parameters of the model (a temperature, say), or be a module with its own.

    Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.
    """
    return Loss(_callable(function), {_ONLY_TERM: samples()}, encode=_callable(encode))


def declared(loss: "Loss | LossFunction") -> Loss:
    """Return `loss` if it is declared; take a bare function as one that returns `LossSum` or one loss per item."""
    return loss if isinstance(loss, Loss) else Loss(_callable(loss), None)


def unit_counts(loss: Loss, batch: Batch, num_samples: int) -> tuple[float, ...]:
    """Return each term's count in one micro-batch of `num_samples`, as CPU numbers.

    Raises:
        LossError: a count is negative or not finite.
    """
    if loss.terms is None:
        return (float(num_samples),)
    counts = []
    for name, term in loss.terms.items():
        count = float(num_samples if term.count is None else term.count(batch))
        if not 0.0 <= count < float("inf"):
            message = f"the count of loss term {name!r} is {count}; it must be a finite number that is not negative."
            raise LossError(message)
        counts.append(count)
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Share:
    """What one micro-batch's value of one term is multiplied with, before the backward.

    Args:
        of_mean: factor for a value that is a mean: weight x count of the micro-batch / count of the effective batch.
        of_sum: factor for a value that is a sum: weight / count of the effective batch.
        count: items of the term in this micro-batch.
    """

    of_mean: float
    of_sum: float
    count: float


def shares_of(loss: Loss, counts: Sequence[float], divisors: Sequence[float], unit_weight: float) -> tuple[Share, ...]:
    """Return the share of each term for a micro-batch with `counts`, in an effective batch with `divisors`.

    A term whose divisor is 0 has nothing to say in the whole effective batch and gets the share 0.
    """
    weights = [1.0] if loss.terms is None else [term.weight for term in loss.terms.values()]
    shares = []
    for weight, count, divisor in zip(weights, counts, divisors, strict=True):
        of_sum = unit_weight * weight / divisor if divisor else 0.0
        shares.append(Share(of_sum * count, of_sum, count))
    return tuple(shares)


def scaled(loss: Loss, output: object, shares: Sequence[Share]) -> list[torch.Tensor]:
    """Return each term's contribution to the loss of the effective batch, ready for the backward.

    Args:
        loss: the declaration.
        output: what the loss function returned for this micro-batch.
        shares: one per term, from `shares_of`.

    Returns:
        One zero-axis tensor per term that has a count here; terms with count 0 are left out, since a mean over zero
        items is NaN and NaN times 0 is NaN.

    Raises:
        LossError: the output is not what was declared.
    """
    if not loss.named:
        return [_contribution(loss, _ONLY_TERM, output, shares[0])] if shares[0].count else []
    if not isinstance(output, Mapping) or set(output) != set(loss.names):
        found = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        message = (
            f"the loss function was declared with the terms {sorted(loss.names)} but returned {found}. "
            "Return a dict with one value for each of them, or declare what it returns."
        )
        raise LossError(message)
    return [
        _contribution(loss, name, output[name], share)
        for name, share in zip(loss.names, shares, strict=True)
        if share.count
    ]


def returned_count(output: object) -> "int | float | torch.Tensor":
    """Return the count that an undeclared loss brought with its value: of a `LossSum`, or of one loss per item."""
    if isinstance(output, LossSum):
        return output.count
    assert isinstance(output, torch.Tensor)  # checked by `scaled`
    return output.numel()


def _contribution(loss: Loss, name: str, value: object, share: Share) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dim():
            _check_items(loss, name, value, share)
            return value.sum() * share.of_sum
        if loss.terms is None:
            raise LossError(ONE_NUMBER)
        return value * share.of_mean
    if isinstance(value, LossSum):
        _check_loss_sum(loss, name, value, share)
        return value.total * share.of_sum
    if isinstance(value, Mapping) and not loss.named:
        message = (
            f"the loss function returned a dict with the terms {sorted(value)}, but was not declared with terms. "
            "Every term needs its own divisor: use ab.sum_of(loss, name=ab.tokens(), other=ab.samples(weight=0.01))."
        )
        raise LossError(message)
    message = (
        f"the loss function returned {type(value).__name__} for term {name!r}; it must return a tensor "
        "(a mean, or one loss per item) or ab.LossSum(total, count)."
    )
    raise LossError(message)


def _check_items(loss: Loss, name: str, values: torch.Tensor, share: Share) -> None:
    """Refuse losses per item that cannot be one for each item the term counts; a tensor (1,) is a mean gone astray."""
    unit = "counted" if loss.terms is None else loss.terms[name].unit
    fewer_allowed = unit == "counted"  # weights need not be as many as items
    more_allowed = unit != "samples"  # masked targets may be there, with a loss of 0
    num_values = values.numel()
    if (num_values < share.count and not fewer_allowed) or (num_values > share.count and not more_allowed):
        message = (
            f"the loss function returned a tensor of shape {tuple(values.shape)} for term {name!r}, a mean over "
            f"{unit}, of which the micro-batch has {share.count:g}. Return the mean itself (one number, no axis), or "
            f"one loss for each of the {share.count:g} {unit}."
        )
        raise LossError(message)


def _check_loss_sum(loss: Loss, name: str, value: LossSum, share: Share) -> None:
    if value.total.dim():
        message = (
            f"LossSum.total of term {name!r} has shape {tuple(value.total.shape)}; it must be one number, the sum."
        )
        raise LossError(message)
    if loss.terms is None or isinstance(value.count, torch.Tensor):  # reading a tensor would wait for the device
        return
    if abs(value.count - share.count) > 1e-6 * share.count:
        message = (
            f"the loss function returned LossSum with count={value.count} for term {name!r}, but the declaration "
            f"counts {share.count:g} in the same micro-batch. Make the two agree, or pass the bare function."
        )
        raise LossError(message)


def _lookup(batch: Batch, name: str) -> torch.Tensor:
    try:
        value = batch[name] if isinstance(batch, Mapping) else getattr(batch, name)
    except (KeyError, AttributeError):
        has = sorted(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        message = f"labels={name!r} is not in the batch, which has {has}. Pass its name, or a function of the batch."
        raise LossError(message) from None
    if not isinstance(value, torch.Tensor):
        message = f"labels={name!r} is a {type(value).__name__} in the batch; it must be a tensor to be counted."
        raise LossError(message)
    return value


def _callable(function: Any) -> Any:  # noqa: ANN401 (whatever was passed, checked and handed back)
    if not callable(function):
        message = (
            f"a loss is declared from a function f(model, batch), not from {type(function).__name__} {function!r}."
        )
        raise LossError(message)
    return function
