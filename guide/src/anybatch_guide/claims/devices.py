"""Measurements of claims about several devices: replicas, reductions, samplers."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import anybatch as ab
from anybatch.cli.compare import first_batches
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics import compare
from anybatch.diagnostics.comparison.report import ComparisonReport
from anybatch.planner.forecast.forecast import forecast
from anybatch.recipes.load import MeasuredJob
from anybatch.testing import RankPool
from anybatch_guide.claims.claim import Numbers
from anybatch_guide.claims.measuring import emit_progress, first_batch, flat_gradients, new_model, relative
from anybatch_guide.experiment import Emit
from anybatch_guide.experiments.forecasts import GRADIENT_BYTES, LINKS, cluster, workload
from anybatch_guide.experiments.layer_order import run as steps_in_both_orders
from anybatch_guide.experiments.rank_memory import held
from anybatch_guide.tasks.task import cross_entropy, load

EVEN, UNEVEN = (32, 32), (44, 20)
RANKS, MESSAGE, ROUNDS = 4, 2**21, 9
"""For the cost of a reduction: ranks, float32 numbers of a gradient, and interleaved rounds."""
FIXED = ("weights", "gradients", "optimizer")


def no_average(emit: Emit) -> Numbers:
    """Compare sums and averages of the gradients of two ranks with the gradient of all samples."""
    emit_progress(emit, 0, 2, "equal shares")
    with RankPool(len(EVEN)) as pool:
        even = pool.run(rank_errors, EVEN)[0]
        emit_progress(emit, 1, 2, "unequal shares")
        uneven = pool.run(rank_errors, UNEVEN)[0]
    return {
        "sum_error": even["sum"],
        "average_error": even["ddp"],
        "uneven_average_error": uneven["ddp"],
        "uneven_engine_error": uneven["engine"],
    }


def rank_errors(shares: tuple[int, ...]) -> dict[str, float]:
    """Run on every rank: return the errors of the combined gradients, compared with all samples in one batch."""
    task = load("digits")
    inputs, targets = first_batch(task, sum(shares))
    model = new_model(task)
    cross_entropy(model(inputs), targets).backward()
    expected = flat_gradients(model)
    begin = sum(shares[: dist.get_rank()])
    share = slice(begin, begin + shares[dist.get_rank()])
    summed, averaged, exact = new_model(task), new_model(task), new_model(task)
    cross_entropy(summed(inputs[share]), targets[share]).backward()
    for parameter in summed.parameters():
        dist.all_reduce(parameter.grad)
    wrapper = DistributedDataParallel(averaged)  # if freed before the backward, it would reduce nothing
    cross_entropy(wrapper(inputs[share]), targets[share]).backward()
    with ab.Engine(exact, torch.optim.SGD(exact.parameters()), task.loss, check_loss=False) as engine:
        (batch,) = ab.shares([{"inputs": inputs[share], "targets": targets[share]}], world=engine.world)
        gradients = engine.gradients(batch)
    vector = torch.cat([value.flatten() for value in gradients.values() if value is not None]).double()
    return {
        "sum": relative(flat_gradients(summed), expected),
        "ddp": relative(flat_gradients(averaged), expected),
        "engine": relative(vector, expected),
    }


def sampler_overlap(emit: Emit) -> Numbers:
    """Count the samples that torch's DistributedSampler gives to two ranks in one epoch."""
    emit_progress(emit, 0, 1, "samplers")
    number = len(load("digits").rows)
    return {
        "samples": number,
        **{f"twice_on_{ranks}": given_twice(number, ranks) for ranks in (2, 4, 8)},
        "twice_if_divisible": given_twice(number - number % 8, 8),
    }


def given_twice(num_samples: int, num_ranks: int) -> int:
    """Return the number of samples of an epoch that are used more than once."""
    numbers = TensorDataset(torch.arange(num_samples))
    samplers: list[DistributedSampler[tuple[Tensor, ...]]] = [
        DistributedSampler(numbers, num_replicas=num_ranks, rank=rank, shuffle=True, seed=0)
        for rank in range(num_ranks)
    ]
    given = [index for sampler in samplers for index in sampler]
    return len(given) - len(set(given))


def ddp_memory(emit: Emit) -> Numbers:
    """Compare memory that does not depend on the batch: of one device, and of each of four with DDP and with FSDP."""
    fixed = {}
    for done, (strategy, num_ranks) in enumerate((("single", 1), ("ddp", RANKS), ("fsdp", RANKS))):
        emit_progress(emit, done, 3, strategy)
        with RankPool(num_ranks) as pool:
            ranks = pool.run(held, strategy)
        fixed[strategy] = max(sum(rank["between"][name] for name in FIXED) for rank in ranks)
    return {
        "alone_bytes": fixed["single"],
        "ddp_bytes": fixed["ddp"],
        "ddp_ratio": fixed["ddp"] / fixed["single"],
        "fsdp_ratio": fixed["fsdp"] / fixed["single"],
    }


def data_parallel(emit: Emit) -> Numbers:
    """Compare DataParallel with DDP on two devices: lines, time, memory of the busiest process."""
    emit_progress(emit, 0, 1, "ways, interleaved")
    results = {result.way.name: result for result in compared(256).results}
    threads, ranks = results["DataParallel"], results["DDP"]
    return {
        "lines": threads.way.lines_by_hand,
        "lines_ddp": ranks.way.lines_by_hand,
        "time_ratio": threads.seconds_per_step / ranks.seconds_per_step,
        "memory_ratio": threads.peak_bytes / ranks.peak_bytes,
    }


def all_reduce_saves(emit: Emit) -> Numbers:
    """Time an all-reduce against sums through one rank, and its exposed part in a step."""
    emit_progress(emit, 0, 2, "messages")
    with RankPool(RANKS) as pool:
        times = pool.run(reduction_seconds)[0]
    emit_progress(emit, 1, 2, "steps")
    results = {result.way.name: result for result in compared(64).results}
    return {
        "through_one_ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
        "exposed": 100 * (results["DDP"].exposed_share or 0.0),
        "exposed_accumulated": 100 * (results["DDP accumulated"].exposed_share or 0.0),
    }


def reduction_seconds() -> tuple[list[float], list[float]]:
    """Run on every rank: return the seconds of sums through one rank, and of all-reduces, interleaved."""
    gradient = torch.ones(MESSAGE)
    ways: tuple[Callable[[Tensor], object], ...] = (through_first_rank, dist.all_reduce)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, reduce in zip(seconds, ways, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            reduce(gradient)
            times.append(time.perf_counter() - begun)
            gradient.fill_(1.0)
    return seconds


def through_first_rank(gradient: Tensor) -> None:
    """Sum over ranks on rank 0, which receives all and sends the sum to each."""
    if dist.get_rank():
        dist.send(gradient, 0)
        dist.recv(gradient, 0)
        return
    other = torch.empty_like(gradient)
    for rank in range(1, dist.get_world_size()):
        dist.recv(other, rank)
        gradient += other
    for rank in range(1, dist.get_world_size()):
        dist.send(gradient, rank)


def compared(effective_batch_size: int) -> ComparisonReport:
    """Return a comparison of the ways to run the digits on two ranks."""
    job = MeasuredJob(recipe="digits", config=RunConfig(effective_batch_size=effective_batch_size))
    return compare(
        job.train_spec,
        partial(first_batches, job),
        effective_batch_size=effective_batch_size,
        device_type="cpu",
        num_devices=2,
        most_seconds=20.0,
    )


def shards_travel(emit: Emit) -> Numbers:
    """Compare steps of eight micro-batches and of one, in both orders of layers and micro-batches."""
    steps = {(step["order"], step["num_micro_batches"]): step for step in steps_in_both_orders(emit)["steps"]}
    numbers = {}
    for order, name in (("micro_batches", "by_micro_batch"), ("layers", "by_layer")):
        one, eight = steps[order, 1], steps[order, 8]
        numbers[name] = eight["gathered_bytes"] / one["gathered_bytes"]
        numbers[f"kept_{name}"] = eight["kept_bytes"]
        numbers[f"waiting_{name}"] = eight["waiting_bytes"]
    return {**numbers, "gradient_error": max(step["gradient_error"] for step in steps.values())}


def linear_to_eight(emit: Emit) -> Numbers:
    """Forecast the efficiency of eight devices: in one host, and on eight hosts of several networks."""
    emit_progress(emit, 0, 1, "forecasts")
    places = {"in_one_host": (LINKS[-1], 8), "at_10_gbit": (LINKS[1], 1), "at_1_gbit": (LINKS[0], 1)}
    numbers = {}
    for name, (link, per_host) in places.items():
        for kind, work in (
            ("", workload(steps=1, effective=None)),
            ("_accumulated", workload(steps=8, effective=None)),
        ):
            report = forecast(work, cluster(link, per_host), world_size=8)
            numbers[f"{name}{kind}"] = 100 * report.rows[-1].efficiency
    return numbers


def usual_buckets(emit: Emit) -> Numbers:
    """Forecast steps by bucket size: compare the usual sizes with the best, on three networks and two models."""
    emit_progress(emit, 0, 1, "forecasts")
    losses: dict[int, list[float]] = {25: [], 50: []}
    best = []
    for link in LINKS[:3]:
        for gradient in (GRADIENT_BYTES, 10 * GRADIENT_BYTES):
            seconds = {size: _step_seconds(link, gradient, size) for size in (1, 5, 10, 25, 50, 100, 400)}
            best.append(min(seconds, key=lambda size: seconds[size]))
            for size, percents in losses.items():
                percents.append(100 * (seconds[size] / min(seconds.values()) - 1))
    return {
        "most_lost_at_25": max(losses[25]),
        "most_lost_at_50": max(losses[50]),
        "least": min(best),
        "most": max(best),
    }


def _step_seconds(link: str, gradient_bytes: int, bucket_mebibytes: int) -> float:
    work = replace(workload(steps=1, effective=None, gradient=gradient_bytes), bucket_bytes=bucket_mebibytes * 2**20)
    return forecast(work, cluster(link, 1), world_size=8).rows[-1].step_seconds
