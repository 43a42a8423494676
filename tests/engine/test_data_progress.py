"""Positions belong to data sets: several in one engine, after a resume, and with data that have changed."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Sampler, Subset

import anybatch as ab
from anybatch.checkpoints import load_latest, save
from anybatch.core.batch import Position
from anybatch.errors import DataError, RankFailedError
from tests.engine.cases import sgd_engine
from tests.faults import sees
from tests.raising import raises
from tests.ranks_fixture import Ranks

SIZE = 6
Ids = tuple[int, ...]


def rows(number: int) -> list[torch.Tensor]:
    """Return samples whose values are their ids."""
    return [torch.full((2,), float(k), dtype=torch.float64) for k in range(number)]


def subset(number: int, kept: Sequence[int]) -> Any:
    """Return a subset of some samples."""
    data: Any = rows(number)
    return Subset(data, kept)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the output."""
    output: torch.Tensor = model(batch)
    return output.square().mean()


def make_engine(**options: Any) -> ab.Engine:
    """Return an engine of a small model."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loss = ab.mean_over_samples(square)
    return ab.Engine(model, optimizer, loss, micro_batch_size=3, check_loss=False, **options)


def batches(data: Any, **more: Any) -> Any:
    """Return batches of 6."""
    return ab.batches(data, effective_batch_size=SIZE, **{"seed": 1, **more})


def alternate(engine: ab.Engine, sizes: Sequence[int], epochs: Sequence[int], stop: int | None = None) -> list[Any]:
    """Step data sets of these sizes alternately; return the ids of each step."""
    seen = []
    loaders = [batches(rows(size), epochs=number) for size, number in zip(sizes, epochs, strict=True)]
    pairs = itertools.chain.from_iterable(zip(*loaders, strict=False))
    for number, batch in enumerate(pairs):
        if number == stop:
            break
        engine.step(batch)
        seen.append((number % len(sizes), *batch.sample_ids))
    return seen


@sees(
    "data sets of a checkpoint are not distinguished",
    "src/anybatch/engine/data_progress.py",
    "if item.key in (None, key)]",
    "]",
)
@pytest.mark.parametrize("sizes", [(24, 12), (24, 24)])
def test_two_data_sets_in_turn_are_resumed(sizes: tuple[int, int], tmp_path: Path) -> None:
    """A resumed run that alternates between two data sets makes exactly the remaining steps of both."""
    epochs = (48 // sizes[0], 48 // sizes[1])
    with make_engine() as engine:
        expected = alternate(engine, sizes, epochs)
    assert len(expected) == 16
    for stop in (2, 10):
        folder = tmp_path / str(stop)
        with make_engine() as engine:
            first = alternate(engine, sizes, epochs, stop)
            engine.save(folder)
        with make_engine() as engine:
            engine.load(folder)
            assert first + alternate(engine, sizes, epochs) == expected


def test_indistinguishable_data_sets_are_refused(tmp_path: Path) -> None:
    """Two data sets of the same size and seed at different positions raise an error that names both positions."""
    with make_engine() as engine:
        alternate(engine, (24, 24), (1, 1), 3)
        engine.save(tmp_path)
    with make_engine() as engine:
        engine.load(tmp_path)
        with pytest.raises(DataError, match=r"sample_offset=12\) of 24 samples.*sample_offset=6\) of 24 samples"):
            alternate(engine, (24, 24), (1, 1))


def run(engine: ab.Engine, loop: Iterable[Any], num_steps: int | None = None) -> list[Ids]:
    """Step batches; return their ids."""
    seen = []
    for batch in itertools.islice(loop, num_steps):
        engine.step(batch)
        seen.append(tuple(batch.sample_ids))
    return seen


def saved_after(num_steps: int, folder: Path, data: Any = None, **more: Any) -> list[Ids]:
    """Make some steps and save; return the ids of all steps of an uninterrupted run."""
    data = rows(24) if data is None else data
    with make_engine() as engine:
        expected = run(engine, batches(data, epochs=3, **more))
    with make_engine() as engine:
        run(engine, batches(data, epochs=3, **more), num_steps)
        engine.save(folder)
    return expected


def test_batches_skipped_after_a_resume(tmp_path: Path) -> None:
    """After a resume, a loop may skip no batches or the finished ones; another number raises an error."""
    expected = saved_after(2, tmp_path)
    for num_skipped in (0, 2):
        with make_engine() as engine:
            engine.load(tmp_path)
            loop = itertools.islice(batches(rows(24), epochs=3), num_skipped, None)
            assert run(engine, loop) == expected[2:]
    with make_engine() as engine, raises(DataError, "skipped_batches"):
        engine.load(tmp_path)
        run(engine, itertools.islice(batches(rows(24), epochs=3), 1, None))


class Shuffled(Sampler[int]):
    """Shuffles with a private generator."""

    def __init__(self, ids: Sequence[int] = range(24)) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        order = list(self.ids)
        random.Random().shuffle(order)
        return iter(order)


def test_a_sampler_with_a_private_generator_is_resumed(tmp_path: Path) -> None:
    """A resumed run finishes the epoch in the order that the sampler drew before: no sample is repeated or lost."""
    with make_engine() as engine:
        seen = run(engine, batches(rows(24), sampler=Shuffled()), 2)
        engine.save(tmp_path)
    with make_engine() as engine:
        engine.load(tmp_path)
        seen += run(engine, batches(rows(24), sampler=Shuffled()))
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(24))


OTHER_DATA: dict[str, Callable[[], Any]] = {
    "seed": lambda: batches(rows(24), seed=2),
    "shuffle": lambda: batches(rows(24), shuffle=False),
    "more samples": lambda: batches(rows(30)),
    "sampler": lambda: batches(rows(30), sampler=Shuffled(range(6, 30))),
    "subset": lambda: batches(subset(30, range(24))),
}


@sees(
    "a different order of samples is resumed",
    "src/anybatch/engine/data_progress.py",
    "        if is_same:\n",
    "        if is_same or self.digest:\n",
)
@pytest.mark.parametrize("name", OTHER_DATA)
def test_data_in_another_order_are_refused(name: str, tmp_path: Path) -> None:
    """Resuming in the middle of an epoch with other finished samples raises an error; `start=` overrides it."""
    saved_after(2, tmp_path)
    with make_engine() as engine:
        engine.load(tmp_path)
        for _ in range(2):
            with raises(DataError, "other_data"):
                run(engine, OTHER_DATA[name]())
        assert engine.num_steps == 2
        more = {"start": Position(1)}
        assert len(run(engine, batches(rows(24), epochs=2, **more))) == 4


def test_checkpoints_of_earlier_versions_resume(tmp_path: Path) -> None:
    """A checkpoint of the old format, with one position and no digest, still resumes."""
    expected = saved_after(6, tmp_path / "new")
    state = dict(load_latest(tmp_path / "new").state)
    for name in ("data_sets", "newest_data_set", "own_seed"):
        del state[name]
    save(tmp_path / "old", 6, state)
    with make_engine() as engine:
        assert engine.load(tmp_path / "old") == Position(1, 12)
        assert run(engine, batches(rows(24), epochs=3)) == expected[6:]


class Loaded:
    """Rows that differ by rank or by access, or are always the same."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank, self.count = kind, rank, 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        other = {"same": 0, "by rank": self.rank, "each time": self.count, "augmented": torch.rand(()).item()}
        return torch.tensor([index, other[self.kind]], dtype=torch.float64)


def refusal_of(kind: str, second: bool) -> str:
    """Run on every rank: train on such data, as the engine's first or second data set; return the error."""
    with ab.World.from_environment() as world, make_engine(world=world) as engine:
        if second:
            run(engine, batches(rows(12)))
        data: Any = Loaded(kind, world.rank)
        if kind == "split":
            data = subset(40, torch.randperm(40, generator=torch.Generator().manual_seed(world.rank)).tolist())
        try:
            run(engine, batches(data))
        except (DataError, RankFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize("second", [False, True])
def test_ranks_with_different_data_are_refused(second: bool, two_ranks: Ranks) -> None:
    """Ranks with different splits or samples raise an error on both, also for the second data set of an engine."""
    for kind in ("split", "by rank"):
        for rank, message in enumerate(two_ranks.run(refusal_of, kind, second)):
            assert message.startswith(f"DataError: rank {rank} has different samples in its data set than rank")
    for kind in ("same", "each time", "augmented"):
        assert two_ranks.run(refusal_of, kind, second) == ["", ""]


DRAWN: list[torch.Tensor] = []


def noisy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss with noise, and record the noise."""
    noise = torch.randn(2, dtype=torch.float64)
    DRAWN.append(noise)
    return square(model, batch + noise)


def drawn(*engines: ab.Engine, num_steps: int = 1) -> list[list[float]]:
    """Step engines alternately on a plain batch; return the noise of each step."""
    DRAWN.clear()
    for _ in range(num_steps):
        for engine in engines:
            engine.step(torch.ones(3, 2, dtype=torch.float64))
    return [noise.tolist() for noise in DRAWN]


def noisy_engine(torch_seed: int, num_inputs: int = 1, **options: Any) -> ab.Engine:
    """Return an engine whose loss draws noise, built under this seed of torch."""
    torch.manual_seed(torch_seed)
    model = nn.Sequential(nn.Linear(2, num_inputs), nn.Linear(num_inputs, 1)).double()
    return sgd_engine(model, noisy, check_loss=False, **options)


def test_plain_batches_follow_torchs_seed(tmp_path: Path) -> None:
    """With plain batches, random numbers depend on the model and torch's seed, and a resumed run continues them."""
    first, critic = noisy_engine(1), noisy_engine(1, num_inputs=3)
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    noise = drawn(first, critic, num_steps=2)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert len({tuple(one) for one in noise}) == 4
    again = noisy_engine(1)
    torch.manual_seed(5)
    assert drawn(again) == noise[:1]
    assert drawn(noisy_engine(2)) != noise[:1]
    assert drawn(noisy_engine(1, seed=3)) == drawn(noisy_engine(2, seed=3))
    again.save(tmp_path)
    resumed = noisy_engine(7)
    resumed.load(tmp_path)
    assert drawn(resumed) == [noise[2]]
