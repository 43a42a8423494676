"""Typical beginner mistakes raise an error with the fix, or just work."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import anybatch as ab
from anybatch.data import Padded, SampleList
from anybatch.errors import AnyBatchError, BatchSizeError, DataError, LossError, UserError

Data = dict[str, Tensor]


def data() -> Data:
    """Return a batch of 8 samples in 3 classes."""
    return {"x": torch.randn(8, 4), "label": torch.arange(8) % 3}


def engine(loss: Any = None, model: nn.Module | None = None, **options: Any) -> ab.Engine:
    """Return an engine with one wrong argument."""
    model = model or nn.Linear(4, 3)
    loss = loss or ab.mean_over_samples(lambda model, batch: model(batch["x"]).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine(model, optimizer, loss, **{"micro_batch_size": 4, "world": ab.World(), **options})


class Stream(IterableDataset[Data]):
    """Yields 8 samples in a fixed order."""

    def __iter__(self) -> Iterator[Data]:
        return iter([{"x": torch.full((4,), float(i))} for i in range(8)])


class Frame:
    """A table indexed by column, like a DataFrame."""

    iloc = ()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, column: str) -> list[int]:
        raise KeyError(column)


def contrastive(model: nn.Module, batch: Data) -> Tensor:
    """Compare every sample with every other, as SupCon does."""
    features = F.normalize(model(batch["x"]), dim=1)
    same = (batch["label"][:, None] == batch["label"]).to(features.dtype)
    return -(same * (features @ features.T).log_softmax(1)).sum(1).mean()


def padded_shares() -> None:
    """Join batches of a loader that pads each to a different length."""
    samples: Any = [torch.ones(3 + i % 5) for i in range(16)]
    loader: DataLoader[Tensor] = DataLoader(
        samples,
        4,
        collate_fn=lambda samples: pad_sequence(samples, batch_first=True),
    )
    list(ab.shares(loader, effective_batch_size=16, world=ab.World()))


MISTAKES: dict[str, tuple[Callable[[], object], type[AnyBatchError], tuple[str, ...]]] = {
    "clip is text": (lambda: engine(clip="1.0"), UserError, ("clip='1.0'", "number")),
    "observer is a list": (lambda: engine(observer=[]), UserError, ("observer=[]", "Observers")),
    "observer is a path": (lambda: engine(observer="log.jsonl"), UserError, ("log.jsonl", "ab.JsonlLog(path)")),
    "observer is a function": (lambda: engine(observer=print), UserError, ("observe(record)",)),
    "seed is text": (lambda: engine(seed="a"), UserError, ("seed='a'", "whole number")),
    "optimizer is a name": (
        lambda: ab.Engine(nn.Linear(1, 1), cast("Any", "adamw"), F.mse_loss),
        UserError,
        ("optimizer='adamw'",),
    ),
    "a detached loss": (
        lambda: engine(ab.mean_over_samples(lambda model, batch: model(batch["x"]).mean().detach())).step(data()),
        LossError,
        ("no autograd graph", ".detach()"),
    ),
    "no_grad around the loop": (torch.no_grad()(lambda: engine().step(data())), LossError, ("no_grad",)),
    "a contrastive loss": (
        lambda: engine(ab.mean_over_samples(contrastive)).step(data()),
        LossError,
        ("ab.joint(encode, loss)",),
    ),
    "a padding loader": (padded_shares, DataError, ("ab.batches(dataset", "collate=")),
    "a DataFrame": (lambda: ab.batches(Frame(), effective_batch_size=4), DataError, ("to_dict('records')",)),
    "a dict of columns": (lambda: ab.batches(data(), effective_batch_size=4), DataError, ("TensorDataset",)),
    "a negative size": (
        lambda: ab.plan("gpt2", device="RTX 4090", effective_batch_size=-1),
        BatchSizeError,
        ("effective_batch_size=-1", "at least 1"),
    ),
    "a field that is not there": (
        lambda: engine(micro_batch_size=ab.token_budget(64)).step(
            next(iter(ab.batches([{"x": torch.ones(4)}], effective_batch_size=1, lengths="tokens", collate=Padded())))
        ),
        DataError,
        ("lengths='tokens'", "['x']"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_with_the_fix(name: str) -> None:
    """The error has the wrong value and the fix."""
    make, error, words = MISTAKES[name]
    with pytest.raises(error) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("norms", [None, "exact"])
def test_no_gradients_under_any_executor(norms: Any) -> None:
    """The executors for merged BatchNorm statistics and for losses across samples reject torch.no_grad() too."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) if norms else nn.Linear(4, 3)
    loss = ab.mean_over_samples(lambda model, batch: model(batch["x"]).mean())
    joint = ab.joint(lambda model, batch: model(batch["x"]), lambda _, outputs: outputs.mean())
    made = engine(loss if norms else joint, model, norms=norms)
    with made, torch.no_grad(), pytest.raises(LossError):
        made.step(data())


def test_streams_keep_their_order() -> None:
    """An iterable dataset needs no shuffle=False, and keeps its order."""
    batches = list(ab.batches(Stream(), effective_batch_size=4))
    assert [list(batch.sample_ids) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_list_of_samples_is_named_in_a_note() -> None:
    """A loss that fails on a list of samples gets a note with the collate function to use."""
    samples = [{"x": torch.randn(4), "label": torch.tensor(0)} for _ in range(8)]
    with pytest.raises(TypeError) as caught:
        engine().step(SampleList(samples))
    assert any("default_collate" in note for note in caught.value.__notes__)
    with pytest.raises(DataError):
        engine().step(samples)
