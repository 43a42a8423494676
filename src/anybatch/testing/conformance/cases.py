"""The cases: small float64 models that are smooth everywhere, and all kinds of uneven batches."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.testing.conformance.protocol import IGNORED, Case, LossTerm, LossTerms, Samples

_NUM_FEATURES, _NUM_CLASSES, _NUM_WORDS, _WIDTH = 6, 4, 9, 12
# Far apart, so that a mean without these weights is far off.
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
    """Return vectors with classes."""
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(number, _NUM_FEATURES, generator=generator, dtype=torch.float64)
    return {"features": features, "labels": torch.randint(_NUM_CLASSES, (number,), generator=generator)}


def sentences(number: int, empty: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    """Return sentences of very different lengths, always equal for the same number."""
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
    """Return this loss and a mean over samples, from one forward."""
    logits = model(samples["words"])
    words = F.cross_entropy(logits[:, :-1].flatten(0, 1), samples["labels"][:, 1:].flatten())
    return {"words": words, "value": (logits.mean((1, 2)) - samples["value"]).square().mean()}


OVER_SAMPLES = LossTerms(classify, (LossTerm("loss"),))
OVER_WEIGHTS = LossTerms(classify_weighted, (LossTerm("loss", "class weights", class_weights=_CLASS_WEIGHTS),))
OVER_TARGETS = LossTerms(predict, (LossTerm("loss", "targets", shift=True),))
TWO_TERMS = LossTerms(
    predict_and_value, (LossTerm("words", "targets", shift=True), LossTerm("value", "samples", weight=_AUX_WEIGHT))
)

CASES: tuple[Case, ...] = (
    Case(
        name="even",
        model=classifier,
        samples=lambda: vectors(24),
        loss=OVER_SAMPLES,
        effective_batch_size=12,
        micro_batch_sizes=(12, 4, 1),
    ),
    Case(
        name="ragged micro-batches",
        model=classifier,
        samples=lambda: vectors(26),
        loss=OVER_SAMPLES,
        effective_batch_size=13,
        # 13 in parts of 5 leaves 3, and in parts of 4 leaves 1.
        micro_batch_sizes=(13, 5, 4),
    ),
    Case(
        name="partial last window",
        model=classifier,
        # Two full windows of 12, and 4 samples.
        samples=lambda: vectors(28),
        loss=OVER_SAMPLES,
        effective_batch_size=12,
        micro_batch_sizes=(12, 4, 2),
    ),
    Case(
        name="class weights",
        model=classifier,
        samples=lambda: vectors(24),
        loss=OVER_WEIGHTS,
        effective_batch_size=12,
        micro_batch_sizes=(12, 4, 1),
    ),
    Case(
        name="masked tokens",
        model=next_word,
        samples=lambda: sentences(24),
        loss=OVER_TARGETS,
        effective_batch_size=12,
        micro_batch_sizes=(12, 4, 1),
    ),
    Case(
        name="micro-batches without targets",
        model=next_word,
        # Samples 3 to 8 have no target: two whole micro-batches of three.
        samples=lambda: sentences(24, empty=(3, 9)),
        loss=OVER_TARGETS,
        effective_batch_size=12,
        micro_batch_sizes=(12, 3, 1),
    ),
    Case(
        name="two terms",
        model=next_word,
        samples=lambda: sentences(22, empty=(3, 9)),
        loss=TWO_TERMS,
        effective_batch_size=11,
        micro_batch_sizes=(11, 3),
    ),
    Case(
        name="fewer samples than one micro-batch",
        model=classifier,
        samples=lambda: vectors(3),
        loss=OVER_SAMPLES,
        effective_batch_size=12,
        micro_batch_sizes=(12, 4, 2),
    ),
)


def _filled(model: nn.Module) -> nn.Module:
    """Fill the parameters from a separate generator, independent of any random state."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model
