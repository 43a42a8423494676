"""Loaders of single samples as streams, also torchdata's stateful one: read fully, cut by length, resumed."""

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
from tests.raising import raises

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This DataLoader will create")

TOLERANCE = 1e-12
# torchdata 0.11 calls 'set_vital', which torch 2.13 deprecates.


class Numbered(Dataset[Any]):
    """Sentences with random tokens, as an augmentation draws them."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = Sentences()[index]
        drawn = torch.randint(1, 13, sample["input_ids"].shape)
        return {**sample, "input_ids": torch.where(drawn > 6, drawn, sample["input_ids"])}


class InItsOwnOrder(IterableDataset[Any]):
    """The same samples as a stream."""

    def __iter__(self) -> Any:
        return map(Numbered().__getitem__, range(len(LENGTHS)))


def loader_of(kind: str, **settings: Any) -> Any:
    """Return a loader of samples, torch's or torchdata's."""
    if kind == "torch":
        return DataLoader(batch_size=None, **settings)
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata")
    return module.StatefulDataLoader(batch_size=None, **settings)


def run(loader: Any, num_steps: int, saved: Any = None, save_to: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Train for some steps, from the start or a checkpoint; return the samples of each step and the parameters."""
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
def test_a_run_resumes_at_any_point_of_an_epoch(tmp_path: Any, kind: str, settings: Any) -> None:
    """A run cut by length, stopped after any of 6 steps and resumed, has the same samples and parameters."""
    make = functools.partial(loader_of, kind, **settings)
    whole, expected = run(make(), 7)
    for num_steps in range(1, 7):
        folder = tmp_path / f"after {num_steps}"
        first, _ = run(make(), num_steps, save_to=folder)
        rest, found = run(make(), 7 - num_steps, saved=folder)
        assert first + rest == whole
        assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_every_sample_of_an_epoch_is_read_once(kind: str) -> None:
    """Each epoch reads every sample once; a shuffling loader reorders them per epoch, also with its own workers."""
    for num_workers in (0, 2):
        loader = loader_of(kind, dataset=range(20), shuffle=kind == "torch", num_workers=num_workers)
        batches = ab.batches(loader, effective_batch_size=6, shuffle=False, epochs=2, collate=list)
        epochs: list[list[int]] = [[], []]
        for batch in batches:
            epochs[batch.epoch] += next(batch.feed([range(batch.num_samples)]))
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
        assert (epochs[0] != epochs[1]) == (kind == "torch")


@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_a_loader_that_starts_in_the_middle_is_refused(kind: str) -> None:
    """A loader that would start in the middle is refused, because the engine would skip samples twice."""
    resumed = loader_of(kind, dataset=range(20))
    if kind == "torch":  # torch's loader has no state, so set torchdata's attribute
        resumed.next_iter_state = {}
    else:
        loader = loader_of(kind, dataset=range(20))
        next(iter(loader))
        resumed.load_state_dict(loader.state_dict())
    with raises(DataError, "loader_with_state"):
        next(iter(ab.batches(resumed, effective_batch_size=6, shuffle=False, collate=list)))


@pytest.mark.parametrize("kind", ["torch", "torchdata"])
@pytest.mark.parametrize(
    ("settings", "options", "code"),
    [
        ({"sampler": DistributedSampler(range(20), 2, 0)}, {}, "distributed_sampler"),  # type: ignore[arg-type]  # has a length
        ({"shuffle": True, "generator": torch.Generator()}, {}, "own_generator"),
        ({"num_workers": 1}, {"num_workers": 1}, "workers_in_workers"),
    ],
)
def test_loaders_that_cannot_resume_are_refused(kind: str, settings: Any, options: Any, code: str) -> None:
    """A loader of a part of the data, with a separate generator or with two sets of workers is refused."""
    loader = loader_of(kind, dataset=range(20), **settings)
    with raises(DataError, code):
        next(iter(ab.batches(loader, effective_batch_size=6, shuffle=False, collate=list, **options)))


def test_a_stateful_loaders_batches_are_refused_under_a_budget() -> None:
    """Batches that the loader has padded cannot be cut by length; the error gives the alternative."""
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the package torchdata")
    loader = module.StatefulDataLoader(Numbered(), batch_size=5, collate_fn=Padded())
    with raises(DataError, "yields_batches"):
        ab.batches(loader, effective_batch_size=9, shuffle=False)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ab.Engine(model, optimizer, DECLARED, micro_batch_size=ab.token_budget(40)) as engine,
        pytest.raises(CompositionError),
    ):
        engine.step(next(iter(ab.shares(loader))))
