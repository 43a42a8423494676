"""The order of samples and the division of epochs into steps, without data."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.core.randomness import order_seed
from anybatch.core.schedules import BatchRamp
from anybatch.data import batches
from anybatch.data.options import SampleSchedule, sample_order
from anybatch.errors import BatchSizeError, DataError
from anybatch.norms import Ghost
from tests.faults import sees
from tests.raising import raises


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


RAMP = BatchRamp((4, 10), (8, 30), (16, None))


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """The numbers 0 to 49 in float64."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample."""
        return torch.tensor(float(index), dtype=torch.float64)


class Stream:
    """The same numbers as a stream."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the numbers."""
        return iter(torch.arange(float(self.length), dtype=torch.float64))


def engine_of(**options: object) -> ab.Engine:
    """Return an engine for a model with one weight and a loss linear in the data."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ab.mean_over_samples(lambda model, batch: model(batch[:, None]).mean())
    return ab.Engine(model, optimizer, loss, check_loss=False, **options)  # type: ignore[arg-type]


@given(num_samples=st.integers(16, 60), drop_last=st.booleans(), offset=st.integers(0, 60), steps=st.integers(1, 25))
@settings(deadline=None)
def test_counting_steps_of_a_ramp_is_walking_them(num_samples: int, drop_last: bool, offset: int, steps: int) -> None:
    """The step arithmetic of a ramped schedule agrees with counting step by step from any offset."""
    options = ab.batches(range(num_samples), effective_batch_size=RAMP, drop_last=drop_last).request
    schedule = SampleSchedule(num_samples, options)
    start = Position(0, min(offset, num_samples))
    walked: list[Position] = []
    position = schedule.normalized(start)
    while len(walked) < steps:
        for first, stop in schedule.steps_of_epoch(position):
            size = RAMP.at(position.epoch * num_samples + first)
            assert stop - first == min(size, num_samples - first)
            walked.append(Position(position.epoch, first))
        position = Position(position.epoch + 1)
    following = schedule.normalized(Position(walked[-1].epoch + 1))
    assert schedule.end(start, None, steps) == [*walked, following][steps]
    assert schedule.num_steps(start, 3, None) == sum(
        1 for epoch in range(3) for _ in schedule.steps_of_epoch(start if epoch == 0 else Position(epoch))
    )


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ramp_leaves_the_order_as_it_is(num_workers: int) -> None:
    """A ramped run uses the same samples in the same order; steps have the sizes of their stages."""
    ramped = ab.batches(Numbers(), effective_batch_size=RAMP, epochs=2, seed=3, num_workers=num_workers)
    plain = ab.batches(Numbers(), effective_batch_size=5, epochs=2, seed=3)
    ids = [list(batch.sample_ids) for batch in ramped]
    assert [len(one) for one in ids] == [4, 4, 4, 8, 8, 8, 8, 6, 16, 16, 16, 2]
    assert len(ramped) == len(ids)
    assert list(itertools.chain(*ids)) == [index for batch in plain for index in batch.sample_ids]


@pytest.mark.parametrize("dataset", [Numbers(), Stream()], ids=["index", "stream"])
def test_a_ramp_goes_on_in_the_middle(dataset: object) -> None:
    """A run resumed after any batch makes the same remaining steps."""

    def steps(start: Position | None) -> list[tuple[Position, list[int], torch.Tensor]]:
        made = ab.batches(dataset, effective_batch_size=RAMP, epochs=2, shuffle=False, start=start)
        return [(b.end, list(b.sample_ids), next(iter(b.feed([range(len(b.sample_ids))])))) for b in made]

    through = steps(Position())
    assert [len(ids) for _, ids, _ in through] == [4, 4, 4, 8, 8, 8, 8, 6, 16, 16, 16, 2]
    for number, (end, _, _) in enumerate(through[:-1]):
        rest = steps(end)
        assert [(e, ids) for e, ids, _ in rest] == [(e, ids) for e, ids, _ in through[number + 1 :]]
        assert all(torch.equal(one[2], other[2]) for one, other in zip(rest, through[number + 1 :], strict=True))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_ramped_as_a_data_set_is(drop_last: bool) -> None:
    """A stream gives the same steps as an unshuffled data set, also with drop_last."""
    sizes = [
        [list(batch.sample_ids) for batch in made]
        for made in (
            ab.batches(Stream(), effective_batch_size=RAMP, epochs=2, shuffle=False, drop_last=drop_last),
            ab.batches(Numbers(), effective_batch_size=RAMP, epochs=2, shuffle=False, drop_last=drop_last),
        )
    ]
    assert sizes[0] == sizes[1]


def test_accumulation_follows_a_ramp() -> None:
    """The engine cuts each batch by the same micro-batch size, so larger stages accumulate more."""
    with engine_of(micro_batch_size=4) as engine:
        reports = [engine.step(batch) for batch in ab.batches(Numbers(), effective_batch_size=RAMP, seed=1)]
    assert [(report.num_samples, len(report.plan.units)) for report in reports] == [
        (4, 1), (4, 1), (4, 1), (8, 2), (8, 2), (8, 2), (8, 2), (6, 2),
    ]  # fmt: skip


def test_every_stage_is_checked_at_the_start() -> None:
    """The first step refuses a later stage that cannot be cut or exceeds the engine's batch size."""
    # Stage 1 is a single group; in stage 2, a group of 8 does not fit into a micro-batch of 4.
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).double()
    loss = ab.mean_over_samples(lambda model, batch: model(batch[:, None]).mean())
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        micro_batch_size=4,
        norms=Ghost(group_size=8),
        check_loss=False,
    )
    with engine, raises(BatchSizeError, "group_too_large"):
        engine.step(next(iter(ab.batches(Numbers(), effective_batch_size=RAMP))))
    with engine_of(effective_batch_size=8) as engine, pytest.raises(BatchSizeError):
        engine.step(next(iter(ab.batches(Numbers(), effective_batch_size=RAMP))))


def test_stages_that_never_come_are_refused() -> None:
    """A stage larger than the data set is refused, and a ramp longer than the first epoch of a stream."""
    with raises(BatchSizeError, "stage_never_begins"):
        ab.batches(Numbers(), effective_batch_size=BatchRamp((4, 10), (64, None)))
    short = ab.batches(Stream(30), effective_batch_size=RAMP, epochs=2, shuffle=False)
    with raises(DataError, "stage_never_begins"):
        list(short)
    with pytest.raises(TypeError):
        _ = ab.batches(Numbers(), effective_batch_size=RAMP).steps_per_epoch
