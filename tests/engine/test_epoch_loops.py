"""A loop over epochs that makes new batches in each equals one run: the engine supplies the position."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.data import Batches
from tests.raising import warns

NUM_SAMPLES, SIZE = 20, 6
STEPS_PER_EPOCH = 4

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be more workers than cores


class Augmented:
    """Rows that each access moves by draws from every global generator."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        moved = random.random() + np.random.random() + torch.rand((), dtype=torch.float64).item()
        return torch.tensor([index / 10, moved, 1.0], dtype=torch.float64)


class Streamed(IterableDataset):  # type: ignore[type-arg]
    """The same data as a stream, which shuffles by epoch and counts how often it was opened."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.epoch = self.num_opened = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.num_opened += 1
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.epoch))
        return (Augmented()[int(index)] for index in order)


SOURCES: dict[str, Callable[[], Any]] = {
    "indexed": Augmented,
    "stream": Streamed,
    "shards": lambda: ab.Shards([Streamed(13), Streamed(7)]),
}


def batches(data: Any, **more: Any) -> Batches:
    """Return batches of 6."""
    if not isinstance(data, Augmented):
        more = {"shuffle": False, **more}
    return ab.batches(data, effective_batch_size=SIZE, seed=3, **more)


def make_engine(**options: Any) -> ab.Engine:
    """Return an engine whose model draws random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return ab.Engine(model, optimizer, ab.mean_over_samples(square), micro_batch_size=2, **options)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the output."""
    output: torch.Tensor = model(batch)
    return output.square().mean()


Seen = list[tuple[int, tuple[int, ...], bool]]


def step(engine: ab.Engine, loop: Iterable[Any]) -> Seen:
    """Step every batch; return the epoch, ids and `ends_epoch` of each."""
    seen = []
    for batch in loop:
        engine.step(batch)
        assert batch.end == engine.position
        seen.append((batch.epoch, tuple(batch.sample_ids), batch.ends_epoch))
    return seen


def weights(engine: ab.Engine) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in engine.optimizer.param_groups[0]["params"]]).clone()


def in_one_loop(make: Callable[[], Any], num_epochs: int = 3, **more: Any) -> tuple[Seen, torch.Tensor]:
    """Train in one loop; return its batches and the final weights."""
    with make_engine() as engine:
        return step(engine, batches(make(), epochs=num_epochs, **more)), weights(engine)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("anew", [True, False])
def test_a_loop_over_epochs_equals_one_run(source: str, num_workers: int, anew: bool) -> None:
    """Making or iterating batches again in every epoch equals one loop over all epochs, bit for bit."""
    if source == "stream" and num_workers:
        num_workers = 1  # a stream has one reader
    expected = in_one_loop(SOURCES[source])
    data = SOURCES[source]()
    made = batches(data, num_workers=num_workers)
    seen: Seen = []
    with make_engine() as engine:
        for epoch in range(3):
            seen += step(engine, batches(data, num_workers=num_workers) if anew else made)
            assert engine.position == Position(epoch + 1)
        found = weights(engine)
    assert seen == expected[0]
    assert torch.equal(found, expected[1])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("epochs", [None, 3])
def test_a_plain_loop_resumes_in_the_middle_of_an_epoch(source: str, epochs: int | None, tmp_path: Path) -> None:
    """After `load`, a loop over the remaining epochs continues at the checkpoint and ends with the same weights."""
    expected = in_one_loop(SOURCES[source])
    with make_engine() as engine:
        step(engine, itertools.islice(batches(SOURCES[source](), epochs=3), STEPS_PER_EPOCH + 2))
        engine.save(tmp_path)
    seen: Seen = []
    with make_engine() as engine:
        engine.load(tmp_path)
        assert engine.position == Position(1, 2 * SIZE)
        data = SOURCES[source]()
        for _ in range(engine.position.epoch, 3) if epochs is None else range(1):
            seen += step(engine, batches(data, epochs=epochs))
        assert engine.position == Position(3)
        found = weights(engine)
    assert seen == expected[0][STEPS_PER_EPOCH + 2 :]
    assert torch.equal(found, expected[1])


def test_a_list_of_batches_warns() -> None:
    """A list of batches cannot follow the engine's position: stepping it warns that an epoch repeats."""
    data = Augmented()
    with make_engine() as engine:
        step(engine, batches(data))
        with warns("data_repeats"):
            step(engine, list(batches(data)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_a_batch_changes_nothing(num_workers: int) -> None:
    """`load` returns all collated samples of an effective batch and does not change the step."""
    ends = []
    for looks in (True, False):
        with make_engine() as engine:
            for batch in batches(Augmented(), num_workers=num_workers):
                if looks:
                    assert (batch.load()[:, 0] * 10).round().long().tolist() == list(batch.sample_ids)
                engine.step(batch)
            ends.append(weights(engine))
    assert torch.equal(*ends)
