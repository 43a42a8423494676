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
from anybatch.data.indexed import sample_order
from anybatch.errors import BatchSizeError, DataError
from anybatch.norms import Ghost
from tests.faults import sees
from tests.raising import raises


@sees(
    "every epoch has the same order",
    "src/anybatch/core/randomness.py",
    "_folded(_ORDER, seed, epoch, 0)",
    "_folded(_ORDER, seed, 0, 0)",
)
def test_an_order_is_the_permutation_of_its_epoch_and_seed() -> None:
    """The order is torch's permutation under the key (seed, epoch), so other seeds and epochs differ."""
    order = sample_order(100, seed=7, epoch=3, shuffle=True)
    plain = torch.randperm(100, generator=torch.Generator().manual_seed(order_seed(7, 3)))
    assert torch.equal(order, plain)
    assert not torch.equal(order, sample_order(100, seed=7, epoch=4, shuffle=True))
    assert not torch.equal(order, sample_order(100, seed=8, epoch=3, shuffle=True))


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


@given(
    num_samples=st.integers(20, 60),
    size=st.just(RAMP) | st.integers(1, 20),
    drop_last=st.booleans(),
    start=st.builds(Position, st.integers(0, 2), st.integers(0, 20)),
)
@settings(deadline=None)
def test_step_counts_match_iteration(num_samples: int, size: int | BatchRamp, drop_last: bool, start: Position) -> None:
    """The number of steps agrees with iterating over them, from any position, also for a ramp; none is too large."""
    made = batches(range(num_samples), effective_batch_size=size, drop_last=drop_last, epochs=3, start=start)
    walked = list(made)
    assert len(made) == len(walked)
    for batch in walked:
        before = batch.epoch * num_samples + batch.start.sample_offset
        wanted = size if isinstance(size, int) else size.at(before)
        assert batch.num_samples == min(wanted, num_samples - batch.start.sample_offset)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ramp_keeps_the_order(num_workers: int) -> None:
    """A ramped run uses the same samples in the same order; steps have the sizes of their stages."""
    ramped = ab.batches(Numbers(), effective_batch_size=RAMP, epochs=2, seed=3, num_workers=num_workers)
    plain = ab.batches(Numbers(), effective_batch_size=5, epochs=2, seed=3)
    ids = [list(batch.sample_ids) for batch in ramped]
    assert [len(one) for one in ids] == [4, 4, 4, 8, 8, 8, 8, 6, 16, 16, 16, 2]
    assert len(ramped) == len(ids)
    assert list(itertools.chain(*ids)) == [index for batch in plain for index in batch.sample_ids]


@pytest.mark.parametrize("dataset", [Numbers(), Stream()], ids=["index", "stream"])
def test_a_ramp_resumes_in_the_middle(dataset: object) -> None:
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
def test_a_stream_is_ramped_like_a_data_set(drop_last: bool) -> None:
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


def test_unreachable_stages_are_refused() -> None:
    """A stage larger than the data set is refused, and a ramp longer than the first epoch of a stream."""
    with raises(BatchSizeError, "stage_never_begins"):
        ab.batches(Numbers(), effective_batch_size=BatchRamp((4, 10), (64, None)))
    short = ab.batches(Stream(30), effective_batch_size=RAMP, epochs=2, shuffle=False)
    with raises(DataError, "stage_never_begins"):
        list(short)
    with pytest.raises(TypeError):
        _ = ab.batches(Numbers(), effective_batch_size=RAMP).steps_per_epoch
