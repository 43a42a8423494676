"""The interface of a trainer, and the cases it gets: samples, effective batch size, largest micro-batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from anybatch.core.comparison import Gradients

Samples = Mapping[str, Tensor]
Over = Literal["samples", "targets", "class weights"]
IGNORED = -100


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a loss: its name, the items that it averages over, and its weight in the loss.

    `over` is "samples"; "targets" (entries of `labels` other than -100, from the second position on if `shift`); or
    "class weights" (the mean is over the sum of the targets' weights).
    """

    name: str
    over: Over = "samples"
    weight: float = 1.0
    labels: str = "labels"
    shift: bool = False
    class_weights: tuple[float, ...] = ()

    def count(self, samples: Samples) -> float:
        """Return the divisor of the mean over these samples: a number of samples or targets, or a sum of weights."""
        if self.over == "samples":
            return float(num_samples(samples))
        labels = samples[self.labels]
        if self.over == "targets":
            return float((labels[:, 1:] if self.shift else labels).ne(IGNORED).sum())
        return float(torch.tensor(self.class_weights, dtype=torch.float64)[labels].sum())


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss: `function(model, samples)` returns the mean of each term over the samples of its input.

    The mean over zero items is NaN, as in torch, so a trainer has to omit such a term.
    """

    function: Callable[[nn.Module, Samples], Mapping[str, Tensor]]
    terms: tuple[LossTerm, ...]

    def whole(self, model: nn.Module, samples: Samples) -> Tensor:
        """Return the loss of an un-split batch, which every split has to reproduce."""
        means = self.function(model, samples)
        # The mean over zero items is NaN.
        counted = [term.weight * means[term.name] for term in self.terms if term.count(samples)]
        return torch.stack(counted).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training task whose result must not depend on the split.

    Attributes:
        name: its name in tables, such as "ragged tokens".
        model: builds the model, with the same weights each time.
        samples: builds all samples, along the first axis of every tensor.
        loss: the loss to minimise.
        effective_batch_size: samples of one optimizer step; the last step has the remaining ones.
        micro_batch_sizes: the splits to try.
    """

    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[], dict[str, Tensor]]
    loss: LossTerms
    effective_batch_size: int
    micro_batch_sizes: tuple[int, ...]

    def expected(self) -> list[Gradients]:
        """Return the exact gradient of each effective batch: one forward, one backward, nothing split."""
        samples = self.samples()
        return [
            gradients_of(self.model(), partial(self.loss.whole, samples=part))
            for part in parts(samples, self.effective_batch_size)
        ]


@dataclass(frozen=True, slots=True)
class SplitCase:
    """One case with one split: the input of an adapter."""

    case: Case
    micro_batch_size: int

    @property
    def loss(self) -> LossTerms:
        """The loss of the case."""
        return self.case.loss

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step; the last one has the remaining ones."""
        return self.case.effective_batch_size

    def model(self) -> nn.Module:
        """Return the model."""
        return self.case.model()

    def samples(self) -> dict[str, Tensor]:
        """Return all samples, in training order."""
        return self.case.samples()


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """The gradient and samples of one optimizer step.

    Attributes:
        gradients: parameter name -> gradient; None for a parameter that no backward has reached.
        sample_ids: positions of its samples in the data; None if the trainer does not report them.
    """

    gradients: Gradients
    sample_ids: tuple[int, ...] | None = None


class Adapter(Protocol):
    """The interface to a trainer: its name, and one method."""

    @property
    def name(self) -> str:
        """Name of the trainer in tables."""
        ...

    def steps(self, split: SplitCase) -> Iterable[TrainerStep]:
        """Go through the samples once, in order, without changing parameters, and return the gradient of every step."""
        ...


def num_samples(samples: Samples) -> int:
    """Return the length of the first axis."""
    return len(next(iter(samples.values())))


def parts(samples: Samples, size: int) -> list[dict[str, Tensor]]:
    """Return the samples in parts of `size`, the last one with the remaining ones."""
    starts = range(0, num_samples(samples), size)
    return [{name: value[start : start + size] for name, value in samples.items()} for start in starts]


def gradients_of(model: nn.Module, *losses: Callable[[nn.Module], Tensor]) -> Gradients:
    """Run the backward of each loss on a new model, and return the accumulated gradients."""
    for loss in losses:
        loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
