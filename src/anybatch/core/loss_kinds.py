"""How the loss of one sample depends on the other samples; each kind of dependence is a class.

No dependence, or a count that is known beforehand: one pass. A count that comes with the value: one pass, divided at
the end. The outputs of the whole effective batch: two passes. (A dependence inside the network, as in BatchNorm, is not
part of the loss.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
    "the loss function returned one number and no declaration says what it is a mean over. Declare it: "
    "ab.mean_over_samples(loss) for a mean over samples, ab.mean_over_tokens(loss) for a mean over unmasked targets, "
    "ab.mean_over(loss, count) otherwise, ab.sum_over_samples(loss) for a sum; or return one loss per item, or "
    "ab.LossSum(total, count)."
)
"""The error for an undeclared loss that is not a mean over samples, or that cannot be checked."""


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a term's mean; weights are not items, and masked targets may be present with a loss of 0."""

    name: str
    description: str
    values_may_be_fewer: bool = False
    values_may_be_more: bool = False


SAMPLES = Items("samples", "samples")
TOKENS = Items("tokens", "unmasked targets", values_may_be_more=True)
COUNTED = Items("counted", "counted items", values_may_be_fewer=True, values_may_be_more=True)


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a loss: the items of its mean, and its weight in the loss.

    `count(batch)` runs before the forward, from the labels, say; None counts samples. Make terms with `samples`,
    `tokens` and `counted`. A term with `is_sum` is a sum and is not divided.
    """

    count: Count | None
    weight: float = 1.0
    items: Items = SAMPLES
    is_sum: bool = False

    def __str__(self) -> str:
        """Return how its values are combined: `mean over samples`."""
        return f"sum over {self.items.description}" if self.is_sum else f"mean over {self.items.description}"


@dataclass(frozen=True, slots=True)
class CountedBefore:
    """Each term is a mean over items that can be counted before the forward: one pass, divided before each backward."""

    terms: Mapping[str, Term]
    named: bool = False
    brings_count = False
    encode = None

    @property
    def feature(self) -> Feature:
        """One term or several."""
        return Feature.SEVERAL_TERMS if len(self.terms) > 1 else Feature.COUNT_BEFORE

    def describe(self, function: str) -> str:
        """Return the declaration of a function of this name in words."""
        if not self.named:
            return f"{next(iter(self.terms.values()))} of {function}"
        weighted = [
            f"{name} ({term}{f', times {term.weight:g}' if term.weight != 1.0 else ''})"
            for name, term in self.terms.items()
        ]
        return f"sum of {', '.join(weighted)} of {function}"

    def check_items(self, name: str, values: torch.Tensor, count: float) -> None:
        """Raise a `LossError` if the number of losses cannot match the count; a tensor (1,) is likely a mean."""
        if self.terms[name].is_sum:
            return
        items, num_values = self.terms[name].items, values.numel()
        too_few = num_values < count and not items.values_may_be_fewer
        too_many = num_values > count and not items.values_may_be_more
        if too_few or too_many:
            message = (
                f"the loss function returned a tensor of shape {tuple(values.shape)} for term {name!r}, a mean over "
                f"{items.name}, of which the micro-batch has {count:g}. Return the mean itself (one number, no axis), "
                f"or one loss for each of the {count:g} {items.name}."
            )
            raise LossError(message, term=name, unit=items.name, code="other_items")

    def mean(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a mean times `factor` (`TermFactors.of_mean`)."""
        return times(value, factor)

    def check_count(self, name: str, returned: float, declared: float) -> None:
        """Raise a `LossError` if a returned count differs from the declared count of the same micro-batch."""
        # With a tolerance: a count may be a sum of weights, which is rounded.
        if abs(returned - declared) > 1e-6 * declared and not self.terms[name].is_sum:
            counted = (
                f"or count in the data set or collate, and declare {name}=ab.counted(lambda batch: ...); if the count "
                "depends on the model's outputs, use ab.joint(encode, loss), whose function sees all of them"
            )
            other = counted if self.named else "or pass the bare function"
            message = (
                f"the loss function returned LossSum with count={returned} for term {name!r}, but the declaration "
                f"counts {declared:g} in the same micro-batch. Make the two agree, {other}."
            )
            raise LossError(message, term=name, unit=self.terms[name].items.name)


@dataclass(frozen=True, slots=True)
class CountedByLoss:
    """The function returns its count too: `LossSum`, or one loss per item. Gradients are divided at the end."""

    # Gradients are divided by the number of samples until the true count arrives.
    terms = MappingProxyType({ONLY_TERM: Term(None)})
    named = False
    brings_count = True
    encode = None
    feature = Feature.COUNT_LATE

    def describe(self, function: str) -> str:
        """See `CountedBefore`."""
        return f"mean over the count that {function} returns"

    def check_items(self, name: str, values: torch.Tensor, count: float) -> None:
        """See `CountedBefore`: any number of items is right, since the loss counts them."""

    def mean(self, value: torch.Tensor, factor: float) -> torch.Tensor:  # noqa: ARG002 (the same in all kinds)
        """Raise a `LossError`, because the divisor of a single number was not declared."""
        raise LossError(ONE_NUMBER)

    def check_count(self, name: str, returned: float, declared: float) -> None:
        """See `CountedBefore`: any count is right, since none was declared."""


@dataclass(frozen=True, slots=True)
class AcrossSamples:
    """The function needs the outputs of the whole effective batch, which `encode` returns: two passes."""

    encode: LossFunction
    terms = MappingProxyType({ONLY_TERM: Term(None)})
    named = False
    brings_count = False
    feature = Feature.JOINT

    def describe(self, function: str) -> str:
        """See `CountedBefore`."""
        return f"joint loss {function} of the outputs of {name_of(self.encode)}"

    def check_items(self, name: str, values: torch.Tensor, count: float) -> None:
        """See `CountedBefore`: the same as for a mean over samples."""
        _SAMPLE_MEAN.check_items(name, values, count)

    def mean(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a mean times its factor."""
        return times(value, factor)

    def check_count(self, name: str, returned: float, declared: float) -> None:
        """See `CountedBefore`: the same as for a mean over samples."""
        _SAMPLE_MEAN.check_count(name, returned, declared)


LossKind = CountedBefore | CountedByLoss | AcrossSamples
"""How the loss of one sample depends on the other samples; determines how an effective batch is run.

With `brings_count` gradients are divided after the last micro-batch. `encode` is the function of a micro-batch whose
outputs the loss needs from the whole effective batch. `feature` is the row of the composition table.
"""


def name_of(function: LossFunction) -> str:
    """Return the name of a function, or the class name of a callable object."""
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]


def times(value: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `value * factor` in new memory, even for a factor of 1.

    Never return the value: the user may have kept it, and add the next micro-batch's value to it in place. And its
    storage may be far larger than one number: `mse_loss` leaves its mean in the memory of the squares of all elements.
    """
    return value.clone() if factor == 1.0 else value * factor  # the backward of a copy computes nothing


_SAMPLE_MEAN = CountedBefore(MappingProxyType({ONLY_TERM: Term(None)}))
