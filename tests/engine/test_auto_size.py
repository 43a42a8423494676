"""The search for a micro-batch size that fits: it finds it, on all ranks alike, and leaves nothing behind."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch as ab
from anybatch.core.batch import Placement, Position
from anybatch.core.splitting import Cut
from anybatch.engine.auto_size import largest_that_fits, search_micro_batch_size
from anybatch.engine.feeding import open_batch
from anybatch.errors import BatchSizeError, CompositionError
from tests.engine.cases import Batch, InMemory, classify, cut, vectors
from tests.parallel.fsdp_spike import FullyShard
from tests.ranks_fixture import Ranks


@given(limit=st.integers(1, 300), upper=st.integers(1, 300))
def test_the_largest_power_of_two_or_the_whole_share(limit: int, upper: int) -> None:
    """Doubling finds the largest power of two that fits, or the upper size if that fits, and says which it was."""
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found, limited = largest_that_fits(fits, upper)

    assert limited == (upper > limit)
    assert found == (upper if not limited else max(2**power for power in range(9) if 2**power <= limit))
    assert asked[0] == min(2, upper)  # BatchNorm refuses a single sample
    assert max(asked) <= upper
    assert len(asked) == len(set(asked))


def test_not_even_one() -> None:
    """If a single sample does not fit there is nothing to find."""
    with pytest.raises(BatchSizeError, match="not even 1 sample"):
        largest_that_fits(lambda _: False, 8)


class Hungry(nn.Module):
    """Runs out of memory above a size, in the middle of its forward; has a buffer and dropout."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        torch.manual_seed(16)
        self.limit = limit
        self.sizes: list[int] = []
        self.register_buffer("seen", torch.zeros(5))
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(5, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        self.get_buffer("seen").add_(x.sum(0))
        hidden = self.dropout(x)
        if len(x) > self.limit:
            message = "no memory for that many samples"
            raise torch.OutOfMemoryError(message)
        logits: torch.Tensor = self.out(hidden)
        return logits


class Search(NamedTuple):
    """What a search found, what it tried, and whether everything is as before."""

    size: int
    tried: list[int]
    unchanged: bool
    without_gradients: bool


def search(model: Hungry, batch: Batch, world: ab.World, *, new: bool) -> Search:
    """Search on the first batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), world=world) as engine:
        before = [*(tensor.clone() for tensor in model.state_dict().values()), torch.get_rng_state()]
        size = search_micro_batch_size(
            engine._machine,  # noqa: SLF001 (on a CPU the engine itself does not search)
            open_batch(InMemory(batch), Placement(Cut(), world.size, world.rank), world, Position()),
            world,
            model,
            clear=engine._forget_gradients,  # noqa: SLF001
            optimizer_is_new=new,
        )
        after = [*model.state_dict().values(), torch.get_rng_state()]
        gradients = [parameter.grad for parameter in model.parameters()]
        return Search(
            size,
            model.sizes,
            all(torch.equal(*pair) for pair in zip(before, after, strict=True)),
            not any(gradient is not None and bool(gradient.any()) for gradient in gradients),
        )


def test_a_search_leaves_nothing_behind() -> None:
    """Buffers, random numbers and gradients are as before, though half-finished forward passes ran out of memory."""
    found = search(Hungry(5), vectors(29), ab.World(), new=False)

    assert found.size == 4
    assert found.tried == [2, 2, 4, 4, 8]
    assert found.unchanged
    assert found.without_gradients


def test_an_optimizer_without_state_will_want_memory_too() -> None:
    """Before the first update half of what fits is taken, unless the whole share fits."""
    assert search(Hungry(5), vectors(29), ab.World(), new=True).size == 2
    assert search(Hungry(29), vectors(29), ab.World(), new=True).size == 29


def search_on_ranks(limits: list[int]) -> Search:
    """Run on every rank: search with another limit on each."""
    world = ab.World.from_environment()
    return search(Hungry(limits[world.rank]), vectors(29), world, new=False)


def test_ranks_take_the_smallest_that_fits_anywhere(two_ranks: Ranks) -> None:
    """Where one rank has less room than the other, both take its size, and gradients stay clear on both."""
    found: list[Search] = two_ranks.run(search_on_ranks, [100, 3])

    assert [one.size for one in found] == [2, 2]
    assert all(one.unchanged and one.without_gradients for one in found)
    assert found[0].tried == [2, 2, 4, 4]


def refused_search() -> str:
    """Run on every rank: return what is said to a search under lockstep."""
    world = ab.World.from_environment()
    model = Hungry(100)
    loss = ab.mean_over_samples(classify)
    engine = ab.Engine(model, lambda named: torch.optim.SGD(named, lr=0.1), loss, strategy=FullyShard(), world=world)
    opened = open_batch(cut(vectors(9), 0, 4), Placement(Cut(), world.size, world.rank), world, Position())
    with pytest.raises(CompositionError) as caught:
        search_micro_batch_size(
            engine._machine,  # noqa: SLF001
            opened,
            world,
            model,
            clear=engine._forget_gradients,  # noqa: SLF001
            optimizer_is_new=True,
        )
    return str(caught.value)


def test_no_search_under_lockstep(two_ranks: Ranks) -> None:
    """Where ranks run in lockstep, one that ran out of memory would leave the others waiting: refused beforehand."""
    for message in two_ranks.run(refused_search):
        assert "'fully_shard'" in message
        assert "Name a micro_batch_size" in message
