"""Predict step time, efficiency and the largest useful number of ranks, from the times of one rank and a network."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist, median
from typing import get_args

import torch

from anybatch.core.batch import EffectiveBatch
from anybatch.core.collectives import (
    Link,
    best_all_reduce,
    bruck_all_gather,
    gloo_all_reduce,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from anybatch.core.geometry import SecondsFit, ceil_div, checked_int
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.diagnostics.step_times import Estimate, estimate, queued_seconds, time_after_work
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import BatchSizeError, PlanError, UserError
from anybatch.parallel.call_tracker import NUM_DIGESTS
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.world import World
from anybatch.planner.forecast_report import (
    USEFUL_GAIN,
    Cluster,
    ForecastReport,
    ForecastRow,
    FsdpReduction,
    StrategyName,
    Workload,
)

MAX_WORLD_SIZE = 16_384
"""Upper limit of the search for the largest useful number of ranks."""
GLOO_THREADS = 2
"""Collectives that torch's gloo backend runs concurrently (`options.threads` of ProcessGroupGloo)."""
MEASURED_RANKS = 3
"""Maximum ranks in the comparison of forecasts with measurements (benchmarks/forecast_error.py)."""
_OVER_HOSTS = {"best": best_all_reduce, "ring": ring_all_reduce, "tree": tree_all_reduce, "gloo": gloo_all_reduce}
_NUMBER_BYTES = 8
_COUNT_NUMBERS = 4  # of each rank: whether it has failed, its count, whether it has samples, and a request


def control_bytes(num_parameters: int, *, counts_need_data: bool) -> tuple[int, int]:
    """Return the bytes that a rank sends before a step and at its end, from the second step on; 0: no message.

    `World.gather_from` gathers counts of tokens; `parallel/agreement.py` a loss, a flag per parameter, and digests.
    """
    counts = _NUMBER_BYTES * _COUNT_NUMBERS if counts_need_data else 0
    return counts, 2 + num_parameters + _NUMBER_BYTES * (1 + NUM_DIGESTS)


def control_seconds(num_bytes: int, num_ranks: int, link: Link) -> float:
    """Return the seconds of a gather of `num_bytes` from each rank."""
    return bruck_all_gather(num_bytes * num_ranks, num_ranks, link) if num_bytes else 0.0


def forecast(
    workload: Workload,
    cluster: Cluster,
    *,
    world_size: int = 1024,
    strategy: StrategyName = "all_reduce",
    reduction: FsdpReduction = "last_micro_batch",
) -> ForecastReport:
    """Predict steps on 1, 2, 4, ... up to `world_size` ranks.

    A step consists of: exchanging counts if they need the data; forwards and backwards of the slowest rank, with
    buckets reduced as its last backward completes them; the control plane, where ranks agree that none has failed; the
    update. Each row splits a step into computing, and waiting for the slowest rank, the network and the control plane.

    Args:
        workload: sizes of the model and batch, and the times of one rank.
        cluster: the network.
        world_size: maximum number of ranks to show.
        strategy: how ranks sum gradients; `ddp` is assumed to send the same messages as `all_reduce`.
        reduction: when `fsdp` reduces gradients.

    Raises:
        UserError: the number of ranks or the strategy is invalid.
    """
    checked_int("world_size", world_size, minimum=2)
    if strategy not in get_args(StrategyName):
        message = f"{strategy=} cannot be forecast: it must be 'all_reduce', 'ddp', 'zero1' or 'fsdp'."
        raise UserError(message)

    def row(num_ranks: int, work: Workload = workload) -> ForecastRow:
        return _row(work, cluster, num_ranks, strategy, reduction)

    sizes = [2**power for power in range(MAX_WORLD_SIZE.bit_length())]
    rows = [row(size) for size in sizes]
    largest, why = largest_useful(rows, workload)
    worlds = (largest_useful([row(size, work) for size in sizes], work)[0] for work in workload.extremes())
    smallest, *_, greatest = sorted(worlds, key=lambda world: world or math.inf)
    alone = rows[0].samples_per_second
    shown = [each for each in rows if each.world_size < world_size] + [row(world_size)]
    return ForecastReport(
        workload=workload,
        cluster=cluster,
        strategy=strategy,
        reduction=reduction if strategy == "fsdp" else None,
        rows=tuple(
            dataclasses.replace(each, efficiency=each.samples_per_second / (each.world_size * alone)) for each in shown
        ),
        largest_useful=largest,
        why=why,
        largest_interval=(smallest, greatest),
        unvalidated=_unvalidated(cluster, strategy, world_size),
    )


def largest_useful(rows: Sequence[ForecastRow], workload: Workload) -> tuple[int | None, str]:
    """Return the largest number of ranks up to which each doubling is useful, and the reason for the limit.

    A doubling is useful if it gives `USEFUL_GAIN` times the samples per second. None if all rows are useful.
    """
    for fewer, more in itertools.pairwise(rows):
        gain = more.samples_per_second / fewer.samples_per_second
        if gain >= USEFUL_GAIN:
            continue
        gained = f"{more.world_size:,} ranks make {gain:.2f} times the samples/s of {fewer.world_size:,}"
        if more.world_size > more.num_samples:
            return fewer.world_size, f"{gained}: a step has {workload.effective_batch_size:,} samples, fewer than ranks"
        waits = {
            "gradients and weights that wait for the network": more.exposed_seconds,
            "the control plane": more.control_seconds,
            "waiting for the slowest rank": more.straggler_seconds,
            "fixed time of micro-batches and the update, which more ranks do not shorten": more.update_seconds
            + workload.micro_batch.fixed_seconds * more.accumulation_steps,
        }
        name = max(waits, key=lambda part: waits[part])
        return fewer.world_size, f"{gained}: {waits[name] / more.step_seconds:.0%} of a step is {name}"
    return None, f"up to {rows[-1].world_size:,} ranks each doubling brings at least {USEFUL_GAIN} times the samples/s"


def _row(
    workload: Workload, cluster: Cluster, num_ranks: int, strategy: StrategyName, reduction: FsdpReduction
) -> ForecastRow:
    """Return the forecast for one number of ranks; efficiency is filled in later."""
    micro_batches = workload.micro_batch_seconds(num_ranks)
    computing = sum(micro_batches)
    late = computing * workload.variation * expected_maximum(num_ranks)
    # Reductions start when the slowest rank is ready; all of its micro-batches are slow.
    slowed = [seconds * (1.0 + late / computing) for seconds in micro_batches]
    if num_ranks == 1:
        computed = reduced = sum(slowed)
    elif strategy == "fsdp":
        computed, reduced = _sharded(workload, cluster, num_ranks, slowed, reduction)
    else:
        computed, reduced = _replicated(workload, cluster, num_ranks, slowed)
    gathered = _gather(cluster, workload.gradient_bytes, num_ranks) if strategy == "zero1" else 0.0
    update = workload.update_seconds / (num_ranks if strategy in ("zero1", "fsdp") else 1)
    count_bytes, agreement_bytes = control_bytes(workload.num_parameters, counts_need_data=workload.counts_need_data)
    counting = control_seconds(count_bytes, num_ranks, cluster.control)
    # The agreement starts after the last backward, in parallel with the last buckets.
    end = max(reduced, computed + control_seconds(agreement_bytes, num_ranks, cluster.control))
    step = counting + end + update + gathered
    _, steps, size = workload.share(num_ranks)
    return ForecastRow(
        world_size=num_ranks,
        num_samples=workload.samples(num_ranks),
        micro_batch_size=size,
        accumulation_steps=steps,
        step_seconds=step,
        samples_per_second=workload.samples(num_ranks) / step,
        efficiency=1.0,
        compute_seconds=computing,
        straggler_seconds=late,
        exposed_seconds=reduced - computing - late + gathered,
        control_seconds=counting + end - reduced,
        update_seconds=update,
    )


def _replicated(
    workload: Workload, cluster: Cluster, num_ranks: int, micro_batches: Sequence[float]
) -> tuple[float, float]:
    """Return the end times of the last backward and the last reduction, for replicas that reduce buckets during it.

    Buckets are completed evenly and reduced in order: without a pause if the network is slower than the backward, else
    only the last one is exposed, or two if the last is smaller.
    """
    num_full, rest = divmod(workload.gradient_bytes, workload.bucket_bytes)
    computed, backward = sum(micro_batches), workload.backward_share * micro_batches[-1]
    full_ready = backward * min(1.0, workload.bucket_bytes / workload.gradient_bytes)
    full = all_reduce_seconds(cluster, workload.bucket_bytes, num_ranks)
    last = all_reduce_seconds(cluster, rest, num_ranks) if rest else 0.0
    total = num_full * full + last
    if cluster.algorithm == "gloo":  # two concurrent collectives share the bandwidth
        wire = 2 * (num_ranks - 1) / num_ranks * workload.gradient_bytes / cluster.link.bytes_per_second
        total = max(wire, ceil_div(num_full, GLOO_THREADS) * full, num_full // GLOO_THREADS * full + last)
    ends = [full_ready + total, backward + (last if rest else full)]
    if num_full and rest:
        ends.append(num_full * full_ready + (max(full, last) if cluster.algorithm == "gloo" else full + last))
    return computed, max(computed, computed - backward + max(ends))


def _sharded(
    workload: Workload, cluster: Cluster, num_ranks: int, micro_batches: Sequence[float], reduction: FsdpReduction
) -> tuple[float, float]:
    """Return the ends of the last backward and the last reduction of ranks that gather weights in each micro-batch."""
    gathers = [_gather(cluster, size, num_ranks) for size in workload.buckets]
    now = computed = 0.0
    for number, seconds in enumerate(micro_batches):
        reduces = reduction == "every_micro_batch" or number == len(micro_batches) - 1
        backward = workload.backward_share * seconds
        times = _sharded_micro_batch(seconds - backward, backward, gathers, gathers[::-1] if reduces else ())
        computed, now = now + times[0], now + times[1]
    return computed, now


def _sharded_micro_batch(
    forward: float, backward: float, gathers: Sequence[float], scatters: Sequence[float]
) -> tuple[float, float]:
    """Return the end of a micro-batch's computation under FSDP2, and of its last reduce-scatter.

    All blocks take the same time. The next block's weights are gathered during one, and gradients scattered after it.
    """
    num_blocks = len(gathers)
    link = computed = 0.0
    for seconds, order, sends in ((forward, gathers, ()), (backward, gathers[::-1], scatters)):
        link = max(link, computed) + order[0]
        here = link
        for block in range(num_blocks):
            begin = max(computed, here)
            if block + 1 < num_blocks:
                link = max(link, begin) + order[block + 1]
                here = link
            computed = begin + seconds / num_blocks
            if sends:
                link = max(link, computed) + sends[block]
    return computed, max(link, computed)


def expected_maximum(num_ranks: int) -> float:
    """Return the expected maximum of `num_ranks` draws of a standard normal distribution (Blom 1958), within 0.03."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def all_reduce_seconds(cluster: Cluster, num_bytes: float, num_ranks: int) -> float:
    """Return the seconds of an all-reduce, hierarchical if hosts have several devices."""
    over_hosts = _OVER_HOSTS[cluster.algorithm]
    if cluster.inner_link is None:
        return over_hosts(num_bytes, num_ranks, cluster.link)
    return hierarchical_all_reduce(
        num_bytes,
        num_ranks,
        cluster.devices_per_host,
        inner=cluster.inner_link,
        outer=cluster.link,
        over_hosts=over_hosts,
    )


def _gather(cluster: Cluster, num_bytes: float, num_ranks: int) -> float:
    """Return the seconds of an all-gather, the same as of a reduce-scatter."""
    inner = cluster.inner_link or cluster.link
    devices = 1 if cluster.inner_link is None else cluster.devices_per_host
    return hierarchical_all_gather(num_bytes, num_ranks, devices, inner=inner, outer=cluster.link)


def _unvalidated(cluster: Cluster, strategy: StrategyName, world_size: int) -> tuple[str, ...]:
    """Return the parts of a forecast that were not compared with measurements of anybatch."""
    texts = {
        "best": "a ring or a double binary tree, whichever is faster",
        "ring": "a textbook ring",
        "tree": "a double binary tree",
        "ddp": "ddp, assumed to send the same messages as all_reduce",
        "zero1": "zero1's broadcasts, counted as one all-gather",
        "fsdp": "fsdp: gathers and reduce-scatters of equal blocks around a ring",
    }
    found = ["hosts with several devices"] * (cluster.inner_link is not None)
    found += [f"more than {MEASURED_RANKS} ranks"] * (world_size > MEASURED_RANKS)
    return tuple(text for text in (texts.get(cluster.algorithm), *found, texts.get(strategy)) if text is not None)


SizedJob = Callable[[int], tuple[TrainSpec, Callable[[int], Iterable[EffectiveBatch]]]]
"""Function of an effective batch size that returns a new `TrainSpec` and its data, as for `tune`."""
_MIN_ROUNDS, _MIN_SECONDS, _CLEAR, _MIN_SHARE = 9, 2.0, 0.1, 0.01
"""Minimum rounds and seconds; the width of intervals at which rounds end, of a step; the least end of an interval."""


def time_one_rank(
    job: SizedJob,
    micro_batch_size: int,
    *,
    max_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
    queued: Callable[[], float] = queued_seconds,
    world: World | None = None,
) -> Workload:
    """Time steps with one micro-batch, two, and one of half the size; return a workload of equal ranks.

    With `a + b m` seconds for a micro-batch of m samples, and u for the update and other work once per step:

    ```text
    two of m  - one of m            = a + b m
    one of m  - one of m / 2        = b m / 2
    one of m  - (a + b m)           = u
    ```

    Each difference is the median over rounds that run each step once, so that other load affects all three equally.

    Raises:
        BatchSizeError: a micro-batch does not fit, or the data set is too small.
        PlanError: two micro-batches were not slower than one, so the times are too noisy.
    """
    checked_int("micro_batch_size", micro_batch_size)
    train, data = job(2 * micro_batch_size)
    world = World.from_environment() if world is None else world
    half = max(1, micro_batch_size // 2)
    batch = next(iter(data(0)))
    parts = [BatchSubset(batch, range(few)) for few in (micro_batch_size, half)]
    hardware = Hardware(micro_batch_size=micro_batch_size, world=world)
    waited, begun = queued(), clock()
    with Engine.from_spec(spec_for_repeated_steps(train), hardware) as engine:
        rounds = _rounds(engine, world.device, [CachedBatch(part) for part in (batch, *parts)], max_seconds, clock)
    queued_share = (queued() - waited) / max(clock() - begun, 1e-9)
    micro_batch, update = _differences(rounds)
    whole = micro_batch.value
    if whole <= 0.0:
        message = (
            f"a micro-batch takes between {micro_batch.low:.3g} and {micro_batch.high:.3g} s: the times are too noisy. "
            "Try again on an idle machine, or with larger micro-batches."
        )
        raise PlanError(message)
    slope = 0.0
    if half < micro_batch_size:
        slope = median(one - less for _, one, less in rounds) / (micro_batch_size - half)
    # Noise can make either part negative.
    slope = min(max(slope, 0.0), whole / micro_batch_size)
    modules = [train.model] if isinstance(train.model, torch.nn.Module) else list(train.model.values())
    trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    return Workload(
        micro_batch=SecondsFit(whole - slope * micro_batch_size, slope),
        micro_batch_size=micro_batch_size,
        micro_batch_interval=(max(_MIN_SHARE, micro_batch.low / whole), micro_batch.high / whole),
        update_seconds=max(0.0, update.value),
        update_interval=(max(0.0, update.low), max(0.0, update.high)),
        queued_share=queued_share,
        gradient_bytes=gradient_bytes(trained),
        num_parameters=len(trained),
    )


def _rounds(
    engine: Engine,
    device: torch.device,
    batches: Sequence[EffectiveBatch],
    max_seconds: float,
    clock: Callable[[], float],
) -> list[tuple[float, float, float]]:
    """Return, for each round, the seconds of a step of each of the three batches; two micro-batches come first."""

    def seconds(batch: EffectiveBatch) -> float:
        begun = time_after_work(device, clock)
        if sizes := engine.step(batch).too_large:
            message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {device}: try smaller ones."
            raise BatchSizeError(message, micro_batch_size=sizes[0])
        return time_after_work(device, clock) - begun

    for batch in batches:  # creates the optimizer's state, loads the samples, and warms the caches
        seconds(batch)
    found: list[tuple[float, float, float]] = []
    begun = clock()
    while (passed := clock() - begun) < max_seconds or len(found) < _MIN_ROUNDS:
        if len(found) >= _MIN_ROUNDS and passed >= _MIN_SECONDS:
            micro_batch, update = _differences(found)
            width = max(micro_batch.high - micro_batch.low, update.high - update.low)
            if micro_batch.is_sure and width <= _CLEAR * found[-1][0]:
                break
        two, one, less = (seconds(batch) for batch in batches)
        found.append((two, one, less))
    return found


def _differences(rounds: Sequence[tuple[float, float, float]]) -> tuple[Estimate, Estimate]:
    """Return the seconds of a micro-batch and of the update."""
    return estimate([two - one for two, one, _ in rounds]), estimate([2.0 * one - two for two, one, _ in rounds])
