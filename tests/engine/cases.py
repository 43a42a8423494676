"""Models, batches and declared losses that give equal results for any cut, each with its unsplit reference.

The references are plain torch: one forward over all samples, one backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.loss import Loss
from anybatch.core.splitting import Deal, even_parts
from anybatch.engine.micro_batches import RankShare
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.ddp import DDP
from anybatch.parallel.single import Single
from anybatch.parallel.strategy import Strategy

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]

NUM_FEATURES, NUM_CLASSES, NUM_WORDS = 5, 4, 11
CLASS_WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 0.5], dtype=torch.float64)
AUX_WEIGHT = 0.01


class InMemory:
    """An effective batch whose samples are already in memory."""

    def __init__(self, batch: Batch, *, seed: int = 0, end: Position | None = None) -> None:
        self.batch = batch
        self.seed = seed
        self.end = end or Position()
        self.sample_ids = range(num_samples(batch))

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield slices."""
        del later_units
        for positions in units:
            yield pick(self.batch, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch, a declared loss, and the loss of the unsplit batch in plain torch.

    Attributes:
        model: builds the model, the same one each time.
        batch: builds the whole effective batch.
        loss: the engine's loss.
        reference: the loss of the whole batch.
        plain_loop_holds: dividing by the number of micro-batches is right too, because all sizes are equal.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss | Callable[[Any, Any], Any]
    reference: Callable[[nn.Module, Batch], torch.Tensor]
    plain_loop_holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A way to cut an effective batch.

    `brought` is None if the batch is dealt to ranks; otherwise each rank brings a share, and this function returns the
    relative sizes of the shares for any number of ranks.
    """

    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    deal: Deal = "balanced"
    brought: Callable[[int], list[int]] | None = None


SPLITS: Mapping[str, Split] = {
    "1": Split(micro_batch_size=1),
    "3": Split(micro_batch_size=3),
    "7": Split(micro_batch_size=7),
    "all": Split(),
    "4 steps": Split(accumulation_steps=4),
    "3, fixed": Split(micro_batch_size=3, deal="fixed"),
    "3, uneven shares": Split(micro_batch_size=3, brought=lambda size: list(range(size, 0, -1))),
    "3, an empty share": Split(micro_batch_size=3, brought=lambda size: [0] * (size - 1) + [1]),
}

STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "single": Single,
    "all_reduce": lambda: AllReduce(bucket_bytes=256),  # so that small models have several buckets
    "all_reduce, after": lambda: AllReduce(overlap=False),
    "ddp": DDP,
}


def combinations(world_size: int) -> list[tuple[str, str]]:
    """Return the pairs (split, strategy) to run: the first strategy with every split, the others with few.

    On two ranks these include micro-batches of one sample, where a rank may have nothing to count in most of them.
    """
    first, *others = [name for name in STRATEGIES if name != "single" or world_size == 1]
    few = ("1", "3") if world_size == 2 else ("3",)
    return [(split, first) for split in SPLITS] + [(split, name) for name in others for split in few]


def num_samples(batch: Batch) -> int:
    """Return the length of the first axis."""
    return len(next(iter(batch.values())))


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Return some samples."""
    return {name: value[start:stop] for name, value in batch.items()}


def pick(batch: Batch, positions: Sequence[int]) -> Batch:
    """Return the samples at some positions."""
    if isinstance(positions, range):
        return cut(batch, positions.start, positions.stop)
    return {name: value[list(positions)] for name, value in batch.items()}


def share_bounds(total: int, weights: list[int]) -> list[tuple[int, int]]:
    """Return the ranges of shares whose sizes are proportional to `weights`, up to rounding."""
    ends = [total * sum(weights[: rank + 1]) // sum(weights) for rank in range(len(weights))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def arrive(batch: Batch, split: Split, world: ab.World) -> "InMemory | RankShare":
    """Return the batch as this rank's engine gets it."""
    if split.brought is None:
        return InMemory(batch)
    start, stop = share_bounds(num_samples(batch), split.brought(world.size))[world.rank]
    return RankShare(cut(batch, start, stop) if stop > start else None)


def engine_for(case: Case, split: Split, strategy: Strategy, world: ab.World, **options: Any) -> ab.Engine:
    """Return an engine for a case, with plain SGD unless `options` contain an optimizer."""
    model = case.model()
    optimizer = options.pop("optimizer", None) or (lambda named: torch.optim.SGD(named, lr=0.1))
    return ab.Engine(
        model,
        optimizer,
        case.loss,
        micro_batch_size=split.micro_batch_size,
        accumulation_steps=split.accumulation_steps,
        deal=split.deal,
        strategy=strategy,
        world=world,
        **options,
    )


def sgd_engine(model: Any, loss: Callable[[Any, Any], Any] | None = None, **options: Any) -> ab.Engine:
    """Return an engine with plain SGD for a mean over samples, of `classify` unless a function is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, ab.mean_over_samples(loss or classify), **options)


def plain_gradients(model: nn.Module, loss: torch.Tensor) -> Gradients:
    """Return the `.grad` of one backward of the unsplit loss."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def naive_gradients(case: Case, world: ab.World, micro_batch_size: int | None) -> Gradients:
    """Return the gradient of the usual hand-written loop: `loss / K` per micro-batch, the mean over ranks.

    Only for cases whose loss is one number; all ranks take part, with shares that differ by at most one sample.
    """
    model, batch = case.model(), case.batch()
    sizes = even_parts(num_samples(batch), world.size)
    start = sum(sizes[: world.rank])
    size = micro_batch_size or sizes[world.rank]
    pieces = [
        cut(batch, first, min(first + size, start + sizes[world.rank]))
        for first in range(start, start + sizes[world.rank], size or 1)
    ]
    for piece in pieces:
        (case.reference(model, piece) / len(pieces)).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if world.size > 1:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world.size
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# Models


def perceptron() -> nn.Module:
    """Return a float64 classifier of vectors."""
    torch.default_generator.manual_seed(1)  # torch.manual_seed takes longer than the network
    layers = nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, NUM_CLASSES)
    return nn.Sequential(*layers).double()


class LanguageModel(nn.Module):
    """Predicts each word from the mean of the previous ones: small, causal, differentiable everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        seen = self.words(words).cumsum(1)
        positions = torch.arange(1, words.shape[1] + 1).unsqueeze(-1)
        logits: torch.Tensor = self.out(torch.tanh(self.hidden(seen / positions)))
        return logits


def language_model() -> nn.Module:
    """Return a small language model."""
    torch.default_generator.manual_seed(2)
    return LanguageModel().double()


# Batches


def vectors(number: int) -> Batch:
    """Return labelled vectors."""
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(number, NUM_FEATURES, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, NUM_CLASSES, (number,), generator=generator),
    }


def sentences(number: int = 29, *, width: int = 20) -> Batch:
    """Return token sequences with long-tailed lengths; 46% of the targets are masked."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, NUM_WORDS, (number, width), generator=generator)
    tail = torch.empty(number).exponential_(0.2, generator=generator)
    lengths = (6.6 + tail).round().clamp(max=width).long()
    labels = words.masked_fill(torch.arange(width) >= lengths.unsqueeze(1), -100)
    return {"words": words, "labels": labels, "value": torch.randn(number, generator=generator, dtype=torch.float64)}


def sentences_masked(first: int, last: int) -> Batch:
    """Return sentences of which the samples from `first` to `last` have no target."""
    batch = sentences()
    batch["labels"][first:last] = -100
    return batch


# Losses, as a user writes them


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def classify_total(model: Any, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy summed over samples."""
    return classify_each(model, batch).sum()


def classify_each(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one cross-entropy per sample."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def classify_weighted(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy with class weights, whose mean is over the sum of the targets' weights."""
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=CLASS_WEIGHTS)


def predict(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy over unmasked targets."""
    return mean_over_targets(model(batch["words"]), batch)


def mean_over_targets(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the next words."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, NUM_WORDS), batch["labels"][:, 1:].reshape(-1))


def predict_by_hand(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the same mean written with a mask: without targets, its value and its gradient are NaN."""
    return masked_mean(model(batch["words"]), batch)


def masked_mean(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the unmasked next words."""
    targets = batch["labels"][:, 1:]
    mask = (targets != -100).double()
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def predict_each(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return one cross-entropy per unmasked target."""
    logits, targets = model(batch["words"])[:, :-1], batch["labels"][:, 1:]
    each = F.cross_entropy(logits.reshape(-1, NUM_WORDS), targets.reshape(-1), reduction="none")
    return each[targets.reshape(-1) != -100]


def predict_sum(model: nn.Module, batch: Batch) -> ab.LossSum:
    """Return the cross-entropy's sum and its count, which is known only after the forward, on the device."""
    each = predict_each(model, batch)
    return ab.LossSum(each.sum(), torch.tensor(each.numel()))


def predict_and_value(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return a mean over targets and a mean over samples."""
    logits = model(batch["words"])
    return {"lm": masked_mean(logits, batch), "aux": (logits.mean((1, 2)) - batch["value"]).square().mean()}


def both_terms(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the unsplit sum of the two terms, without the one over targets if the batch has no target."""
    terms = predict_and_value(model, batch)
    aux = AUX_WEIGHT * terms["aux"]
    return terms["lm"] + aux if (batch["labels"][:, 1:] != -100).any() else aux


def weight_of_targets(batch: Batch) -> torch.Tensor:
    """Return the sum of the targets' class weights."""
    return CLASS_WEIGHTS[batch["y"]].sum()


TWO_TERMS = ab.sum_of(predict_and_value, lm=ab.tokens(), aux=ab.samples(weight=AUX_WEIGHT))
TOKENS = ab.mean_over_tokens(predict)

CASES: Mapping[str, Case] = {
    "even": Case(
        model=perceptron,
        batch=lambda: vectors(42),
        loss=ab.mean_over_samples(classify),
        reference=classify,
        plain_loop_holds=True,
    ),
    "ragged": Case(
        model=perceptron, batch=lambda: vectors(29), loss=ab.mean_over_samples(classify), reference=classify
    ),
    "two samples": Case(
        model=perceptron, batch=lambda: vectors(2), loss=ab.mean_over_samples(classify), reference=classify
    ),
    "a sum": Case(
        model=perceptron,
        batch=lambda: vectors(29),
        loss=ab.sum_over_samples(classify_total),
        reference=classify_total,
    ),
    "one loss per sample, summed": Case(
        model=perceptron, batch=lambda: vectors(29), loss=ab.sum_over_samples(classify_each), reference=classify_total
    ),
    "masked tokens": Case(model=language_model, batch=sentences, loss=TOKENS, reference=predict),
    "class weights": Case(
        model=perceptron,
        batch=lambda: vectors(29),
        loss=ab.mean_over(classify_weighted, weight_of_targets),
        reference=classify_weighted,
    ),
    "two terms": Case(model=language_model, batch=sentences, loss=TWO_TERMS, reference=both_terms),
    "one loss per sample": Case(
        model=perceptron, batch=lambda: vectors(29), loss=ab.mean_over_samples(classify_each), reference=classify
    ),
    "one loss per sample, undeclared": Case(
        model=perceptron, batch=lambda: vectors(29), loss=classify_each, reference=classify
    ),
    "one loss per target": Case(
        model=language_model, batch=sentences, loss=ab.mean_over_tokens(predict_each), reference=predict
    ),
    "one loss per target, undeclared": Case(
        model=language_model, batch=sentences, loss=predict_each, reference=predict
    ),
    "loss sum": Case(model=language_model, batch=sentences, loss=ab.mean_over_tokens(predict_sum), reference=predict),
    "loss sum, undeclared": Case(model=language_model, batch=sentences, loss=predict_sum, reference=predict),
    "loss sum, undeclared, some empty": Case(
        model=language_model, batch=lambda: sentences_masked(2, 20), loss=predict_sum, reference=predict
    ),
    "micro-batches without targets": Case(
        model=language_model, batch=lambda: sentences_masked(4, 13), loss=TOKENS, reference=predict
    ),
    "micro-batches whose mean is NaN": Case(
        model=language_model,
        batch=lambda: sentences_masked(4, 13),
        loss=ab.mean_over_tokens(predict_by_hand),
        reference=predict_by_hand,
    ),
    "first ranks without targets": Case(
        model=language_model, batch=lambda: sentences_masked(0, 21), loss=TOKENS, reference=predict
    ),
    "last ranks without targets": Case(
        model=language_model, batch=lambda: sentences_masked(8, 29), loss=TOKENS, reference=predict
    ),
    "two terms, some without targets": Case(
        model=language_model, batch=lambda: sentences_masked(8, 29), loss=TWO_TERMS, reference=both_terms
    ),
    "two terms, one without any target": Case(
        model=language_model, batch=lambda: sentences_masked(0, 29), loss=TWO_TERMS, reference=both_terms
    ),
}
