"""Losses across samples, the models they train, and the gradient of the unsplit batch in plain torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.randomness import micro_batch_seed
from anybatch.core.splitting import Unit
from tests.engine.cases import Batch, cut

NUM_SAMPLES = 29
WIDTH = 4


class Pair(NamedTuple):
    """Two views of each sample."""

    one: torch.Tensor
    other: torch.Tensor


class Encoders(nn.Module):
    """An image and a text encoder, and a temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.default_generator.manual_seed(21)
        self.image = encoder(5, dropout)
        self.text = encoder(3, dropout)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.double()


def encoder(num_features: int, dropout: float) -> nn.Module:
    """Return a small smooth network."""
    return nn.Sequential(nn.Linear(num_features, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, WIDTH))


def pairs(number: int = NUM_SAMPLES) -> Batch:
    """Return images with their texts, and a class for each."""
    generator = torch.Generator().manual_seed(22)
    label = torch.arange(number) % 5
    image = torch.randn(number, 5, generator=generator, dtype=torch.float64) + label[:, None]
    text = image[:, :3] + torch.randn(number, 3, generator=generator, dtype=torch.float64)
    return {"image": image, "text": text, "label": label}


# Encoded outputs: in a tuple, a dict, with labels


def both(model: Any, batch: Batch) -> Pair:
    """Return the two encodings of each pair."""
    return Pair(F.normalize(model.image(batch["image"]), dim=1), F.normalize(model.text(batch["text"]), dim=1))


def both_of_two(model: Mapping[str, nn.Module], batch: Batch) -> Pair:
    """Return the two encodings, from two named models."""
    return Pair(*(F.normalize(model[name](batch[name]), dim=1) for name in ("image", "text")))


def twice(model: Encoders, batch: Batch) -> Pair:
    """Return each image encoded twice: only dropout makes the two differ."""
    return Pair(*(F.normalize(model.image(batch["image"]), dim=1) for _ in range(2)))


def labelled(model: Encoders, batch: Batch) -> Batch:
    """Return encoded images with their classes, which take no gradient."""
    return {"vector": F.normalize(model.image(batch["image"]), dim=1), "label": batch["label"]}


def raw_pairs(model: Encoders, batch: Batch) -> Pair:
    """Return the two encodings unchanged."""
    return Pair(model.image(batch["image"]), model.text(batch["text"]))


# Losses of the whole effective batch


def symmetric(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of finding each sample's partner, from both sides."""
    partner = torch.arange(len(logits))
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


def clip(model: Encoders, views: Pair) -> torch.Tensor:
    """Return the loss of CLIP, with the model's temperature (Radford et al. 2021)."""
    return symmetric(model.logit_scale.exp() * views.one @ views.other.T)


class Clip(nn.Module):
    """The loss of CLIP with its own temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, _model: Any, views: Pair) -> torch.Tensor:
        return symmetric(self.logit_scale.exp() * views.one @ views.other.T)


def triplet(_model: Encoders, outputs: Batch) -> torch.Tensor:
    """Return the soft-margin triplet loss with the hardest samples of the batch (Hermans et al. 2017)."""
    vector, label = outputs["vector"], outputs["label"]
    distance = ((vector[:, None] - vector).square().sum(2) + 1e-9).sqrt()
    same = label[:, None] == label
    furthest = distance.masked_fill(~same, -torch.inf).amax(1)
    nearest = distance.masked_fill(same, torch.inf).amin(1)
    return F.softplus(furthest - nearest).mean()


def barlow(_model: Encoders, views: Pair) -> torch.Tensor:
    """Return the loss of Barlow Twins (Zbontar et al. 2021)."""
    one, other = ((view - view.mean(0)) / view.std(0) for view in views)
    correlation = one.T @ other / len(one)
    diagonal = torch.eye(WIDTH, dtype=torch.bool)
    return (correlation[diagonal] - 1).square().sum() + 0.1 * correlation[~diagonal].square().sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class JointCase:
    """A model with a loss across samples.

    Attributes:
        model: builds the model, the same one each time.
        encode: returns the outputs of each sample.
        loss: builds the loss over all outputs.
        draws: the model draws random numbers, which belong to micro-batches.
    """

    model: Callable[[], Any]
    encode: Callable[[Any, Batch], Any]
    loss: Callable[[], Callable[[Any, Any], torch.Tensor]]
    draws: bool = False


JOINT_CASES: Mapping[str, JointCase] = {
    "clip": JointCase(model=Encoders, encode=both, loss=lambda: clip),
    "clip, dropout": JointCase(model=lambda: Encoders(0.3), encode=both, loss=lambda: clip, draws=True),
    "clip, a module": JointCase(
        model=lambda: {name: getattr(Encoders(), name) for name in ("image", "text")}, encode=both_of_two, loss=Clip
    ),
    "triplet": JointCase(model=Encoders, encode=labelled, loss=lambda: triplet),
    "barlow twins": JointCase(model=Encoders, encode=raw_pairs, loss=lambda: barlow),
}


def all_modules(model: Any, function: Any) -> nn.Module:
    """Return one module with everything that trains, with the engine's names."""
    named = dict(model) if isinstance(model, Mapping) else {"model": model}
    if isinstance(function, nn.Module):
        named["loss"] = function
    return model if isinstance(model, nn.Module) and len(named) == 1 else nn.ModuleDict(named)


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of all samples from the micro-batches' outputs."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Pair):
        return Pair(*(torch.cat(column) for column in zip(*outputs, strict=True)))
    return {name: torch.cat([one[name] for one in outputs]) for name in first}


def plain_loss(
    case: JointCase, model: Any, function: Callable[[Any, Any], torch.Tensor], batch: Batch, units: Sequence[Unit]
) -> torch.Tensor:
    """Return the loss of the unsplit batch, in one graph.

    If the model draws random numbers, the samples of a unit are encoded together under its seed, so that the draws
    are the same.
    """
    if not case.draws:
        return function(model, case.encode(model, batch))
    outputs = []
    with torch.random.fork_rng():
        for unit in units:
            torch.default_generator.manual_seed(micro_batch_seed(0, 0, unit.start))
            outputs.append(case.encode(model, cut(batch, unit.start, unit.stop)))
    return function(model, joined(outputs))


def engine_of(case: JointCase, *, world: ab.World | None = None, **options: Any) -> ab.Engine:
    """Return an engine for a case, with plain SGD."""
    loss = ab.joint(case.encode, case.loss())
    options = {"norms": "keep", "check_loss": False, **options}
    return ab.Engine(case.model(), sgd, loss, world=world or ab.World(), **options)


def sgd(named: Any) -> torch.optim.Optimizer:
    """Build an optimizer over named parameters."""
    return torch.optim.SGD(named, lr=0.1)
