"""Losses that match their declaration, and losses that do not, on models with dropout and BatchNorm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.loss import Loss
from anybatch.core.records import DiagnosisRecord, Record
from tests.engine.cases import CLASS_WEIGHTS, NUM_CLASSES, NUM_WORDS, Batch, sentences, vectors

HOLDS = "confirmed by the check of the first step"
MakeModel = Callable[[], nn.Module]


class Classifier(nn.Module):
    """Classifies vectors, with BatchNorm and dropout.

    With labels it computes its loss, as transformers models do.
    """

    def __init__(self, num_outputs: int = NUM_CLASSES, kind: str = "mean") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, num_outputs)
        self.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        logits: torch.Tensor = self.head(self.body(x))
        return logits if y is None else {"loss": LOSSES_INSIDE[self.kind](logits, y), "logits": logits}


class Tagger(nn.Module):
    """Predicts words, with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(8, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.words(words).cumsum(1).transpose(1, 2)).transpose(1, 2)
        logits: torch.Tensor = self.out(self.dropout(torch.tanh(seen)))
        return logits


class Criterion(nn.Module):
    """A loss with parameters, and with a state that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(NUM_CLASSES, NUM_CLASSES)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.get_buffer("num_calls").add_(1)
        return F.cross_entropy(self.projection(model(batch["x"])) * self.temperature.exp(), batch["y"])


def contrast(ones: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return InfoNCE: each vector has to find its partner among all of them."""
    similarities = F.normalize(ones, dim=1) @ F.normalize(others, dim=1).T
    return F.cross_entropy(5 * similarities, torch.arange(len(ones)))


LOSSES_INSIDE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": F.cross_entropy,
    "weights": lambda logits, y: F.cross_entropy(logits, y, weight=CLASS_WEIGHTS.to(logits.dtype)),
}


def mean_over_words(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over unmasked targets."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, NUM_WORDS), labels[:, 1:].reshape(-1))


# Losses, as a user writes them


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def of_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over the next words."""
    return mean_over_words(model(batch["words"]), batch["labels"])


def of_words_summed(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return a sum over words, with its count."""
    number = (batch["labels"][:, 1:] != -100).sum()
    return ab.LossSum(of_words(model, batch) * number, number)


def of_words_and_values(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return a mean over words and one over samples."""
    logits = model(batch["words"])
    distances = (logits.mean((1, 2)) - batch["value"]).square()
    return {"lm": mean_over_words(logits, batch["labels"]), "aux": distances.mean()}


def of_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean with class weights."""
    logits = model(batch["x"])
    return LOSSES_INSIDE["weights"](logits, batch["y"])


def of_summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a sum over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def of_pairs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a contrastive loss of two views."""
    return contrast(model(batch["x"]), model(batch["x"] + 0.1))


def from_inside_of_vectors(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss that the classifier computes."""
    loss: torch.Tensor = model(batch["x"], batch["y"])["loss"]
    return loss


@dataclass(frozen=True, slots=True)
class Declared:
    """A model, a batch, and a declared loss; `words` are the cause of the expected error, and a part of its remedy."""

    model: MakeModel
    batch: Callable[[], Batch]
    loss: Callable[[], Loss | Callable[[Any, Any], Any]]
    words: tuple[str, ...] = ()


def two_models() -> nn.Module:
    """Return two classifiers by name."""
    return nn.ModuleDict({"one": Classifier(), "other": Classifier()})


def samples() -> Batch:
    """Return labelled vectors."""
    return vectors(23)


RIGHT: Mapping[str, Declared] = {
    "samples": Declared(Classifier, samples, lambda: ab.mean_over_samples(of_samples)),
    "one number, undeclared": Declared(Classifier, samples, lambda: of_samples),
    "a loss with parameters": Declared(Classifier, samples, lambda: ab.mean_over_samples(Criterion())),
    "named models": Declared(
        two_models, samples, lambda: ab.mean_over_samples(lambda model, batch: of_samples(model["other"], batch))
    ),
    "tokens": Declared(Tagger, sentences, lambda: ab.mean_over_tokens(of_words)),
    "LossSum, undeclared": Declared(Tagger, sentences, lambda: of_words_summed),
    "two terms": Declared(
        Tagger, sentences, lambda: ab.sum_of(of_words_and_values, lm=ab.tokens(), aux=ab.samples(weight=0.01))
    ),
}

_JOINT = ("joint", "ab.joint(encode, loss)")
_TOKENS = ("mean", "ab.mean_over_tokens(loss, labels='labels', shift=True)")
_SUM = ("sum", "ab.LossSum(total, count)")
_WEIGHTS = ("other_items", "ab.mean_over(loss, count=")

WRONG: Mapping[str, Declared] = {
    "tokens as samples": Declared(Tagger, sentences, lambda: ab.mean_over_samples(of_words), _TOKENS),
    "contrastive as samples": Declared(Classifier, samples, lambda: ab.mean_over_samples(of_pairs), _JOINT),
    "a sum as a mean": Declared(Classifier, samples, lambda: ab.mean_over_samples(of_summed), _SUM),
    "a mean as a sum": Declared(
        Classifier,
        samples,
        lambda: ab.sum_over_samples(of_samples),
        ("mean", "ab.mean_over_samples(loss)"),
    ),
    "a column against a row": Declared(
        lambda: Classifier(1),
        samples,
        lambda: ab.mean_over_samples(lambda model, batch: (model(batch["x"]) - batch["x"].sum(1)).square().mean()),
        ("broadcast", "In sub, tensors of shapes ("),
    ),
    "samples as tokens, of which some samples have none": Declared(
        Classifier,
        lambda: {**samples(), "labels": (torch.arange(23)[:, None] % 4 > torch.arange(6)).long() - 100},
        lambda: ab.mean_over_tokens(of_samples, ignore_index=-100),
        ("mean", "ab.mean_over_samples(loss)"),
    ),
    "weights forgotten": Declared(Classifier, samples, lambda: ab.mean_over_samples(of_weights), _WEIGHTS),
    "weights forgotten, inside": Declared(
        lambda: Classifier(kind="weights"), samples, lambda: ab.mean_over_samples(from_inside_of_vectors), _WEIGHTS
    ),
    "a term over samples": Declared(
        Tagger,
        sentences,
        lambda: ab.sum_of(of_words_and_values, lm=ab.samples(), aux=ab.samples(weight=0.01)),
        ("mean", "lm=ab.tokens(labels='labels', shift=True)"),
    ),
    "two divisors in one number": Declared(
        Tagger,
        sentences,
        lambda: ab.mean_over_samples(lambda model, batch: sum(of_words_and_values(model, batch).values())),
        ("unknown", "ab.sum_of("),
    ),
    "a mean for a sum": Declared(
        Classifier,
        samples,
        lambda: lambda model, batch: ab.LossSum(of_samples(model, batch), len(batch["x"])),
        ("no_count", "ab.LossSum(total, count)"),
    ),
}


class Diagnoses:
    """An observer that keeps the codes of diagnoses."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def observe(self, record: Record, /) -> None:
        """Take a record."""
        if isinstance(record, DiagnosisRecord):
            self.codes.append(record.code)


def engine_for(case: Declared, dtype: torch.dtype = torch.float64, **options: Any) -> ab.Engine:
    """Build the engine of a case."""
    torch.manual_seed(0)
    model: Any = case.model().to(dtype)
    passed = dict(model.items()) if isinstance(model, nn.ModuleDict) else model
    loss = case.loss()
    if isinstance(loss, Loss) and isinstance(loss.function, nn.Module):
        loss.function.to(dtype)
    options = {"world": ab.World(), "micro_batch_size": 9, "norms": "keep", **options}
    return ab.Engine(passed, lambda named: torch.optim.SGD(named, lr=0.1), loss, **options)


def batch_of(case: Declared, dtype: torch.dtype = torch.float64) -> Batch:
    """Return the batch of a case, with floating-point numbers in this dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in case.batch().items()}
