"""Repeated batches are loaded once, and subsets have the requested samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.batch import Placement
from anybatch.core.splitting import SplitOptions
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch
from tests.engine.cases import InMemory


class Counted(InMemory):
    """Counts its loads."""

    loads = 0

    def feed(self, *arguments):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201 (as its base)
        """Count, and feed."""
        self.loads += 1
        return super().feed(*arguments)


def samples(number: int) -> Counted:
    """Return a batch whose samples are their own numbers."""
    return Counted({"x": torch.arange(number)})


@given(number=st.integers(2, 30), data=st.data())
@pytest.mark.slow
def test_a_part_has_the_samples_at_its_positions(number: int, data: st.DataObject) -> None:
    """A subset in any cut has the samples at its positions, in order, once each."""
    positions = data.draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=number, unique=True))
    start = data.draw(st.integers(0, number - 1))
    for chosen in (positions, range(start, number)):
        part = BatchSubset(samples(number), chosen)
        size = data.draw(st.integers(1, number))
        fed = Placement(SplitOptions(micro_batch_size=size), 1, 0).micro_batches(part)
        assert torch.cat([one["x"] for one in fed]).tolist() == list(chosen) == list(part.sample_ids)


def test_a_batch_is_loaded_once_for_each_cut() -> None:
    """A cut that was loaded before is not loaded again; another one is."""
    whole = samples(12)
    cached = CachedBatch(whole)
    for size, loads in ((4, 1), (4, 1), (3, 2)):
        fed = list(Placement(SplitOptions(micro_batch_size=size), 1, 0).micro_batches(cached))
        assert [len(one["x"]) for one in fed] == [size] * (12 // size)
        assert whole.loads == loads
