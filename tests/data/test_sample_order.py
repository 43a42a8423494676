"""The order of samples and the division of epochs into steps, without data."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anybatch.core.batch import Position
from anybatch.core.randomness import order_seed
from anybatch.data import batches
from anybatch.data.options import SampleSchedule, sample_order
from tests.faults import sees


@sees(
    "every epoch has the same order",
    "src/anybatch/core/randomness.py",
    "_mix(_ORDER, seed, epoch, 0)",
    "_mix(_ORDER, seed, 0, 0)",
)
def test_an_order_is_the_permutation_of_its_epoch_and_seed() -> None:
    """The order is torch's permutation under the key (seed, epoch), so other seeds and epochs differ."""
    order = sample_order(100, seed=7, epoch=3, shuffle=True)
    plain = torch.randperm(100, generator=torch.Generator().manual_seed(order_seed(7, 3)))
    assert torch.equal(order, plain)
    assert not torch.equal(order, sample_order(100, seed=7, epoch=4, shuffle=True))
    assert not torch.equal(order, sample_order(100, seed=8, epoch=3, shuffle=True))


@given(
    num_samples=st.integers(1, 40),
    size=st.integers(1, 20),
    drop_last=st.booleans(),
    offset=st.integers(0, 40),
    steps=st.integers(1, 30),
)
@settings(deadline=None)
def test_counting_steps_is_walking_them(num_samples: int, size: int, drop_last: bool, offset: int, steps: int) -> None:
    """The arithmetic of a schedule (number of steps, end) agrees with counting step by step from any offset."""
    size = min(size, num_samples) if drop_last else size
    options = batches(range(num_samples), effective_batch_size=size, drop_last=drop_last).request
    schedule = SampleSchedule(num_samples, options)
    start = Position(2, min(offset, num_samples))
    walked: list[Position] = []
    position = schedule.normalized(start)
    while len(walked) < steps:
        walked += [Position(position.epoch, first) for first, _ in schedule.steps_of_epoch(position)]
        position = Position(position.epoch + 1)
    following = schedule.normalized(Position(walked[-1].epoch + 1))
    assert schedule.end(start, None, steps) == [*walked, following][steps]
    assert schedule.num_steps(start, None, steps) == steps
    assert schedule.num_steps(start, 4, None) == len(_starts_before(schedule, start, 4))
    assert schedule.end(start, 4, None) == Position(4)


def _starts_before(schedule: SampleSchedule, start: Position, end_epoch: int) -> list[Position]:
    starts = []
    for epoch in range(start.epoch, end_epoch):
        begin = start if epoch == start.epoch else Position(epoch)
        starts += [Position(epoch, first) for first, _ in schedule.steps_of_epoch(begin)]
    return starts
