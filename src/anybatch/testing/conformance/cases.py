"""The interface of a trainer, and test cases: small smooth models in float64, and all kinds of uneven batches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.core.tensors import Gradients

Samples = Mapping[str, Tensor]
Over = Literal["samples", "targets", "class weights"]
IGNORED = -100


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a loss: its name, the items that it averages over, and its weight in the loss.

    `over` is "samples"; "targets" (entries of `labels` other than -100; if `shift`, without the first position); or
    "class weights" (a weighted mean, divided by the sum of the targets' weights).
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
    """A loss: `function(model, samples)` returns the mean of each term over these samples, by name of the term.

    The mean over zero items is NaN, as in torch, so a trainer has to omit a term without items.
    """

    function: Callable[[nn.Module, Samples], Mapping[str, Tensor]]
    terms: tuple[LossTerm, ...]

    def whole_batch_loss(self, model: nn.Module, samples: Samples) -> Tensor:
        """Return the loss of an unsplit batch; the gradient of every split must be equal to its gradient."""
        means = self.function(model, samples)
        counted = [term.weight * means[term.name] for term in self.terms if term.count(samples)]
        return torch.stack(counted).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training task whose result must not depend on the split.

    `model()` returns a new model, with the same weights each time. `samples()` returns all samples as tensors whose
    first axis is the sample; the last step has the remaining samples. `micro_batch_sizes` are the splits to try.
    """

    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[], dict[str, Tensor]]
    loss: LossTerms
    effective_batch_size: int
    micro_batch_sizes: tuple[int, ...]

    def expected(self) -> list[Gradients]:
        """Return the exact gradient of each effective batch, from one forward and backward of the whole batch."""
        samples = self.samples()
        return [
            gradients_of(self.model(), partial(self.loss.whole_batch_loss, samples=part))
            for part in parts(samples, self.effective_batch_size)
        ]


@dataclass(frozen=True, slots=True)
class SplitCase:
    """A case and a micro-batch size: the input of `Adapter.steps`."""

    case: Case
    micro_batch_size: int

    @property
    def loss(self) -> LossTerms:
        """The loss of the case."""
        return self.case.loss

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step; the last step may have fewer."""
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

    A gradient is None for a parameter that no backward has reached. `sample_ids` are positions in the data; None if the
    trainer does not report them.
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
        """Train on the samples once, in order, without changing parameters; return the gradient of every step."""
        ...


def num_samples(samples: Samples) -> int:
    """Return the number of samples, the length of the first axis."""
    return len(next(iter(samples.values())))


def parts(samples: Samples, size: int) -> list[dict[str, Tensor]]:
    """Return the samples in parts of `size`; the last part has the remaining samples."""
    starts = range(0, num_samples(samples), size)
    return [{name: value[start : start + size] for name, value in samples.items()} for start in starts]


def gradients_of(model: nn.Module, *losses: Callable[[nn.Module], Tensor]) -> Gradients:
    """Run the backward of each loss on a new model, and return the accumulated gradients."""
    for loss in losses:
        loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


_NUM_FEATURES, _NUM_CLASSES, _NUM_WORDS, _WIDTH = 6, 4, 9, 12
# The weights differ much, so that a loss that ignores them has a large error.
_CLASS_WEIGHTS = (0.2, 2.0, 1.0, 0.6)
_AUX_WEIGHT = 0.05


class Classifier(nn.Module):
    """A perceptron with a frozen first layer and one layer that no forward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(_NUM_FEATURES, 8).requires_grad_(requires_grad=False)
        self.hidden = nn.Linear(8, 10)
        self.norm = nn.LayerNorm(10)
        self.out = nn.Linear(10, _NUM_CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.out(self.norm(torch.tanh(self.hidden(torch.tanh(self.frozen(features))))))
        return logits


class NextWord(nn.Module):
    """Predicts each word from the mean of the words before it; input and output embeddings are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_NUM_WORDS, 7)
        self.hidden = nn.Linear(7, 7)
        self.out = nn.Linear(7, _NUM_WORDS)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return logits for the next word at each position."""
        means = self.words(words).cumsum(1) / torch.arange(1, words.shape[1] + 1).unsqueeze(1)
        logits: Tensor = self.out(torch.tanh(self.hidden(means)))
        return logits


def classifier() -> nn.Module:
    """Return the classifier, with the same weights each time."""
    return _filled(Classifier().double())


def next_word() -> nn.Module:
    """Return the language model, with the same weights each time."""
    return _filled(NextWord().double())


def vectors(number: int) -> dict[str, Tensor]:
    """Return `number` random feature vectors with class labels, the same in each call."""
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(number, _NUM_FEATURES, generator=generator, dtype=torch.float64)
    return {"features": features, "labels": torch.randint(_NUM_CLASSES, (number,), generator=generator)}


def sentences(number: int, empty: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    """Return random sentences of very different lengths, always the same; the sentences in `empty` have no targets."""
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(_NUM_WORDS, (number, _WIDTH), generator=generator)
    lengths = torch.randint(2, _WIDTH + 1, (number, 1), generator=generator)
    lengths[empty[0] : empty[1]] = 0
    labels = words.masked_fill(torch.arange(_WIDTH) >= lengths, IGNORED)
    return {
        "words": words,
        "labels": labels,
        "value": torch.randn(number, generator=generator, dtype=torch.float64),
    }


def classify(model: nn.Module, samples: Samples) -> Mapping[str, Tensor]:
    """Return the mean cross-entropy."""
    return {"loss": F.cross_entropy(model(samples["features"]), samples["labels"])}


def classify_weighted(model: nn.Module, samples: Samples) -> Mapping[str, Tensor]:
    """Return the class-weighted mean cross-entropy."""
    weights = torch.tensor(_CLASS_WEIGHTS, dtype=torch.float64)
    return {"loss": F.cross_entropy(model(samples["features"]), samples["labels"], weight=weights)}


def predict(model: nn.Module, samples: Samples) -> Mapping[str, Tensor]:
    """Return the mean cross-entropy of the next words that are not masked."""
    logits = model(samples["words"])
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), samples["labels"][:, 1:].flatten())}


def predict_and_value(model: nn.Module, samples: Samples) -> Mapping[str, Tensor]:
    """Return the mean cross-entropy of `predict` and a mean over samples, from one forward."""
    logits = model(samples["words"])
    words = F.cross_entropy(logits[:, :-1].flatten(0, 1), samples["labels"][:, 1:].flatten())
    return {"words": words, "value": (logits.mean((1, 2)) - samples["value"]).square().mean()}


OVER_SAMPLES = LossTerms(classify, (LossTerm("loss"),))
OVER_WEIGHTS = LossTerms(classify_weighted, (LossTerm("loss", "class weights", class_weights=_CLASS_WEIGHTS),))
OVER_TARGETS = LossTerms(predict, (LossTerm("loss", "targets", shift=True),))
TWO_TERMS = LossTerms(
    predict_and_value, (LossTerm("words", "targets", shift=True), LossTerm("value", "samples", weight=_AUX_WEIGHT))
)

_ROWS = (
    ("even", classifier, partial(vectors, 24), OVER_SAMPLES, 12, (12, 4, 1)),
    # 13 samples in parts of 5 leave 3, and in parts of 4 leave 1.
    ("ragged micro-batches", classifier, partial(vectors, 26), OVER_SAMPLES, 13, (13, 5, 4)),
    # Two full effective batches of 12, and one of 4 samples.
    ("partial last batch", classifier, partial(vectors, 28), OVER_SAMPLES, 12, (12, 4, 2)),
    ("class weights", classifier, partial(vectors, 24), OVER_WEIGHTS, 12, (12, 4, 1)),
    ("masked tokens", next_word, partial(sentences, 24), OVER_TARGETS, 12, (12, 4, 1)),
    # Samples 3 to 8 have no target: two whole micro-batches of three.
    ("micro-batches without targets", next_word, partial(sentences, 24, empty=(3, 9)), OVER_TARGETS, 12, (12, 3, 1)),
    ("two terms", next_word, partial(sentences, 22, empty=(3, 9)), TWO_TERMS, 11, (11, 3)),
    ("fewer samples than one micro-batch", classifier, partial(vectors, 3), OVER_SAMPLES, 12, (12, 4, 2)),
)
CASES: tuple[Case, ...] = tuple(
    Case(name=name, model=model, samples=samples, loss=loss, effective_batch_size=size, micro_batch_sizes=cuts)
    for name, model, samples, loss, size, cuts in _ROWS
)


def _filled(model: nn.Module) -> nn.Module:
    """Fill the parameters with random numbers from a separate, seeded generator."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model
