"""The kinds of losses, by their dependence on other samples, which determines how an effective batch is run.

A loss takes one pass if its count (the number of items it averages over) is known before the forward. A loss that
returns its count takes one pass too, and gradients are divided at the end. A loss over the outputs of the whole
effective batch takes two passes. (A dependence inside the network, as in BatchNorm, is not part of the loss.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.core.compatibility import Feature
from anybatch.core.tree import Batch
from anybatch.errors import LossError

LossFunction = Callable[[Any, Batch], Any]
Count = Callable[[Batch], "int | float | torch.Tensor"]
ONLY_TERM = "loss"
"""Name of the term of a loss with a single term."""
ONE_NUMBER = (
    "the loss function returned one number, but its items are not declared. Declare it: "
    "ab.mean_over_samples(loss) for a mean over samples, ab.mean_over_tokens(loss) for a mean over unmasked targets, "
    "ab.mean_over(loss, count) otherwise, ab.sum_over_samples(loss) for a sum; or return one loss per item, or "
    "ab.LossSum(total, count)."
)
"""The error for an undeclared loss that is not a mean over samples, or that cannot be checked."""


@dataclass(frozen=True, slots=True)
class Items:
    """The items over which a term is a mean, and whether a tensor of losses may have fewer or more values than items.

    It may have fewer or more if the count is a sum of weights, and more if it includes masked targets with a loss of 0.
    """

    name: str
    description: str
    values_may_be_fewer: bool = False
    values_may_be_more: bool = False


SAMPLES = Items("samples", "samples")
TOKENS = Items("tokens", "unmasked targets", values_may_be_more=True)
COUNTED = Items("counted", "counted items", values_may_be_fewer=True, values_may_be_more=True)


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a loss: the items of its mean, and its weight in the loss; made by `samples`, `tokens` or `counted`.

    `count(batch)` is called before the forward and counts items, in the labels, say; None counts samples. A term with
    `is_sum` is a sum and is not divided.
    """

    count: Count | None
    weight: float = 1.0
    items: Items = SAMPLES
    is_sum: bool = False

    def __str__(self) -> str:
        """Return the kind of the term: `mean over samples`."""
        return f"sum over {self.items.description}" if self.is_sum else f"mean over {self.items.description}"


@dataclass(frozen=True, slots=True)
class LossKind:
    """The terms of a loss, and the properties that determine how an effective batch is run.

    Attributes:
        terms: the terms, by name. Usually the items of each term can be counted before the forward, and each loss is
            divided before its backward.
        named: whether the loss function returns a dict of its terms.
        returns_count: whether the loss function also returns its count, as a `LossSum` or as one loss per item; then
            gradients are divided after the last micro-batch.
        encode: the function of `ab.joint` that computes a micro-batch's outputs; the loss needs the outputs of the
            whole effective batch, which takes two passes.
    """

    terms: Mapping[str, Term]
    named: bool = False
    returns_count: bool = False
    encode: LossFunction | None = None

    @property
    def feature(self) -> Feature:
        """The feature of the loss in the composition table."""
        if self.encode is not None:
            return Feature.JOINT
        if self.returns_count:
            return Feature.COUNT_LATE
        return Feature.SEVERAL_TERMS if len(self.terms) > 1 else Feature.COUNT_BEFORE

    def describe(self, function: str) -> str:
        """Return the declaration as text, for a loss function with the name `function`."""
        if self.encode is not None:
            return f"joint loss {function} of the outputs of {name_of(self.encode)}"
        if self.returns_count:
            return f"mean over the count that {function} returns"
        if not self.named:
            return f"{next(iter(self.terms.values()))} of {function}"
        weighted = [
            f"{name} ({term}{f', times {term.weight:g}' if term.weight != 1.0 else ''})"
            for name, term in self.terms.items()
        ]
        return f"sum of {', '.join(weighted)} of {function}"

    def check_items(self, name: str, values: torch.Tensor, count: float) -> None:
        """Raise a `LossError` if the number of losses in `values` cannot be the number of items, `count`."""
        if self.returns_count or self.terms[name].is_sum:
            return
        items, num_values = self.terms[name].items, values.numel()
        too_few = num_values < count and not items.values_may_be_fewer
        too_many = num_values > count and not items.values_may_be_more
        if too_few or too_many:
            message = (
                f"the loss function returned shape {tuple(values.shape)} for term {name!r}, but the "
                f"micro-batch has {count:g} {items.name}. It is declared as a mean over {items.name}: return the "
                f"mean itself (one number, shape ()), or one loss for each of the {count:g} {items.name}."
            )
            raise LossError(message, term=name, unit=items.name, code="other_items")

    def check_count(self, name: str, returned: float, declared: float) -> None:
        """Raise a `LossError` if the returned count differs from the declared count of the same micro-batch."""
        # With a tolerance, since a count may be a rounded sum of weights.
        is_same = abs(returned - declared) <= 1e-6 * declared
        if not (self.returns_count or self.terms[name].is_sum or is_same):
            message = (
                f"the loss function returned LossSum(count={returned}) for term {name!r}, but {declared:g} are "
                "declared for this micro-batch. Make the two agree: declare ab.counted(lambda batch: ...), pass the "
                "function without a declaration, or use ab.joint if the count depends on the model's outputs."
            )
            raise LossError(message, term=name, unit=self.terms[name].items.name)


def name_of(function: LossFunction) -> str:
    """Return the name of a function, or the class name of a callable object."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
