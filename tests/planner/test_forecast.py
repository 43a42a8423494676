"""Scaling forecasts match plain computations: overlap, stragglers and the largest useful number of ranks."""

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.cli.command import plain
from anybatch.core.collectives import Link, ring_all_gather, ring_all_reduce
from anybatch.core.geometry import SecondsFit
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import PlanError, UserError
from anybatch.parallel.control import ControlGroup, Message
from anybatch.planner.forecast import (
    GLOO_THREADS,
    _sharded_micro_batch,
    all_reduce_seconds,
    control_bytes,
    expected_maximum,
    forecast,
    time_one_rank,
)
from anybatch.planner.forecast_report import (
    USEFUL_GAIN,
    Algorithm,
    Cluster,
    StrategyName,
    Workload,
    draw_forecast,
)
from tests.ranks_fixture import Ranks

FREE = Link(0.0, math.inf)
WORKLOAD = Workload(
    micro_batch=SecondsFit(0.01, 0.001), micro_batch_size=32, gradient_bytes=100_000_000, accumulation_steps=1
)
FAST = Cluster(link=Link(5e-6, 50e9), control_link=FREE)
SLOW = Cluster(link=Link(1e-3, 125e6), control_link=FREE, algorithm="ring")


def test_a_step_by_hand() -> None:
    """With two buckets on two ranks, the first is reduced during the second half of the backward.

    Forward 14 ms, backward 28 ms; a bucket of 50 MB takes 402 ms around a ring of two over 1 Gbit/s and 1 ms.
    """
    workload = dataclasses.replace(WORKLOAD, bucket_bytes=50_000_000, update_seconds=0.005)
    row = forecast(workload, SLOW, world_size=2).rows[-1]

    assert row.compute_seconds == pytest.approx(0.042)
    assert row.step_seconds == pytest.approx(0.014 + 0.014 + 2 * 0.402 + 0.005)
    assert row.exposed_seconds == pytest.approx(2 * 0.402 - 0.014)
    assert row.num_samples == 64
    assert row.efficiency == pytest.approx((64 / row.step_seconds) / (2 * 32 / 0.047))


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp", "zero1", "fsdp"])
@settings(max_examples=30)
@given(
    latency=st.floats(0.0, 0.01),
    rate=st.floats(1e6, 1e12),
    steps=st.integers(1, 8),
    strong=st.booleans(),
    variation=st.floats(0.0, 0.1),
)
def test_parts_add_up(
    *, strategy: StrategyName, latency: float, rate: float, steps: int, strong: bool, variation: float
) -> None:
    """The parts of each row add up to its step time, none is negative, and no step is faster than its compute."""
    workload = dataclasses.replace(
        WORKLOAD,
        accumulation_steps=steps,
        effective_batch_size=500 if strong else None,
        variation=variation,
        update_seconds=0.002,
        counts_need_data=True,
    )
    for row in forecast(workload, Cluster(link=Link(latency, rate)), world_size=600, strategy=strategy).rows:
        parts = (
            row.compute_seconds,
            row.straggler_seconds,
            row.exposed_seconds,
            row.control_seconds,
            row.update_seconds,
        )
        assert sum(parts) == pytest.approx(row.step_seconds)
        assert min(parts) >= -1e-9 * row.step_seconds
        assert row.samples_per_second == pytest.approx(row.num_samples / row.step_seconds)
        assert row.num_samples == (500 if strong else row.world_size * steps * 32)
        # fsdp on many ranks shards the update; nothing else scales better than linearly.
        assert row.efficiency <= 1.0 + 0.002 / row.compute_seconds + 1e-9 or strong


@pytest.mark.parametrize("strategy", ["all_reduce", "zero1", "fsdp"])
def test_a_free_network_scales_perfectly(strategy: StrategyName) -> None:
    """Without latency, with unlimited bandwidth and equally fast ranks, efficiency is 1."""
    free = Cluster(link=FREE, control_link=FREE)
    report = forecast(WORKLOAD, free, world_size=1000, strategy=strategy)

    assert [row.world_size for row in report.rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert all(row.efficiency == pytest.approx(1.0) for row in report.rows)
    assert report.largest_useful is None


def end_by_events(workload: Workload, cluster: Cluster, num_ranks: int, at_once: int) -> float:
    """Return when the last reduction of one micro-batch ends, bucket after bucket."""
    computed = workload.micro_batch.seconds(workload.micro_batch_size)
    backward, done, free, wire_free, end = workload.backward_share * computed, 0, [0.0] * at_once, 0.0, 0.0
    for num_bytes in workload.buckets:
        done += num_bytes
        alone = all_reduce_seconds(cluster, num_bytes, num_ranks)
        wire = 2 * (num_ranks - 1) / num_ranks * num_bytes / cluster.link.bytes_per_second if at_once > 1 else alone
        thread = min(range(at_once), key=free.__getitem__)
        begin = max(computed - backward + backward * done / workload.gradient_bytes, free[thread])
        wire_free = max(wire_free, begin) + wire
        free[thread] = max(begin + alone, wire_free)
        end = max(end, free[thread])
    return max(computed, end)


@given(
    num_bytes=st.integers(1, 400_000_000),
    bucket=st.sampled_from([2**20, 25 * 2**20]),
    latency=st.floats(0.0, 0.01),
    rate=st.floats(1e7, 1e11),
    num_ranks=st.integers(2, 100),
    algorithm=st.sampled_from(["ring", "tree", "best", "gloo"]),
)
def test_overlap(
    *, num_bytes: int, bucket: int, latency: float, rate: float, num_ranks: int, algorithm: Algorithm
) -> None:
    """The overlap formula matches a simulation by bucket exactly; within 10% for gloo, which runs two in parallel."""
    workload = dataclasses.replace(WORKLOAD, gradient_bytes=num_bytes, bucket_bytes=bucket)
    cluster = Cluster(link=Link(latency, rate), control_link=FREE, algorithm=algorithm)
    row = forecast(workload, cluster, world_size=num_ranks).rows[-1]
    at_once = GLOO_THREADS if algorithm == "gloo" else 1
    expected = end_by_events(workload, cluster, num_ranks, at_once)

    assert row.step_seconds == pytest.approx(expected, rel=0.1 if at_once > 1 else 1e-9)


def test_sharded_blocks_by_hand() -> None:
    """Short gathers are hidden except the first of each pass; long gathers or scatters set the pace.

    In the last case, scatters of 3 s keep the link busy from 6 s on, and each gather waits for one, even with 0 bytes.
    """
    hidden, end = _sharded_micro_batch(4.0, 8.0, [0.5] * 4, [])
    assert (hidden, end) == (0.5 + 4.0 + 0.5 + 8.0, 13.0)
    paced, end = _sharded_micro_batch(4.0, 8.0, [10.0] * 4, [])
    assert (paced, end) == (4 * 10.0 + 1.0 + 4 * 10.0 + 2.0, 83.0)
    computed, end = _sharded_micro_batch(4.0, 8.0, [0.0] * 4, [3.0] * 4)
    assert (computed, end) == (14.0, 6.0 + 4 * 3.0)


@pytest.mark.parametrize("num_ranks", [1, 8, 512])
def test_the_slowest_of_many(num_ranks: int) -> None:
    """Blom's approximation matches the mean of drawn maxima, within the error of drawing."""
    draw = random.Random(0)
    maxima = [max(draw.gauss() for _ in range(num_ranks)) for _ in range(30_000 // num_ranks)]
    error = 4 * statistics.stdev(maxima) / len(maxima) ** 0.5 if num_ranks > 1 else 0.01

    assert expected_maximum(num_ranks) == pytest.approx(statistics.fmean(maxima), abs=error + 0.03)


def test_the_largest_useful_world() -> None:
    """64 samples can use at most 64 ranks, and a slow network fewer; the report gives the reason."""
    few = dataclasses.replace(
        WORKLOAD, effective_batch_size=64, accumulation_steps=None, micro_batch=SecondsFit(0.0, 1.0)
    )
    report = forecast(few, FAST, world_size=128)
    slow = forecast(dataclasses.replace(WORKLOAD, effective_batch_size=4096), SLOW, world_size=128)

    assert report.largest_useful == 64
    assert report.why
    assert slow.largest_useful is not None
    rates = {row.world_size: row.samples_per_second for row in slow.rows}
    gains = {size: rates[2 * size] / rates[size] for size in rates if 2 * size in rates}
    assert slow.largest_useful == min(size for size, gain in gains.items() if gain < USEFUL_GAIN)


def test_the_control_plane_is_in_the_step() -> None:
    """Control messages add one latency per round: 11 for the end of a step on 1,024 ranks, 11 for counts."""
    cluster = Cluster(link=Link(0.0, 50e9), control_link=Link(30e-6, 1e12))
    rows = [
        forecast(
            dataclasses.replace(WORKLOAD, counts_need_data=needs, gradient_bytes=4), cluster, world_size=1024
        ).rows[-1]
        for needs in (False, True)  # gradients that hide nothing
    ]

    assert rows[0].control_seconds == pytest.approx(11 * 30e-6, rel=0.02)
    assert rows[1].control_seconds == pytest.approx(22 * 30e-6, rel=0.02)


@pytest.mark.parametrize("size", [1, 2, 32])
def test_the_parts_of_one_rank(size: int) -> None:
    """Three timed steps give the fixed time, the time per sample and the time of the update.

    One sample cannot be halved, so all its time is fixed. Occasional forwards that take three seconds more change
    nothing; times that fall with the number of samples raise.
    """
    model, now, forwards = nn.Linear(3, 2), [0.0], [0]
    fixed, each, update = 0.01, 0.002, 0.03

    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            now[0] += update
            return super().step(closure)

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        forwards[0] += 1
        now[0] += fixed + each * len(batch) + 3.0 * (forwards[0] % 17 == 0)
        found: torch.Tensor = module(batch).square().mean()
        return found

    def job(num_samples: int) -> Any:
        train = TrainSpec(model=model, optimizer=SGD(model.parameters(), lr=0.1), loss=ab.mean_over_samples(loss))
        return train, lambda _workers: ab.batches(torch.randn(num_samples, 3), effective_batch_size=num_samples)

    found = time_one_rank(job, size, clock=lambda: now[0])

    assert found.update_seconds == pytest.approx(update)
    assert found.micro_batch.seconds(size) == pytest.approx(fixed + each * size)
    assert found.micro_batch.sample_seconds == pytest.approx(each if size > 1 else 0.0)
    assert (found.gradient_bytes, found.num_parameters) == (4 * (3 * 2 + 2), 2)
    fixed, each, update = 0.0, -0.01, 1.0
    with pytest.raises(PlanError):
        time_one_rank(job, size, clock=lambda: now[0])


class Timed:
    """A job whose forwards and updates move a clock, with random delays up to `delay` seconds of each forward."""

    def __init__(self, delay: float, *, seed: int = 0) -> None:
        self.now, self.delay, self.draw = 0.0, delay, random.Random(seed)
        self.model = nn.Linear(3, 2)

    def workload(self, **options: Any) -> Workload:
        """Return the workload: 10 ms and 2 ms for each sample, and 3 ms for the update."""
        return time_one_rank(self._job, 32, clock=lambda: self.now, **{"queued": lambda: 0.0} | options)

    def _loss(self, module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.now += 0.01 + 0.002 * len(batch) + self.delay * self.draw.random() ** 3
        found: torch.Tensor = module(batch).square().mean()
        return found

    def _job(self, num_samples: int) -> Any:
        timed = self

        class SGD(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                timed.now += 0.003
                return super().step(closure)

        optimizer = SGD(self.model.parameters(), lr=0.1)
        train = TrainSpec(model=self.model, optimizer=optimizer, loss=ab.mean_over_samples(self._loss))
        return train, lambda _workers: ab.batches(torch.randn(num_samples, 3), effective_batch_size=num_samples)


STRONG: dict[str, Any] = {"effective_batch_size": 4096, "accumulation_steps": None, "gradient_bytes": 10**6}
NEAR = Cluster(link=Link(20e-6, 10e9))


def test_noise_above_the_effect_gives_no_largest_world() -> None:
    """A quiet measurement has one largest world; noise widens its interval; above a factor of four it is not reported.

    Ten disturbed measurements either raise, or report no world, or have the quiet answer in their interval.
    """
    quiet = forecast(dataclasses.replace(Timed(0.0).workload(), **STRONG), NEAR)
    assert not quiet.doubt
    assert quiet.largest_interval == (quiet.largest_useful,) * 2
    refused = 0
    for seed in range(10):
        try:
            work = Timed(3.0, seed=seed).workload()
        except PlanError:
            refused += 1
            continue
        assert work.update_interval is not None
        assert work.update_interval[0] <= 0.003 <= work.update_interval[1]
        noisy = forecast(dataclasses.replace(work, **STRONG), NEAR)
        low, high = (end or math.inf for end in noisy.largest_interval)
        assert noisy.doubt or low <= (quiet.largest_useful or math.inf) <= high
        refused += bool(noisy.doubt)
    assert refused >= 5


def test_other_programs_on_the_cores_give_no_largest_world() -> None:
    """If the measured steps waited for a core, the report draws no conclusion, and says why."""
    job = Timed(0.0)
    report = forecast(job.workload(queued=lambda: job.now / 3), NEAR)
    assert report.workload.queued_share == pytest.approx(1 / 3, rel=0.1)
    assert report.doubt
    assert report.doubt in str(report)


def control_bytes_of_a_step(counts_need_data: bool) -> tuple[list[int], int]:
    """Run on every rank: return the bytes of each control message in the third step, and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(module(batch["x"]), batch["y"])

    declared = ab.mean_over(loss, lambda batch: len(batch["x"])) if counts_need_data else ab.mean_over_samples(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [{"x": torch.randn(3), "y": torch.tensor(number % 2)} for number in range(12)]
    sent: list[int] = []
    last: list[int] = []
    plain = ControlGroup.start

    def start(group: ControlGroup, mine: bytes) -> Message:
        sent.append(len(mine))
        return plain(group, mine)

    ControlGroup.start = start  # type: ignore[method-assign, assignment]
    try:
        with ab.Engine(
            model, optimizer, declared, micro_batch_size=2, strategy="all_reduce", check_loss=False
        ) as engine:
            for batch in ab.batches(data, effective_batch_size=4, steps=3):
                sent.clear()
                engine.step(batch)
                last = list(sent)
    finally:
        ControlGroup.start = plain  # type: ignore[method-assign]
    return last, len(list(model.parameters()))


@pytest.mark.parametrize("counts_need_data", [False, True])
def test_message_sizes_match_the_forecast(counts_need_data: bool, two_ranks: Ranks) -> None:
    """The number of bytes in each control message of a step matches the forecast."""
    for sent, num_parameters in two_ranks.run(control_bytes_of_a_step, counts_need_data):
        forecast_bytes = control_bytes(num_parameters, counts_need_data=counts_need_data)
        assert sent == [size for size in forecast_bytes if size]


def test_forecasts_depend_on_the_strategy() -> None:
    """zero1 shards the update and gathers weights after it; fsdp gathers in every micro-batch."""
    workload = dataclasses.replace(WORKLOAD, update_seconds=0.064, accumulation_steps=4)
    rows = {
        name: forecast(workload, SLOW, world_size=64, strategy=name).rows[-1]
        for name in ("all_reduce", "zero1", "fsdp")
    }
    gather = ring_all_gather(100_000_000, 64, SLOW.link)
    each = forecast(workload, SLOW, world_size=64, strategy="fsdp", reduction="every_micro_batch").rows[-1]

    assert rows["zero1"].exposed_seconds == pytest.approx(rows["all_reduce"].exposed_seconds + gather)
    assert rows["zero1"].update_seconds == pytest.approx(0.001)
    assert rows["fsdp"].step_seconds > 8 * gather
    assert each.step_seconds > rows["fsdp"].step_seconds + 3 * gather


def test_unmeasured_assumptions_are_listed() -> None:
    """A forecast lists which of its assumptions were never measured: none for gloo's ring on three replicas."""
    gloo = Cluster(link=SLOW.link, algorithm="gloo")
    assert forecast(WORKLOAD, gloo, world_size=3).unvalidated == ()
    assert forecast(WORKLOAD, gloo, world_size=4).unvalidated == ("more than 3 ranks",)
    sharded = forecast(WORKLOAD, FAST, world_size=8, strategy="fsdp")
    assert len(sharded.unvalidated) == 3
    assert all(one in str(sharded) for one in sharded.unvalidated)


@pytest.mark.slow
def test_report(tmp_path: Path) -> None:
    """The report shows each size and the largest useful one, and can be written as JSON and as a picture."""
    report = forecast(dataclasses.replace(WORKLOAD, effective_batch_size=4096, variation=0.02), FAST, world_size=1024)
    text = str(report)
    picture = tmp_path / "forecast.svg"
    draw_forecast(report, picture)

    assert all(f"{row.world_size:,}" in text for row in report.rows)
    assert f"{report.largest_useful:,}" in text
    assert json.loads(json.dumps(plain(report)))["rows"][-1]["world_size"] == 1024
    assert "samples per second" in (drawn := picture.read_text())
    assert "mathdefault" not in drawn  # labels are numbers, not formulas


@pytest.mark.parametrize(
    "make",
    [
        lambda: dataclasses.replace(WORKLOAD, micro_batch_size=0),
        lambda: dataclasses.replace(WORKLOAD, variation=-1.0),
        lambda: dataclasses.replace(WORKLOAD, backward_share=1.5),
        lambda: dataclasses.replace(WORKLOAD, micro_batch=SecondsFit(0.0, 0.0)),
        lambda: Cluster(link=FREE, devices_per_host=8),
        lambda: Cluster(link=FREE, inner_link=FREE, devices_per_host=8, algorithm="gloo"),
        lambda: forecast(WORKLOAD, FAST, strategy="horovod"),  # type: ignore[arg-type]
        lambda: forecast(WORKLOAD, FAST, world_size=1),
    ],
)
def test_refused(make: Callable[[], object]) -> None:
    """Values out of range, devices on a host without an inner link or with gloo, and unknown strategies raise."""
    with pytest.raises(UserError):
        make()


def test_hosts_share_their_link() -> None:
    """Eight devices of one host reduce within it; two such hosts use the link between them."""
    cluster = Cluster(link=SLOW.link, inner_link=Link(0.0, 1e12), devices_per_host=8, algorithm="ring")
    assert all_reduce_seconds(cluster, 1e8, 8) == pytest.approx(ring_all_reduce(1e8, 8, Link(0.0, 1e12)))
    assert all_reduce_seconds(cluster, 1e8, 16) > ring_all_reduce(1e8, 2, SLOW.link)
