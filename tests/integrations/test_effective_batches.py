"""A loader of effective batches gives every sample to one rank, once, in an order that does not depend on the ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from anybatch.core.token_budget import token_budget
from anybatch.errors import BatchSizeError, DataError, DoesNotFitError
from anybatch.integrations.loops import ShareLoader, Tokens, World, share_loader
from tests.raising import raises

Ids = list[list[int]]


def loader_of(
    num_samples: int, size: int = 4, micro: int = 2, world: World | None = None, **options: Any
) -> ShareLoader:
    """Return a loader of effective batches of a data set whose samples are their numbers."""
    inner: Any = DataLoader(range(num_samples), batch_size=1, **{"shuffle": True, **options})  # type: ignore[arg-type]
    return share_loader(inner, size, micro, world or World(0, 1), seed=3)


def counted(loader: ShareLoader) -> Ids:
    """Return the samples of each step that count on this rank."""
    return [
        [
            int(sample)
            for batch, weight in zip(share.micro_batches, share.weights, strict=True)
            if weight
            for sample in batch
        ]
        for share in loader
    ]


@given(num_samples=st.integers(1, 40), size=st.integers(1, 17), micro=st.integers(1, 9), num_ranks=st.integers(1, 4))
@pytest.mark.slow
def test_ranks_partition_each_effective_batch(num_samples: int, size: int, micro: int, num_ranks: int) -> None:
    """Ranks together have the samples of one rank, in lockstep, with micro-batches of at most the given size."""
    expected = counted(loader_of(num_samples, size, micro))
    loaders = [loader_of(num_samples, size, micro, World(rank, num_ranks)) for rank in range(num_ranks)]
    for of_ranks, ids in zip(zip(*map(counted, loaders), strict=True), expected, strict=True):
        assert [one for share in of_ranks for one in share] == ids
    for shares in zip(*loaders, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert all(0 < len(batch) <= micro for share in shares for batch in share.micro_batches)
    assert sorted(one for ids in expected for one in ids) == list(range(num_samples))
    assert [len(ids) for ids in expected[:-1]] == [size] * (len(expected) - 1)


def test_epochs_differ_and_repeat() -> None:
    """An epoch has an order of its own, which any later iteration of it repeats, also in workers."""
    loader, with_workers = loader_of(23), loader_of(23, num_workers=2)
    first = counted(loader)
    loader.set_epoch(1)
    second = counted(loader)
    with_workers.set_epoch(1)

    assert second != first
    assert counted(with_workers) == second
    loader.set_epoch(0)
    assert counted(loader) == first


def test_skipped_batches() -> None:
    """One iteration can leave out the first effective batches, to resume an epoch; the next one has them again."""
    loader = loader_of(23)
    whole = counted(loader)
    loader.batch_sampler.num_skipped = 4  # type: ignore[union-attr]

    assert counted(loader) == whole[4:]
    assert counted(loader) == whole


def test_samplers_are_kept() -> None:
    """A sequential loader stays sequential, and a weighted sampler draws the same samples on every rank."""
    assert counted(loader_of(7, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6]]
    assert counted(loader_of(7, shuffle=False, drop_last=True)) == [[0, 1, 2, 3]]
    drawn = [
        counted(loader_of(8, shuffle=None, sampler=WeightedRandomSampler([0.0] * 7 + [1.0], 8), world=World(rank, 2)))
        for rank in (0, 1)
    ]
    assert drawn == [[[7, 7], [7, 7]]] * 2
    repeated = counted(loader_of(40, shuffle=None, sampler=RandomSampler(range(40), replacement=True)))
    assert sorted(one for ids in repeated for one in ids) != list(range(40))


def test_smaller_micro_batches_have_the_same_samples() -> None:
    """After halving, this share and later ones keep their samples; micro-batches of one sample cannot be halved."""
    loader = loader_of(12, 8, 6)
    shares, share = loader.dataset, next(iter(loader))
    before = torch.cat(share.micro_batches).tolist()
    halved = shares.halve(share, "")  # type: ignore[attr-defined]

    assert [len(batch) for batch in halved.micro_batches] == [3, 3, 2]
    assert torch.cat(halved.micro_batches).tolist() == before
    assert [len(batch) for batch in shares.at_current_size(share).micro_batches] == [3, 3, 2]  # type: ignore[attr-defined]
    for _ in range(2):
        halved = shares.halve(halved, "")  # type: ignore[attr-defined]
    assert len(halved.micro_batches) == 8
    with pytest.raises(DoesNotFitError):
        shares.halve(halved, "")  # type: ignore[attr-defined]


def test_halving_begins_at_the_share() -> None:
    """A limit above a rank's share is halved from the size of the share, or the next attempt would be the same."""
    loader = loader_of(6, 6, 100, World(0, 2))
    halved = loader.dataset.halve(next(iter(loader)), "")  # type: ignore[attr-defined]

    assert [len(batch) for batch in halved.micro_batches] == [2, 1]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Return sequences in one tensor."""
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), tokens=st.integers(9, 40), ranks=st.integers(1, 3))
@pytest.mark.slow
def test_token_budgets(lengths: list[int], tokens: int, ranks: int) -> None:
    """Micro-batches have at most the tokens of a budget, also halved; ranks have each sample once, in lockstep."""
    samples = [torch.full((length,), number) for number, length in enumerate(lengths)]
    inner: Any = DataLoader(samples, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    limit = Tokens(token_budget(tokens), len)
    loaders = [share_loader(inner, 13, limit, World(rank, ranks), seed=3) for rank in range(ranks)]
    for shares in zip(*loaders, strict=True):
        halves = [loader.dataset.at_current_size(share) for loader, share in zip(loaders, shares, strict=True)]  # type: ignore[attr-defined]
        most = tokens
        while True:
            found = [b[:, 0].tolist() for share in halves for b, weight in share.pairs if weight]
            assert sorted(number for rows in found for number in rows) == sorted(shares[0].key.sample_ids)
            assert len({len(share.micro_batches) for share in halves}) == 1
            assert all(b.numel() <= most or len(b) == 1 for share in halves for b in share.micro_batches)
            try:
                halves = [loader.dataset.halve(share, "") for loader, share in zip(loaders, halves, strict=True)]  # type: ignore[attr-defined]
            except DoesNotFitError:
                break
            most = (most + 1) // 2
        assert all(len(rows) == 1 for rows in found)


class Drawn(torch.utils.data.Dataset[float]):
    """Samples that are random numbers, as with augmentation."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 6

    def __getitem__(self, number: int) -> float:
        """Return a random number."""
        return float(torch.rand(()))


def test_augmentation_does_not_depend_on_the_split() -> None:
    """A sample has the same random numbers for any micro-batch size and number of ranks."""
    inner: Any = DataLoader(Drawn(), shuffle=True)
    worlds = [(World(0, 1), 6), (World(0, 1), 2), (World(1, 2), 1)]
    drawn = [
        torch.cat(next(iter(share_loader(inner, 6, micro, world, seed=0))).micro_batches).tolist()
        for world, micro in worlds
    ]

    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[0][3:]
    assert len(set(drawn[0])) == len(drawn[0])


class Stream(IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        """Yield samples."""
        return iter(range(3))


def test_refusals() -> None:
    """A stream, other samplers, data without a step and sizes below 1 are refused by code."""
    with raises(DataError, "iterable_data"):
        share_loader(DataLoader(Stream()), 4, 1, World(0, 1), seed=0)
    with raises(DataError, "batch_sampler"):
        share_loader(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), 4, 1, World(0, 1), seed=0)  # type: ignore[arg-type]
    with raises(DataError, "own_generator"):
        loader_of(4, shuffle=None, sampler=WeightedRandomSampler([1.0] * 4, 4, generator=torch.Generator()))
    with raises(DataError, "distributed_sampler") as caught:
        loader_of(4, shuffle=None, sampler=DistributedSampler(range(4), 2, 0))  # type: ignore[arg-type]
    assert "ab.batches" not in str(caught.value)  # which a trainer cannot use
    with raises(DataError, "no_step"):
        loader_of(4, 5, drop_last=True)
    assert len(loader_of(4, 5)) == len(loader_of(5, 5, drop_last=True)) == 1
    for size, micro in ((0, 1), (4, 0)):
        with pytest.raises(BatchSizeError):
            loader_of(4, size, micro)
