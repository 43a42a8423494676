# mypy: ignore-errors
"""Building blocks of the collection: data, a small network, losses, and the check."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.batch import select_each
from anybatch.core.loss import declared
from anybatch.core.tree import map_tensors, mark_and_count
from anybatch.engine.loss_check.comparison import SampleSource, judge
from anybatch.engine.loss_check.diagnosis import diagnose
from anybatch.engine.loss_check.runs import LossParts, LossRuns
from anybatch.engine.user_code import collect_modules, without_side_effects

NUM_SAMPLES, LENGTH, WIDTH, NUM_CLASSES = 24, 7, 6, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])
BOTH = ("float32", "float64")
mean_over_words = functools.partial(ab.mean_over_tokens, shift=False)


@dataclass(frozen=True)
class Setup:
    """A model, a batch and a declared loss, as a user writes them.

    Attributes:
        declare: returns the declared loss.
        dtypes: the dtypes it is checked in.
        autocast: makes the context of a forward.
        needs: a package that it needs.
    """

    declare: Callable[[], Any]
    model: Callable[[], Any]
    batch: Callable[[], Any]
    dtypes: tuple[str, ...] = BOTH
    autocast: Callable[[], Any] = nullcontext
    needs: str = ""


def vectors(number: int = NUM_SAMPLES, seed: int = 1) -> Mapping[str, torch.Tensor]:
    """Return sequences of vectors, with labels per position and per sequence, a mask, weights and targets."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LENGTH + 1, (number,), generator=g)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    labels = torch.randint(0, NUM_CLASSES, (number, LENGTH), generator=g)
    scale = 0.5 + 2 * torch.rand(number, 1, 1, generator=g)
    return {
        "x": scale * torch.randn(number, LENGTH, WIDTH, generator=g),
        "y": torch.randint(0, NUM_CLASSES, (number,), generator=g),
        "labels": labels.masked_fill(~mask, -100),
        "target": torch.randn(number, generator=g),
        "weight": torch.rand(number, generator=g) + 0.1,
        "mask": mask,
        "multi": torch.randint(0, 2, (number, NUM_CLASSES), generator=g).float(),
        "lengths": lengths,
    }


class Net(nn.Module):
    """A perceptron applied at each position."""

    def __init__(self, outputs: int = NUM_CLASSES, dropout: float = 0.2, middle: nn.Module | None = None) -> None:
        super().__init__()
        middle = middle or nn.Identity()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, outputs))

    def forward(self, x):
        return self.body(x)


def pooled(m, b):
    return m(b["x"]).mean(1)


def classify(m, b, **options):
    return F.cross_entropy(pooled(m, b), b["y"], **options)


def each(m, b):
    """Return one loss per sample."""
    return classify(m, b, reduction="none")


def tag(m, b, **options):
    return F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten(), **options)


def score(m, b):
    return pooled(m, b)[:, 0]


def two_views(m, b):
    return F.normalize(pooled(m, b), dim=-1), F.normalize(m(b["x"] + 0.1).mean(1), dim=-1)


def contrast(one, other, temperature=0.2):
    return F.cross_entropy(one @ other.T / temperature, torch.arange(len(one)))


def class_weights(b):
    return CLASS_WEIGHTS.to(b["x"].dtype)


def cast(batch, dtype):
    return map_tensors(batch, lambda one: one.to(dtype) if one.is_floating_point() else one)


def positives(b):
    return (b["y"] == 0).sum()


def focal_sum(m, b):
    q, t = score(m, b).sigmoid(), (b["y"] == 0).to(b["x"].dtype)
    hit = q * t + (1 - q) * (1 - t)
    return (-((1 - hit) ** 2) * hit.log()).sum()


class Table:
    """Setups by name, filled by `add`."""

    def __init__(self) -> None:
        self.setups: dict[str, Setup] = {}

    def add(self, name, function, declare=ab.mean_over_samples, model=Net, batch=vectors, **options) -> None:
        """Add a setup; a loss with state is passed as a class and instantiated for each check."""
        assert name not in self.setups, name
        make = function if isinstance(function, type) else lambda: function
        self.setups[name] = Setup(lambda: declare(make()), model, batch, **options)

    def loss(self, name, **options):
        """Add the decorated function."""

        def keep(function):
            self.add(name, function, **options)
            return function

        return keep


def built(setup: Setup, dtype: str):
    """Return the model, the declared loss and the batch of a setup."""
    torch.manual_seed(0)
    model = setup.model()
    for module in model.values() if isinstance(model, dict) else [model]:
        module.to(DTYPES[dtype]).train()
    loss = setup.declare()
    for function in declared(loss).functions.values():
        if isinstance(function, nn.Module):
            function.to(DTYPES[dtype])
    return model, loss, cast(setup.batch(), DTYPES[dtype])


def check(setup: Setup, dtype: str, *, diagnoses: bool = False):
    """Return the verdict of the loss check, and the diagnosis of a broken loss."""
    model, loss, batch = built(setup, dtype)
    loss = declared(loss)
    modules = collect_modules(model, loss)
    batch, number = mark_and_count(batch)
    named = {name: one for name, one in modules.named_parameters() if one.requires_grad}
    parts = LossParts(
        loss=loss,
        model=model,
        modules=modules,
        device=torch.device("cpu"),
        autocast=setup.autocast,
        call=lambda function, given: function(model, given),
        leaves=lambda: named,
    )
    with without_side_effects(modules, parts.device, functions=loss.functions.values()) as generators:
        runs = LossRuns(parts, generators)
        verdict = judge(runs, SampleSource(range(number), functools.partial(select_each, batch), 64))
        found = diagnose(runs, verdict) if diagnoses and verdict.kind == "broken" else None
    return verdict, found
