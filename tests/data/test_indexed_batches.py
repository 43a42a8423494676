"""Data sets with an index, loaded in the calling process."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import anybatch.data as ab
from anybatch.core.batch import Placement, Position
from anybatch.core.randomness import order_seed
from anybatch.core.splitting import SplitOptions
from anybatch.data.loading import pinned

ONE = Placement(SplitOptions(), 1, 0)


class Drawing:
    """Samples that are their id and a draw from each global generator."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return float(index), random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()


def rows(batches: ab.Batches, split: SplitOptions, world_size: int) -> list[list[Any]]:
    """Return the samples of each batch as fed to all ranks, in global order."""
    return [
        sorted(
            sample
            for rank in range(world_size)
            for unit in Placement(split, world_size, rank).micro_batches(batch)
            for sample in unit
        )
        for batch in batches
    ]


cuts = st.builds(
    SplitOptions,
    micro_batch_size=st.none() | st.integers(1, 7),
    deal=st.sampled_from(["balanced", "fixed"]),
    lockstep=st.booleans(),
) | st.builds(SplitOptions, accumulation_steps=st.integers(1, 5), deal=st.sampled_from(["balanced", "fixed"]))


def test_batches_are_the_plain_loop() -> None:
    """One rank without accumulation gets slices of the permutation, loaded and collated as in plain PyTorch."""
    data = torch.arange(50.0).reshape(25, 2)
    fed = [next(ONE.micro_batches(batch)) for batch in ab.batches(data, effective_batch_size=8, epochs=2, seed=5)]
    plain = []
    for epoch in range(2):
        order = torch.randperm(25, generator=torch.Generator().manual_seed(order_seed(5, epoch)))
        plain += [default_collate([data[i] for i in ids]) for ids in order.split(8)]
    assert len(fed) == len(plain) == 8
    assert all(torch.equal(left, right) for left, right in zip(fed, plain, strict=True))


@given(
    num_samples=st.integers(1, 40),
    size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    split=cuts,
    shuffle=st.booleans(),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_ranks_and_units_partition_an_epoch(
    num_samples: int, size: int, world_size: int, split: SplitOptions, shuffle: bool
) -> None:
    """For every split and world size each rank gets the units of its share, and each sample counts once."""
    batches = ab.batches(range(num_samples), effective_batch_size=size, shuffle=shuffle, collate=list)
    counted: list[int] = []
    for batch in batches:
        plan = Placement(split, world_size, 0).plan(len(batch.sample_ids))
        for rank, share in enumerate(plan.shares):
            units = list(Placement(split, world_size, rank).micro_batches(batch))
            assert units == [list(batch.sample_ids[unit.start : unit.stop]) for unit in share]
            counted += [i for ids, unit in zip(units, share, strict=True) if unit.weight for i in ids]
    assert sorted(counted) == list(range(num_samples))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_of_an_epoch(drop_last: bool) -> None:
    """The last batch of an epoch is smaller, or dropped with drop_last; len() counts the batches."""
    batches = ab.batches(range(10), effective_batch_size=4, epochs=2, shuffle=False, drop_last=drop_last)
    ids = [list(batch.sample_ids) for batch in batches]
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7]] + ([] if drop_last else [[8, 9]])
    assert ids == epoch * 2
    assert len(batches) == len(ids)
    assert batches.steps_per_epoch == len(epoch)
    assert [batch.epoch for batch in batches] == [0] * len(epoch) + [1] * len(epoch)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_resumed_anywhere_is_the_same(drop_last: bool) -> None:
    """A run resumed after any batch yields the remaining batches with the same augmentation."""

    def made(**more: Any) -> ab.Batches:
        return ab.batches(Drawing(11), effective_batch_size=4, epochs=3, drop_last=drop_last, collate=list, **more)

    whole = [(batch.sample_ids, batch.end, list(ONE.micro_batches(batch))) for batch in made()]
    for done, (_, position, _) in enumerate(whole, 1):
        resumed = made(start=position)
        assert [(batch.sample_ids, batch.end, list(ONE.micro_batches(batch))) for batch in resumed] == whole[done:]
        assert len(resumed) == len(whole) - done
    assert whole[-1][1] == Position(3)


def test_a_run_may_be_resumed_with_another_batch_size() -> None:
    """A resume with a different batch size re-cuts the rest of the epoch's order."""
    order = [i for batch in ab.batches(range(10), effective_batch_size=3) for i in batch.sample_ids]
    rest = list(ab.batches(range(10), effective_batch_size=4, start=Position(0, 3)))
    assert [list(batch.sample_ids) for batch in rest] == [order[3:7], order[7:]]
    assert [(batch.start, batch.end) for batch in rest] == [
        (Position(0, 3), Position(0, 7)),
        (Position(0, 7), Position(1)),
    ]
    assert next(iter(ab.batches(range(10), effective_batch_size=4, start=Position(0, 10), epochs=2))).start == Position(
        1
    )


def test_augmentation_belongs_to_the_sample_and_the_epoch() -> None:
    """Augmentation depends on seed, epoch and id only, not on world size, split, order or batch size."""

    def drawn(size: int, split: SplitOptions, world_size: int, **more: Any) -> list[Any]:
        batches = ab.batches(Drawing(13), effective_batch_size=size, epochs=2, collate=list, **more)
        fed = rows(batches, split, world_size)
        per_epoch = ab.batches(Drawing(13), effective_batch_size=size, epochs=2, **more).steps_per_epoch
        return [sorted(itertools.chain(*fed[:per_epoch])), sorted(itertools.chain(*fed[per_epoch:]))]

    one = drawn(6, SplitOptions(), 1)
    assert (
        one
        == drawn(6, SplitOptions(micro_batch_size=2), 3)
        == drawn(4, SplitOptions(micro_batch_size=1, deal="fixed"), 2)
    )
    assert one == drawn(6, SplitOptions(), 1, shuffle=False)
    assert one[0] != one[1]
    assert one != drawn(6, SplitOptions(), 1, seed=1)
    assert len({draw for epoch in one for sample in epoch for draw in sample[1:]}) == 2 * 13 * 3


def test_collate_has_its_own_random_key() -> None:
    """A random collate function repeats its draws for the same unit, and they differ from its samples' draws."""

    def collate(samples: list[Any]) -> tuple[Any, float]:
        return samples[0], random.random()

    def fed() -> list[Any]:
        batches = ab.batches(Drawing(6), effective_batch_size=3, collate=collate)
        return [unit for batch in batches for unit in ONE.micro_batches(batch)]

    assert fed() == fed()
    assert all(drawn != first[1] for first, drawn in fed())


def _state() -> tuple[Any, ...]:
    """Return the next numbers of the three generators, and restore them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    draws = random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return draws


def test_the_callers_generators_are_untouched() -> None:
    """The global random states are unchanged between units and after a failed one.

    This includes the second number of a normal pair, which Python and numpy cache for the next call.
    """
    random.gauss(0, 1)
    np.random.normal()
    before = _state()
    for batch in ab.batches(Drawing(8), effective_batch_size=4):
        for _ in Placement(SplitOptions(micro_batch_size=2), 1, 0).micro_batches(batch):
            assert _state() == before

    def fails(_: list[Any]) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        next(ONE.micro_batches(next(iter(ab.batches(Drawing(8), effective_batch_size=4, collate=fails)))))
    assert _state() == before


def test_units_are_loaded_on_request() -> None:
    """Loading is lazy: nothing for the batch, then one unit after the other."""
    loaded: list[int] = []

    class Recording:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    batch = next(iter(ab.batches(Recording(), effective_batch_size=6, shuffle=False)))
    assert (batch.sample_ids, loaded) == (tuple(range(6)), [])
    units = Placement(SplitOptions(micro_batch_size=2), 1, 0).micro_batches(batch)
    next(units)
    assert loaded == [0, 1]
    next(units)
    assert loaded == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("collate", "note"),
    [(list, "while loading sample 2 of Broken, epoch=0"), (lambda _: 1 / 0, "while collating 2 samples")],
)
def test_an_error_names_the_sample(collate: Callable[[list[Any]], Any], note: str) -> None:
    """The user's own exception is raised, with a note that names the sample."""

    class Broken(Drawing):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            if index == 2:
                raise ZeroDivisionError
            return super().__getitem__(index)

    batch = next(iter(ab.batches(Broken(4), effective_batch_size=4, shuffle=False, collate=collate)))
    with pytest.raises(ZeroDivisionError) as caught:
        list(Placement(SplitOptions(micro_batch_size=2), 1, 0).micro_batches(batch))
    assert note in caught.value.__notes__[0]


def test_pinning_reaches_nested_tensors_and_objects_that_pin_themselves() -> None:
    """`pin_memory` pins tensors in nested containers, and calls a batch's own `pin_memory` method if it has one."""

    class Own:
        def pin_memory(self) -> str:
            return "pinned"

    assert pinned(Own()) == "pinned"
    if torch.cuda.is_available():
        assert pinned({"x": (torch.ones(2), "text")})["x"][0].is_pinned()
