"""Common claims about training on several devices (replicas, reductions, samplers), and their measurements."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import anybatch as ab
from anybatch.planner.forecast import forecast
from anybatch.testing import RankPool
from anybatch_guide.claims import rules
from anybatch_guide.claims.claim import Claim, Number, Numbers
from anybatch_guide.claims.measuring import first_batch, flat_gradients, new_model, relative
from anybatch_guide.experiment import Emit, emit_progress
from anybatch_guide.experiments.forecasts import GRADIENT_BYTES, LINKS, cluster, workload
from anybatch_guide.experiments.layer_order import run as steps_in_both_orders
from anybatch_guide.experiments.rank_memory import measure_rank
from anybatch_guide.experiments.two_ranks import compare_digits
from anybatch_guide.tasks.task import cross_entropy, load

EVEN, UNEVEN = (32, 32), (44, 20)
RANKS, MESSAGE, ROUNDS = 4, 2**21, 9
"""For the cost of a reduction: number of ranks, float32 values in a gradient, and interleaved rounds."""
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
    """Return the errors of gradients combined over ranks, compared with one batch. Runs on every rank."""
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
        **{f"twice_on_{ranks}": num_repeated(number, ranks) for ranks in (2, 4, 8)},
        "twice_if_divisible": num_repeated(number - number % 8, 8),
    }


def num_repeated(num_samples: int, num_ranks: int) -> int:
    """Return the number of samples of an epoch that are used more than once."""
    samples = TensorDataset(torch.arange(num_samples))
    samplers: list[DistributedSampler[tuple[Tensor, ...]]] = [
        DistributedSampler(samples, num_replicas=num_ranks, rank=rank, shuffle=True, seed=0)
        for rank in range(num_ranks)
    ]
    indices = [index for sampler in samplers for index in sampler]
    return len(indices) - len(set(indices))


def ddp_memory(emit: Emit) -> Numbers:
    """Compare the memory that does not depend on the batch, on one device and per rank with DDP and FSDP."""
    fixed = {}
    for done, (strategy, num_ranks) in enumerate((("single", 1), ("ddp", RANKS), ("fsdp", RANKS))):
        emit_progress(emit, done, 3, strategy)
        with RankPool(num_ranks) as pool:
            ranks = pool.run(measure_rank, strategy)
        fixed[strategy] = max(sum(rank["between"][name] for name in FIXED) for rank in ranks)
    return {
        "alone_bytes": fixed["single"],
        "ddp_bytes": fixed["ddp"],
        "ddp_ratio": fixed["ddp"] / fixed["single"],
        "fsdp_ratio": fixed["fsdp"] / fixed["single"],
    }


def data_parallel(emit: Emit) -> Numbers:
    """Compare DataParallel with DDP on two devices: changed lines, time, and peak memory."""
    emit_progress(emit, 0, 1, "ways, interleaved")
    results = {result.way.name: result for result in compare_digits(256).results}
    threads, ranks = results["DataParallel"], results["DDP"]
    return {
        "lines": threads.way.lines_by_hand,
        "lines_ddp": ranks.way.lines_by_hand,
        "time_ratio": threads.seconds_per_step / ranks.seconds_per_step,
        "memory_ratio": threads.peak_bytes / ranks.peak_bytes,
    }


def all_reduce_saves(emit: Emit) -> Numbers:
    """Compare the time of an all-reduce with a sum on one rank, and return its exposed share of a step."""
    emit_progress(emit, 0, 2, "messages")
    with RankPool(RANKS) as pool:
        times = pool.run(reduction_seconds)[0]
    emit_progress(emit, 1, 2, "steps")
    results = {result.way.name: result for result in compare_digits(64).results}
    return {
        "through_one_ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
        "exposed": 100 * (results["DDP"].exposed_share or 0.0),
        "exposed_accumulated": 100 * (results["DDP accumulated"].exposed_share or 0.0),
    }


def reduction_seconds() -> tuple[list[float], list[float]]:
    """Return the seconds of sums through one rank and of all-reduces, interleaved. Runs on every rank."""
    gradient = torch.ones(MESSAGE)
    ways: tuple[Callable[[Tensor], object], ...] = (through_first_rank, dist.all_reduce)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for times, reduce in zip(seconds, ways, strict=True):
            dist.barrier()
            begin_seconds = time.perf_counter()
            reduce(gradient)
            times.append(time.perf_counter() - begin_seconds)
            gradient.fill_(1.0)
    return seconds


def through_first_rank(gradient: Tensor) -> None:
    """Sum over ranks on rank 0, which receives all gradients and sends the sum to each rank."""
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


def shards_travel(emit: Emit) -> Numbers:
    """Compare a step of eight micro-batches with a step of one, micro-batch by micro-batch and layer by layer."""
    steps = {(step["order"], step["num_micro_batches"]): step for step in steps_in_both_orders(emit)["steps"]}
    numbers = {}
    for order, name in (("micro_batches", "by_micro_batch"), ("layers", "by_layer")):
        single, eight = steps[order, 1], steps[order, 8]
        numbers[name] = eight["gathered_bytes"] / single["gathered_bytes"]
        numbers[f"kept_{name}"] = eight["kept_bytes"]
        numbers[f"waiting_{name}"] = eight["waiting_bytes"]
    return {**numbers, "gradient_error": max(step["gradient_error"] for step in steps.values())}


def linear_to_eight(emit: Emit) -> Numbers:
    """Forecast the efficiency of eight devices, in one host and on eight hosts with slower links."""
    emit_progress(emit, 0, 1, "forecasts")
    clusters = {"in_one_host": (LINKS[-1], 8), "at_10_gbit": (LINKS[1], 1), "at_1_gbit": (LINKS[0], 1)}
    numbers = {}
    for name, (link, per_host) in clusters.items():
        for kind, work in (
            ("", workload(steps=1, effective=None)),
            ("_accumulated", workload(steps=8, effective=None)),
        ):
            report = forecast(work, cluster(link, per_host), world_size=8)
            numbers[f"{name}{kind}"] = 100 * report.rows[-1].efficiency
    return numbers


def usual_buckets(emit: Emit) -> Numbers:
    """Forecast steps by bucket size, and compare the usual sizes with the best one, on three links and two models."""
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


DEVICE_CLAIMS = (
    Claim(
        name="all_reduce_saves",
        side="devices",
        title="All-reduce",
        statement="All-reduce avoids the overhead of gathering all gradients on one device.",
        how=(
            "Four ranks sum 8 MiB by all-reduce and through rank 0, interleaved. Two ranks make steps on digits with "
            "and without a reduction."
        ),
        measure=all_reduce_saves,
        numbers={
            "through_one_ratio": Number("time through one rank / time of all-reduce", "x", noisy=True),
            "exposed": Number("exposed reduction, share of a small step", "%", noisy=True),
            "exposed_accumulated": Number("the same with four micro-batches", "%", noisy=True),
        },
        rule=rules.all_reduce_saves,
        rule_in_words=(
            "False: sums through one rank take less than 1.2 times as long. True with a condition: they take longer, "
            "but exposed reduction is at least 5% of a step. True: otherwise."
        ),
        texts={
            "only_if": (
                "It is faster than a sum through one rank, which takes {through_one_ratio} as long, but it is not "
                "free: a rank waits for it during {exposed} of a small step. With four micro-batches it is "
                "{exposed_accumulated}."
            ),
        },
        seconds=60,
        runs_here=False,
    ),
    Claim(
        name="no_average",
        side="devices",
        title="No average",
        statement="After all-reduce, no averaging is needed.",
        how="Gradients of 64 digits on two ranks: summed, averaged by DDP, and by the engine; against one pass.",
        measure=no_average,
        numbers={
            "sum_error": Number("relative error, sum of two ranks' mean gradients", "error"),
            "average_error": Number("DDP's average, 32 + 32 samples", "error", noisy=True),
            "uneven_average_error": Number("DDP's average, 44 + 20 samples", "error"),
            "uneven_engine_error": Number("the engine, 44 + 20 samples", "error", noisy=True),
        },
        rule=rules.no_average,
        rule_in_words="True: the error of the sum is below 1e-4. False: otherwise.",
        texts={
            "false": (
                "If each rank computes the gradient of its mean loss, the sum is too large by the number of ranks: on "
                "two ranks, its error is {sum_error}; only with summed losses, as in the first figure of the chapter, "
                "is the sum correct. DDP divides by the number of ranks, which is correct for equal shares "
                "({average_error}), but not for others ({uneven_average_error}). Dividing once, by the number of "
                "samples in the whole batch, is correct for both ({uneven_engine_error})."
            ),
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="sampler_overlap",
        side="devices",
        title="DistributedSampler",
        statement="DistributedSampler gives every rank different samples, without overlap.",
        how="The indices of one epoch of digits from torch's DistributedSampler with default arguments.",
        measure=sampler_overlap,
        numbers={
            "samples": Number("samples in the data set"),
            "twice_on_2": Number("repeated samples, 2 ranks"),
            "twice_on_4": Number("repeated samples, 4 ranks"),
            "twice_on_8": Number("repeated samples, 8 ranks"),
            "twice_if_divisible": Number("repeated samples, 8 ranks, divisible data set"),
        },
        rule=rules.sampler_overlap,
        rule_in_words=(
            "True: no sample is repeated. True with a condition: none is repeated if the number of samples is "
            "divisible by the number of ranks. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only if the number of samples is divisible by the number of ranks, or with drop_last=True, which "
                "skips the rest. Otherwise the sampler repeats samples from the start, fewer than the number of ranks: "
                "on two, four and eight ranks {twice_on_2}, {twice_on_4} and {twice_on_8} of {samples} samples count "
                "twice, in training and in metrics."
            ),
        },
        seconds=2,
    ),
    Claim(
        name="data_parallel",
        side="devices",
        title="DataParallel",
        statement="DataParallel is simple and good enough.",
        how="The changed lines of a plain loop; steps of 256 digits on two CPU devices, interleaved with DDP.",
        measure=data_parallel,
        numbers={
            "lines": Number("changed lines, DataParallel", "lines"),
            "lines_ddp": Number("changed lines, DDP", "lines"),
            "time_ratio": Number("time of a step / with DDP", "x", noisy=True),
            "memory_ratio": Number("peak of its process / peak of a DDP rank", "x"),
        },
        rule=rules.data_parallel,
        rule_in_words=(
            "False: it changes more lines than DDP. True: it does not, and takes less than 1.1 times the time and "
            "memory. True with a condition: otherwise."
        ),
        texts={
            "only_if": (
                "Only if memory does not matter: in batches of 256, on CPU threads (GPUs were not measured), a step "
                "takes {time_ratio} the time of DDP, and {memory_ratio} the memory of a DDP rank. In "
                "batches of 64, as in the table of ways, both are lower. It changes {lines} lines; DDP changes "
                "{lines_ddp} and needs a launcher. DataParallel copies the model in every "
                "step, and gathers outputs and loss on one device."
            ),
        },
        seconds=40,
        runs_here=False,
    ),
    Claim(
        name="ddp_memory",
        side="devices",
        title="Memory of DDP",
        statement="DDP uses the memory of several devices efficiently.",
        how="All tensors that the engine keeps between steps, on each of four ranks.",
        measure=ddp_memory,
        numbers={
            "alone_bytes": Number("weights and optimizer states on one device", "bytes"),
            "ddp_bytes": Number("on each of four ranks, DDP", "bytes"),
            "ddp_ratio": Number("DDP / one device"),
            "fsdp_ratio": Number("FSDP / one device"),
        },
        rule=rules.ddp_memory,
        rule_in_words="True: each of four ranks holds less than half the bytes of one device. False: otherwise.",
        texts={
            "false": (
                "Each of four ranks keeps {ddp_bytes} of weights and optimizer states; one device alone keeps "
                "{alone_bytes}. DDP divides only the activations among ranks. With FSDP, which shards weights and "
                "states, a rank keeps {fsdp_ratio} of the bytes of one device."
            ),
        },
        seconds=20,
        runs_here=False,
    ),
    Claim(
        name="shards_travel",
        side="devices",
        title="Traffic of sharded weights",
        statement="With sharded weights, more micro-batches do not increase the traffic.",
        how=(
            "One step in plain PyTorch on two ranks, which gather each of four blocks before they use it. With one and "
            "eight micro-batches, which pass each block one after the other or together."
        ),
        measure=shards_travel,
        numbers={
            "by_micro_batch": Number("bytes gathered, 8 micro-batches / 1, one after the other", "x"),
            "by_layer": Number("bytes gathered, 8 micro-batches / 1, layer by layer", "x"),
            "kept_by_micro_batch": Number("outputs kept between layers, one after the other", "bytes"),
            "kept_by_layer": Number("outputs kept between layers, layer by layer", "bytes"),
            "waiting_by_micro_batch": Number("full gradients, one after the other", "bytes"),
            "waiting_by_layer": Number("full gradients, layer by layer", "bytes"),
            "gradient_error": Number("largest error of a gradient, float64", "error", noisy=True),
        },
        rule=rules.shards_travel,
        rule_in_words=(
            "True: eight micro-batches gather less than 1.1 times the bytes of one. True with a condition: they do so "
            "layer by layer. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only if each layer runs all micro-batches before the next layer starts, or the weights stay gathered "
                "between micro-batches. Layer by layer, eight micro-batches gather {by_layer} the bytes of one; one "
                "after the other, {by_micro_batch}. Layer by layer keeps more outputs between layers ({kept_by_layer} "
                "instead of {kept_by_micro_batch}), but fewer full gradients ({waiting_by_layer} instead of "
                "{waiting_by_micro_batch})."
            ),
        },
        seconds=10,
        runs_here=False,
    ),
    Claim(
        name="linear_to_eight",
        side="devices",
        title="Linear up to eight",
        statement="Data parallelism scales linearly up to eight devices.",
        how=(
            "A residual network of 50 layers, micro-batches of 32 images on each device, one "
            "or eight of them, on eight devices in one host or on eight hosts."
        ),
        measure=linear_to_eight,
        numbers={
            "in_one_host": Number("efficiency, 8 devices in one host", "%"),
            "in_one_host_accumulated": Number("the same with eight micro-batches", "%"),
            "at_10_gbit": Number("efficiency, 8 hosts, 10 Gbit/s", "%"),
            "at_10_gbit_accumulated": Number("the same with eight micro-batches", "%"),
            "at_1_gbit": Number("efficiency, 8 hosts, 1 Gbit/s", "%"),
            "at_1_gbit_accumulated": Number("the same with eight micro-batches", "%"),
        },
        rule=rules.linear_to_eight,
        rule_in_words="True: every efficiency is at least 90%. True with a condition: some are. False: none is.",
        texts={
            "only_if": (
                "The efficiency depends on the link, not on the number eight: {in_one_host} in one host, "
                "{at_10_gbit} on eight hosts at 10 Gbit/s, and {at_1_gbit} at 1 Gbit/s. With eight micro-batches per "
                "reduction, the last two are {at_10_gbit_accumulated} and {at_1_gbit_accumulated}."
            ),
        },
        is_forecast=True,
        seconds=2,
    ),
    Claim(
        name="usual_buckets",
        side="devices",
        title="Buckets",
        statement="Gradient buckets of 25 to 50 MB are best.",
        how=(
            "Steps on eight hosts with 102 MB and 1 GB of gradients, at 1, 10 and 100 Gbit/s, "
            "with buckets of 1 to 400 MiB."
        ),
        measure=usual_buckets,
        numbers={
            "most_lost_at_25": Number("largest loss of 25 MiB against the best size", "%"),
            "most_lost_at_50": Number("largest loss of 50 MiB against the best size", "%"),
            "least": Number("smallest of the best sizes, MiB"),
            "most": Number("largest of the best sizes, MiB"),
        },
        rule=rules.usual_buckets,
        rule_in_words=(
            "True: 25 MiB, or 50, is always less than 2% slower than the best size. True with a condition: one of them "
            "is less than 10% slower. False: otherwise."
        ),
        texts={
            "only_if": (
                "Only buckets of 25 MiB: at most {most_lost_at_25} slower than the best size, while 50 MiB are up to "
                "{most_lost_at_50} slower. The best size is between {least} and {most} MiB, depending on link and "
                "model. `anybatch scale` measures it."
            ),
        },
        is_forecast=True,
        seconds=2,
    ),
)
