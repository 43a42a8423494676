"""Measurements of ranks: steps without reduction, the buckets to try, and every kind of step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.data.batches import Batches
from anybatch.diagnostics.repeated_steps import without_reduction
from anybatch.diagnostics.scale import measure_scaling, scale_on_ranks
from anybatch.diagnostics.scaling_ranks import (
    DEFAULT_BUCKET_SIZES,
    RankMeasurement,
    RankTimes,
    RunSettings,
    bucket_cuts,
)
from anybatch.diagnostics.step_times import PhaseClock
from anybatch.engine.arguments import TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import UserError
from anybatch.parallel.gradient_buckets import bucket_members, gradient_bytes
from anybatch.parallel.world import World
from anybatch.records import PhaseRecord
from tests.raising import raises
from tests.ranks_fixture import Ranks

NUM_SAMPLES, MICRO_BATCH_SIZE = 14, 3
RATE = 0.1


def model() -> nn.Sequential:
    """Return two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def samples() -> torch.Tensor:
    """Return all samples."""
    return torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train() -> TrainSpec:
    """Return the spec of the training."""
    return TrainSpec(
        model=model(),
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=RATE),
        loss=ab.mean_over_samples(lambda layers, batch: layers(batch).square().mean()),
        measure_gradient_norm=False,
    )


def batches(num_workers: int, *, steps: int) -> Batches:
    """Return batches of all samples, in order."""
    data: Any = list(samples())
    return ab.batches(data, effective_batch_size=NUM_SAMPLES, steps=steps, shuffle=False, num_workers=num_workers)


def data(*, steps: int) -> Any:
    """Return batches by number of workers."""
    return partial(batches, steps=steps)


def measured(**changed: Any) -> list[RankTimes]:
    """Run short measurements on every rank; return the results of all of them."""
    settings = RunSettings(micro_batch_size=MICRO_BATCH_SIZE, bucket_bytes=1)
    options = {"settings": settings, "bucket_sizes": None, "max_seconds": 0.01, "on_progress": None} | changed
    with World.from_environment(device="cpu") as world:
        found: list[RankTimes] = world.gather_objects(RankMeasurement(world, train, data, **options).times())
    return found


def note_in(file: Path, words: str) -> None:
    """Append a line, from any process."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{words}\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_without_reduction_is_a_ranks_own_share(rank: int) -> None:
    """Without reduction, a rank updates with its own samples' gradient, divided by the full batch's count."""
    spec = train()
    hardware = without_reduction(MICRO_BATCH_SIZE, World(rank, 2))
    with Engine.from_spec(spec, hardware) as engine:
        engine.step(next(iter(batches(0, steps=1))))

    plain = model()
    own = samples()[: NUM_SAMPLES // 2] if rank == 0 else samples()[NUM_SAMPLES // 2 :]
    (plain(own).square().sum() / NUM_SAMPLES).backward()
    assert isinstance(spec.model, torch.nn.Module)
    for trained, parameter in zip(spec.model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(trained, parameter - RATE * parameter.grad, rtol=1e-12, atol=1e-15)


def test_kinds_of_step(two_ranks: Ranks, tmp_path: Path) -> None:
    """Both ranks return the same kinds of steps, equally often, with their messages and samples.

    One rank prints each part before it starts.
    """
    told = tmp_path / "words"
    asked = partial(measured, bucket_sizes=(1, 100, 10**6), on_progress=partial(note_in, told))
    found: list[RankTimes] = two_ranks.run(asked)[0]

    first, second = found
    kinds = {"current": 4, "unreduced": 0, "buckets 1": 3, "buckets 2": 1}
    assert {kind: first.steps[kind][0].num_messages for kind in kinds} == kinds
    shares = {kind: first.steps[kind][0].num_samples for kind in ("current", "unreduced", "alone")}
    assert shares == {"current": 7, "unreduced": 7, "alone": NUM_SAMPLES}
    assert [cut.num_buckets for cut in first.cuts] == [4, 3, 1]
    assert set(first.steps) - set(second.steps) == {"alone"}
    assert len({len(steps) for steps in first.steps.values()}) == 1
    assert first.gradient_bytes == 8 * (5 * 16 + 16 + 16 + 1) == first.steps["current"][0].message_bytes
    assert [num_bytes for num_bytes, _ in first.messages] == [4, 224, 904]
    assert first.loading
    assert first.loading_alone
    assert not second.loading_alone
    assert told.read_text(encoding="utf-8").startswith("2 ranks: loading the samples of a rank")


def test_reports_are_the_same_on_all_ranks(two_ranks: Ranks) -> None:
    """A report measured on ranks is the same on all of them."""
    reports = two_ranks.run(partial(scale_on_ranks, train, data, num_cores=8, max_seconds=0.01, device="cpu"))

    assert str(reports[0]) == str(reports[1])
    assert reports[0].measured.num_samples == NUM_SAMPLES


def test_parts_of_a_step_by_a_clock() -> None:
    """The clock assigns time to the right phase, and counts clipping as part of the update."""
    now = [0.0]
    clock = PhaseClock(torch.device("cpu"), waits=False, clock=lambda: now[0])

    def step() -> None:
        for name in ("load", "clip", "update"):
            for event in ("begin", "end"):
                clock.observe(PhaseRecord(rank=0, event=event, step=0, name=name, position=None))
                now[0] += 3.0 if event == "begin" else 0.0

    found = clock.timed(step)
    assert (found.load, found.update, found.whole) == (3.0, 6.0, 9.0)


def test_invalid_numbers() -> None:
    """Raise for fewer than 1 rank and fewer than 0 workers."""
    with raises(UserError, "not_a_whole_number"):
        RunSettings(num_workers=-1)
    with raises(UserError, "not_a_whole_number"):
        measure_scaling(train, data, num_ranks=0)


PARAMETERS = [nn.Parameter(torch.zeros(size // 4)) for size in (8, 400, 40, 4, 4000, 100, 12)]


def test_sizes_that_make_the_same_buckets_are_one_trial() -> None:
    """For a small model all default sizes give one bucket; model-specific sizes and the size in use are added.

    Only requested sizes and the one in use are tried, if there are any, without sizes below the strategy's minimum.
    """
    cuts = bucket_cuts(PARAMETERS, None, current=1)

    total = gradient_bytes(PARAMETERS)
    assert [cut.num_buckets for cut in cuts] == sorted((cut.num_buckets for cut in cuts), reverse=True)
    assert (cuts[0].num_buckets, cuts[0].sizes) == (len(PARAMETERS), (1,))
    assert cuts[-1].num_buckets == 1
    assert set(DEFAULT_BUCKET_SIZES) <= set(cuts[-1].sizes)
    assert total in cuts[-1].sizes
    assert len({tuple(bucket_members(PARAMETERS, cut.sizes[0])) for cut in cuts}) == len(cuts)
    assert {size for cut in bucket_cuts(PARAMETERS, [50, 200], current=7) for size in cut.sizes} == {7, 50, 200}
    assert {size for cut in bucket_cuts(PARAMETERS, [50, 200], current=7, minimum=60) for size in cut.sizes} == {7, 200}
