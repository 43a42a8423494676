"""The ladder's programs match plain torch on the unsplit batch, and their wrong ways are wrong as documented.

After some training steps they have the parameters of the plain loop.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from tests.engine.cases import Batch, InMemory
from tests.examples.ladder import (
    EXACT,
    classify,
    distance,
    parameters_of,
    predict,
    program,
)
from tests.ranks_fixture import Ranks

NUM_STEPS = 5


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the gradient of a loss as one vector."""
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


# One process


@pytest.mark.slow
@given(num_samples=st.integers(1, 40), size=st.integers(1, 16), seed=st.integers(0, 99))
def test_ragged_tail(num_samples: int, size: int, seed: int) -> None:
    """Sums over the count are exact for any tail; a mean of means weights each sample by its micro-batch."""
    ladder = program(3)
    points, labels = ladder.spirals(num_samples, seed)
    model = ladder.make_model()
    sizes = [len(part) for part in points.split(size)]
    weights = torch.cat([torch.full((n,), 1 / (n * len(sizes)), dtype=torch.float64) for n in sizes])
    whole = gradient_of(model, classify(model, {"points": points, "labels": labels}))
    weighted = gradient_of(model, (cross_entropy(model(points), labels, reduction="none") * weights).sum())

    assert distance(ladder.gradient(model, points, labels, size, exact=True), whole) <= EXACT
    assert distance(ladder.gradient(model, points, labels, size, exact=False), weighted) <= EXACT


def spirals(number: int, num_samples: int, step: int) -> Batch:
    """Return the batch of a step of a program on spirals."""
    points, labels = program(number).spirals(num_samples, seed=step)
    return {"points": points, "labels": labels}


def text(number: int, num_sentences: int, step: int) -> Batch:
    """Return the batch of a step of a program on text."""
    tokens, labels = program(number).text(num_sentences, seed=step)
    return {"tokens": tokens, "labels": labels}


@pytest.mark.parametrize(("number", "batch_size"), [(1, 96), (2, 96), (3, 33), (4, 32)])
def test_training_in_one_process(number: int, batch_size: int) -> None:
    """Programs 1 to 4 train like the plain loop on full batches; means of means do not."""
    ladder = program(number)
    arguments: dict[str, Any] = {1: {}, 2: {"micro_batch_size": 16}}.get(number, {"exact": True})
    make_batch, loss = (text, predict) if number == 4 else (spirals, classify)
    plain = ladder.make_model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.03)
    for step in range(NUM_STEPS):
        plain.zero_grad()
        loss(plain, make_batch(number, batch_size, step)).backward()
        optimizer.step()

    ladder.train(model := ladder.make_model(), NUM_STEPS, **arguments)

    assert distance(parameters_of(model), parameters_of(plain)) <= 1e-10
    if "exact" in arguments:
        ladder.train(wrong := ladder.make_model(), NUM_STEPS, exact=False)
        assert distance(parameters_of(wrong), parameters_of(plain)) > 1e-3


# One, two and three ranks


def trained_together(way: str) -> Tensor:
    """Run on every rank: return the parameters after clipped, scheduled steps of program 9, torch or the engine."""
    ladder = program(9)
    model = program(4).make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if way == "engine":
        declared = ab.mean_over_tokens(predict, shift=False)
        with ab.Engine(model, optimizer, declared, micro_batch_size=4, clip=0.1, scheduler=scheduler) as engine:
            for step in range(NUM_STEPS):
                engine.step(InMemory(text(9, 33, step)))
        return parameters_of(model)
    for step in range(NUM_STEPS):
        batch = text(9, 33, step)
        if way == "program 9":
            ladder.gradient(model, batch["tokens"], batch["labels"], 4)
        else:
            model.zero_grad()
            predict(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return parameters_of(model)


def test_training_together(ranks: Ranks) -> None:
    """Program 9, the plain loop and the engine give the same parameters with clipping and a scheduler."""
    plain = ranks.run(trained_together, "plain")[0]
    for way in ("program 9", "engine"):
        for parameters in ranks.run(trained_together, way):
            assert distance(parameters, plain) <= 1e-10
