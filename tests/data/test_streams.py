"""Data sets that can only be read from the beginning, as a single stream or in shards."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import anybatch.data as ab
from anybatch.core.batch import Placement, Position
from anybatch.core.splitting import SplitOptions
from anybatch.data.prefetch import packed, unpacked
from anybatch.errors import DataError
from tests.raising import raises

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # raised for more workers than cores

ONE = Placement(SplitOptions(), 1, 0)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Yields (name, draws from each global generator) in a random order."""

    def __init__(self, name: str, length: int) -> None:
        self.names = [f"{name}{number}" for number in range(length)]

    def __iter__(self) -> Iterator[Any]:
        names = random.sample(self.names, len(self.names))
        return ((name, random.random(), np.random.random(), torch.rand(()).item()) for name in names)


class Reopened(Stream):
    """A stream that, as in many libraries, divides its samples among workers; records the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        return ((self.epoch, *sample) for sample in list(super().__iter__())[first::every])


def fed(batches: Any, placement: Placement = ONE) -> list[Any]:
    """Return ids, positions and units of each batch."""
    return [(batch.sample_ids, batch.start, batch.end, list(placement.micro_batches(batch))) for batch in batches]


def streamed(stream: Any, **more: Any) -> ab.Batches:
    """Return batches of 4 over two epochs."""
    arguments = {"effective_batch_size": 4, "epochs": 2, "shuffle": False, "collate": list, **more}
    return ab.batches(stream, **arguments)


def test_a_stream_is_cut_in_order() -> None:
    """Batches are consecutive samples, the last one of an epoch smaller; ids are stream positions."""

    class Letters:
        def __iter__(self) -> Iterator[str]:
            return iter("abcdef")

    epoch = [("abcd", Position(0, 4)), ("ef", Position(1))]
    batches = list(streamed(Letters(), epochs=1))
    assert [("".join(*ONE.micro_batches(batch)), batch.end) for batch in batches] == epoch
    assert [batch.sample_ids for batch in batches] == [(0, 1, 2, 3), (4, 5)]
    assert [batch.num_samples for batch in streamed(Letters(), drop_last=True)] == [4, 4]
    assert [batch.epoch for batch in streamed(Letters(), epochs=None, steps=5)] == [0, 0, 1, 1, 2]
    assert len(streamed(Letters(), epochs=None, steps=5)) == 5


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    size=st.integers(1, 9),
    world_size=st.integers(1, 3),
    micro=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_ranks_and_units_partition_a_stream(lengths: list[int], size: int, world_size: int, micro: int) -> None:
    """Over all ranks each sample counts once; shards are read round robin until each is exhausted."""
    parts = [[(number, place) for place in range(length)] for number, length in enumerate(lengths)]
    counted = []
    for batch in ab.batches(ab.Shards(parts), effective_batch_size=size, shuffle=False, collate=list):
        placements = [Placement(SplitOptions(micro_batch_size=micro), world_size, rank) for rank in range(world_size)]
        counted += [sample for placement in placements for unit in placement.micro_batches(batch) for sample in unit]
    assert counted == sorted((sample for part in parts for sample in part), key=lambda sample: (sample[1], sample[0]))


def test_a_stream_is_the_same_for_a_worker_and_after_a_resume() -> None:
    """With a worker, on any rank and after any resume, batches, draws and the stream's own order are the same.

    The caller's random states are unchanged, and each rank's units are collated from its share only.
    """
    state = random.getstate(), torch.get_rng_state().tolist()
    whole = fed(streamed(Stream("s", 10)))
    assert state == (random.getstate(), torch.get_rng_state().tolist())
    names = [
        [sample[0] for _, start, _, units in whole if start.epoch == epoch for sample in units[0]] for epoch in (0, 1)
    ]
    assert sorted(names[0]) == sorted(names[1]) == sorted(f"s{number}" for number in range(10))
    assert names[0] != names[1], "each epoch draws a different order"
    assert fed(streamed(Stream("s", 10), num_workers=1)) == whole
    for done, (_, _, end, _) in enumerate(whole, 1):
        assert fed(streamed(Stream("s", 10), start=end)) == whole[done:]
    second = Placement(SplitOptions(micro_batch_size=1), 2, 1)
    assert fed(streamed(Stream("s", 10)), second)[0][3] == [[sample] for sample in whole[0][3][0][2:]]


@pytest.mark.slow
def test_any_number_of_workers_reads_shards_in_the_same_order() -> None:
    """Shards of any lengths give the same batches and draws with 0 to 3 workers, resumed or not.

    This includes empty shards and shards that divide themselves among workers; each shard receives the epoch.
    """
    shards = ab.Shards([Reopened(name, length) for name, length in zip("abcd", (5, 0, 9, 3), strict=True)])
    whole = fed(streamed(shards))
    samples = [sample for _, start, _, units in whole if start.epoch == 1 for sample in units[0]]
    assert sorted(sample[1] for sample in samples) == sorted(
        f"{name}{number}" for name, length in zip("abcd", (5, 0, 9, 3), strict=True) for number in range(length)
    )
    assert {sample[0] for sample in samples} == {1}
    assert len({draw for sample in samples for draw in sample[2:]}) == 3 * 17, "no two samples draw the same"
    assert [sample[1][0] for sample in samples[:4]] == ["a", "c", "d", "a"]
    for num_workers in (1, 2, 3):
        assert fed(streamed(shards, num_workers=num_workers)) == whole
    assert fed(streamed(shards, num_workers=2, start=whole[2][2])) == whole[3:]
    assert fed(streamed(ab.Shards(_letters, num_shards=2)))[0][3] == [["a", "d", "b", "e"]]


def _letters(number: int) -> Iterator[str]:
    yield from ("abc", "def")[number]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.randn(3).bfloat16(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(3, 4).t(),
        torch.ones(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=lambda tensor: f"{tensor.dtype}, {tensor.layout}, {tuple(tensor.shape)}, {type(tensor).__name__}",
)
def test_tensors_of_all_kinds_are_transferred(tensor: torch.Tensor) -> None:
    """A sample's tensors keep their type, shape and values inside any object; shared tensors stay shared."""
    arrived = unpacked(packed(slice([tensor], {"x": tensor})))
    assert type(arrived.start[0]) is type(tensor)
    torch.testing.assert_close(arrived.start[0], tensor, rtol=0, atol=0)
    assert arrived.stop["x"] is arrived.start[0]


def test_an_error_while_reading_names_the_sample() -> None:
    """The user's own exception is raised, with the position in the stream, with and without a worker."""

    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise LookupError

    batches = iter(streamed(Broken()))
    with pytest.raises(LookupError) as caught:
        list(batches)
    assert caught.value.__notes__ == ["anybatch: while reading sample 5 of the stream, epoch=0."]
    with pytest.raises(LookupError, match="while reading sample 5 of the stream, epoch=0"):
        list(streamed(Broken(), num_workers=1))


def test_the_length_of_a_stream_is_what_it_states() -> None:
    """A stream with `__len__` has a number of steps; others raise TypeError, so that list() works."""

    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.names)

    assert (len(streamed(Sized("s", 10))), streamed(Sized("s", 10)).steps_per_epoch) == (6, 3)
    assert len(list(streamed(Stream("s", 10)))) == 6
    with pytest.raises(TypeError):
        len(streamed(Stream("s", 10)))
    with pytest.raises(TypeError):
        _ = streamed(Stream("s", 10), epochs=None, steps=3).steps_per_epoch


@pytest.mark.parametrize(("stream", "more"), [(Stream("s", 0), {}), (Stream("s", 3), {"drop_last": True})])
def test_a_stream_that_yields_nothing(stream: Stream, more: dict[str, Any]) -> None:
    """An epoch without a full batch is an error, not an endless loop."""
    with raises(DataError, "no_full_batch"):
        list(streamed(stream, epochs=None, steps=1, **more))
