"""Random numbers in a step are keyed by micro-batch, not by rank, and the caller's random state is preserved."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.randomness import micro_batch_seed
from anybatch.errors import AnyBatchWarning
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, Batch, Gradients, InMemory, classify, cut, sgd_engine, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks

SEED, SIZE = 11, 3


def dropping() -> nn.Module:
    """Return a classifier with dropout."""
    torch.manual_seed(12)
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4)).double()


def make_engine(model: nn.Module, world: ab.World, **options: Any) -> ab.Engine:
    """Return an engine with micro-batches of three."""
    return sgd_engine(model, micro_batch_size=SIZE, world=world, **options)


def keyed_by_hand(step: int) -> Gradients:
    """Return the gradient of a loop that seeds torch with each micro-batch's key."""
    model, batch = dropping(), vectors(29)
    for start in range(0, 29, SIZE):
        torch.manual_seed(micro_batch_seed(SEED, step, start))
        piece = cut(batch, start, start + SIZE)
        (classify(model, piece) * (len(piece["x"]) / 29)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def keyed_by_engine(strategy: str) -> tuple[Gradients, Gradients, bool]:
    """Run on every rank: return the gradients of two steps, and whether the caller's state was preserved.

    Ranks start with different states, so equal results prove the keys.
    """
    world = ab.World.from_environment()
    model = dropping()
    torch.manual_seed(100 + world.rank)
    before = torch.get_rng_state()
    with make_engine(model, world, deal="fixed", strategy=STRATEGIES[strategy]()) as engine:
        batch = InMemory(vectors(29), seed=SEED)
        first = engine.gradients(batch)
        unchanged = torch.equal(before, torch.get_rng_state())
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        engine.step(batch)
        model.load_state_dict(weights)  # so that the steps differ only in random numbers
        return first, engine.gradients(batch), unchanged and torch.equal(before, torch.get_rng_state())


@sees(
    "the key of a micro-batch lacks the step",
    "src/anybatch/engine/micro_batches.py",
    "micro_batch_seed(planned.seed, step, ",
    "micro_batch_seed(planned.seed, 0, ",
    cases=["all_reduce"],
)
@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_dropout_does_not_depend_on_the_number_of_ranks(
    strategy: str, one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    """Dropout does not depend on the number of ranks: keys are (seed, step, first sample of the micro-batch).

    The caller's random state is preserved, regardless of its value.
    """
    first, second = keyed_by_hand(0), keyed_by_hand(1)
    assert relative_error(first, second) > 0.1
    for pool in (one_rank, two_ranks, three_ranks):
        for found_first, found_second, unchanged in pool.run(keyed_by_engine, strategy):
            assert relative_error(found_first, first) <= 1e-12
            assert relative_error(found_second, second) <= 1e-12
            assert unchanged


@sees(
    "the key of a micro-batch depends on its position in the rank share",
    "src/anybatch/engine/micro_batches.py",
    "planned.sample_ids[item.unit.start])",
    "planned.units.index(item.unit))",
)
def test_the_engines_seed_overrides_the_datas() -> None:
    """`seed=` replaces the data's seed in the random keys."""
    batch = InMemory(vectors(29), seed=SEED)
    with make_engine(dropping(), ab.World(), seed=SEED + 1) as engine:
        other = engine.gradients(batch)
    with make_engine(dropping(), ab.World(), seed=SEED) as engine:
        same = engine.gradients(InMemory(vectors(29), seed=5))

    assert relative_error(same, keyed_by_hand(0)) <= 1e-12
    assert relative_error(other, keyed_by_hand(0)) > 0.1


def test_without_keys_random_numbers_continue() -> None:
    """With rng=None, random numbers come from the caller's generator, bit for bit as in a plain loop."""
    by_hand, batch = dropping(), vectors(29)
    torch.manual_seed(13)
    for start in range(0, 29, SIZE):
        piece = cut(batch, start, start + SIZE)
        (classify(by_hand, piece) * (len(piece["x"]) / 29)).backward()
    state = torch.get_rng_state()

    model = dropping()
    torch.manual_seed(13)
    with make_engine(model, ab.World(), rng=None) as engine:
        found = engine.gradients(batch)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in by_hand.named_parameters():
        gradient = found[name]
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("name", "draw", "rng"),
    [
        ("random", random.random, "micro_batch"),
        ("numpy.random", np.random.rand, "per_sample"),
        ("random", random.random, None),
        ("torch", lambda: torch.rand(1), "micro_batch"),
    ],
)
def test_unkeyed_draws_warn_once(name: str, draw: Callable[[], object], rng: Any) -> None:
    """A loss that draws from Python's or NumPy's generator causes one warning, unless rng=None."""
    model = nn.Linear(5, 4).double()

    def drawing(model: nn.Module, batch: Batch) -> torch.Tensor:
        draw()
        return classify(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ab.Engine(model, optimizer, ab.mean_over_samples(drawing), micro_batch_size=3, rng=rng) as engine:
            for _ in range(3):
                engine.step(InMemory(vectors(7)))
    said = [str(one.message) for one in caught if one.category is AnyBatchWarning]
    keyless = name != "torch" and rng is not None
    assert len(said) == keyless, said
    assert not keyless or f"draws from {name}, which the engine does not seed" in said[0]
