"""Loaders of single samples as streams, torchdata's stateful one among them: read whole, cut by length, resumed."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import anybatch as ab
from anybatch.data import Padded, PaddedOrPacked
from anybatch.errors import CompositionError, DataError
from anybatch.testing import relative_error
from tests.engine.length_cases import DECLARED, LENGTHS, Language, Sentences
from tests.faults import sees

TOLERANCE = 1e-12
# torchdata 0.11 still tells torch of itself by a function that torch 2.13 gives up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This DataLoader will create")


class Numbered(Dataset[Any]):
    """Sentences with noise, as an augmentation draws it, and their numbers."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = Sentences()[index]
        drawn = torch.randint(1, 13, sample["input_ids"].shape)
        return {**sample, "input_ids": torch.where(drawn > 6, drawn, sample["input_ids"])}


class InItsOwnOrder(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Any:
        return map(Numbered().__getitem__, range(len(LENGTHS)))


def loader_of(kind: str, **settings: Any) -> Any:
    """Return a loader of samples, torch's or torchdata's."""
    if kind == "torch":
        return DataLoader(batch_size=None, **settings)
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata")
    return module.StatefulDataLoader(batch_size=None, **settings)


def run(loader: Any, num_steps: int, saved: Any = None, save_to: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Train some steps, from the beginning or from a checkpoint; return what each step read, and the parameters."""
    seen: list[Any] = []
    model = Language()

    def loss(model: Any, batch: Any) -> Any:
        if not ab.in_trial_run():
            seen.append(sorted(batch["input_ids"].tolist()))
        return DECLARED.function(model, batch)

    batches = ab.batches(
        loader,
        effective_batch_size=9,
        shuffle=False,
        epochs=3,
        lengths=lambda sample: len(sample["labels"]),
        collate=PaddedOrPacked(),
    )
    declared = ab.mean_over_tokens(loss, labels="labels", ignore_index=-100, shift=True)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with ab.Engine(model, optimizer, declared, micro_batch_size=ab.token_budget(40), check_loss=False) as engine:
        if saved is not None:
            engine.load(saved)
        for _, batch in zip(range(num_steps), batches, strict=False):
            engine.step(batch)
        if save_to is not None:
            engine.save(save_to)
    return seen, {name: value.detach().clone() for name, value in model.named_parameters()}


@sees(
    "a stream that goes on does not skip what it has read",
    "src/anybatch/data/streams.py",
    "            _skip(stream, start)\n",
    "",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("torch", {"dataset": Numbered(), "shuffle": True}),
        ("torch", {"dataset": InItsOwnOrder()}),
        ("torchdata", {"dataset": Numbered()}),
        ("torchdata", {"dataset": InItsOwnOrder()}),
    ],
    ids=["torch, shuffled", "torch, stream", "torchdata, in order", "torchdata, stream"],
)
def test_a_run_goes_on_at_any_point_of_an_epoch(tmp_path: Any, kind: str, settings: Any) -> None:
    """Cut by length, stopped behind each of 6 steps (3 an epoch) and resumed: the same samples, and parameters."""
    make = functools.partial(loader_of, kind, **settings)
    whole, expected = run(make(), 7)
    for num_steps in range(1, 7):
        folder = tmp_path / f"behind {num_steps}"
        first, _ = run(make(), num_steps, save_to=folder)
        rest, found = run(make(), 7 - num_steps, saved=folder)
        assert first + rest == whole
        assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_every_sample_of_an_epoch_is_read_once(kind: str) -> None:
    """In another order in each epoch, where the loader shuffles, and with workers of its own too."""
    for num_workers in (0, 2):
        loader = loader_of(kind, dataset=range(20), shuffle=kind == "torch", num_workers=num_workers)
        batches = ab.batches(loader, effective_batch_size=6, shuffle=False, epochs=2, collate=list)
        epochs: list[list[int]] = [[], []]
        for batch in batches:
            epochs[batch.epoch] += next(batch.feed([range(batch.num_samples)]))
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
        assert (epochs[0] != epochs[1]) == (kind == "torch")


@sees(
    "a loader with a state is read from there, and skipped once more",
    "src/anybatch/data/sample_loaders.py",
    'if getattr(loader, "next_iter_state", None) is not None:',
    "if False:",
)
@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_a_state_of_the_loaders_own_is_refused(kind: str) -> None:
    """It would begin in the middle, and what the engine has seen be dropped from there."""
    resumed = loader_of(kind, dataset=range(20))
    if kind == "torch":  # which has no state: as torchdata's keeps it
        resumed.next_iter_state = {}
    else:
        loader = loader_of(kind, dataset=range(20))
        next(iter(loader))
        resumed.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="from where the engine stands"):
        next(iter(ab.batches(resumed, effective_batch_size=6, shuffle=False, collate=list)))


@pytest.mark.parametrize("kind", ["torch", "torchdata"])
@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"sampler": DistributedSampler(range(20), 2, 0)}, {}, "DistributedSampler"),  # type: ignore[arg-type]  # has a length
        ({"shuffle": True, "generator": torch.Generator()}, {}, "generator of its own"),
        ({"num_workers": 1}, {"num_workers": 1}, "workers itself"),
    ],
)
def test_what_could_not_go_on_is_refused(kind: str, settings: Any, options: Any, words: str) -> None:
    """A loader that yields a part of its data, or draws from a generator that no checkpoint has."""
    loader = loader_of(kind, dataset=range(20), **settings)
    with pytest.raises(DataError, match=words):
        next(iter(ab.batches(loader, effective_batch_size=6, shuffle=False, collate=list, **options)))


def test_a_stateful_loader_that_shuffles_is_refused() -> None:
    """Its sampler has a generator of its own; the data set itself is shuffled by the seed."""
    loader = loader_of("torchdata", dataset=range(20), shuffle=True)
    with pytest.raises(DataError, match="Pass the data set itself"):
        next(iter(ab.batches(loader, effective_batch_size=6, shuffle=False, collate=list)))


def test_a_stateful_loaders_batches_are_refused_under_a_budget() -> None:
    """They have been padded before they could be cut; says what to give instead."""
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata")
    loader = module.StatefulDataLoader(Numbered(), batch_size=5, collate_fn=Padded())
    with pytest.raises(DataError, match="batch_size=None"):
        ab.batches(loader, effective_batch_size=9, shuffle=False)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ab.Engine(model, optimizer, DECLARED, micro_batch_size=ab.token_budget(40)) as engine,
        pytest.raises(CompositionError, match="padded together"),
    ):
        engine.step(next(iter(ab.shares(loader))))
