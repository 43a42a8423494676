"""Predicted against measured step times, and the time that the engine and its meters add to a step on the device.

Times are measured over blocks of steps with one synchronisation at the end of a block, so that the host runs ahead as
in training. Blocks of all variants alternate; ratios are medians over rounds.
"""

import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import torch
from gpu import memory
from gpu.memory_cases import CASES, SCALES, Case, Scale
from gpu.stage import Check, Row, Rows, Setting, Size
from memory_accuracy import Batch
from torch import nn

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise
from anybatch.errors import UserError
from anybatch.planner.devices import find_device
from anybatch.planner.step_time import StepSeconds

TITLE = "Predicted against measured step times"
TIMES = "Step times in ms, predicted from the data sheet and measured"
OVERHEAD = "The engine's step against a plain loop"
METERS = "Steps with a noise meter, a spike watch and reports, against the same engine without"
NUM_MICRO_BATCHES = 4
STEPS_PER_BLOCK = 10
TIMED = (
    "decoder, bf16 autocast",
    "decoder, fp32",
    "CNN with BatchNorm, fp32",
    "U-Net, bf16 autocast",
    "ViT (transformers), bf16 autocast",
    "wide decoder, fused AdamW, fp32",
)
Block = Callable[[], object]


def predicted(name: str, size: Size, device: str | int) -> StepSeconds | None:
    """Return the predicted time of a case's step, from a plan in a process without CUDA; None without a data sheet.

    Args:
        name: of the case.
        size: of the setting.
        device: as `ab.plan` takes it.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case, scale = CASES[name], SCALES[size]
    micro_batch_size = case.micro_batch_size * scale.times
    return ab.plan(
        partial(case.make, scale),
        case.optimizer,
        case.loss,
        case.batch(scale, 1),
        device=device,
        effective_batch_size=NUM_MICRO_BATCHES * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=case.options.get("precision"),
        proposals=False,
    ).baseline.seconds


def step_times(setting: Setting) -> Rows:
    """Compare predicted with measured times of a step."""
    if not setting.on_gpu:
        torch.set_num_threads(1)
    with memory.planners(setting) as pool:
        names, device = setting.pick(TIMED, TIMED, TIMED[:1]), plan_device(setting)
        plans = {name: pool.submit(predicted, name, setting.size, device) for name in names}
        for name, one in plans.items():
            print(f"  {name}", flush=True)
            try:
                yield compared(name, one.result(), setting)
            except Exception as error:  # noqa: BLE001 (the other models are still measured)
                yield memory.failed(name, error)


def plan_device(setting: Setting) -> str | int:
    """Return the device's name if the planner knows it, else its memory."""
    if setting.on_gpu:
        with contextlib.suppress(UserError):
            return find_device(torch.cuda.get_device_name(setting.device)).name
    return memory.plan_device(setting)


def compared(name: str, found: StepSeconds | None, setting: Setting) -> Row:
    """Return the row of a case."""
    case = CASES[name]
    size = case.micro_batch_size * SCALES[setting.size].times
    taken = measured_seconds(case, size, setting)
    cells = {"model": name, "micro-batches": f"{NUM_MICRO_BATCHES} x {size}", "measured": f"{1e3 * taken:.2f}"}
    if found is None:
        return Row(TIMES, {**cells, **dict.fromkeys(("predicted", "error, %", "in its band"), "-")})
    cells |= {"predicted": f"{1e3 * found.total:.2f}", "error, %": f"{100 * (found.total / taken - 1):+.0f}"}
    return Row(TIMES, {**cells, "in its band": "yes" if found.least <= taken <= found.greatest else "no"})


def measured_seconds(case: Case, size: int, setting: Setting) -> float:
    """Return the median seconds of a step of the real engine."""
    memory.emptied(setting)
    batch = on_device(case.batch(SCALES[setting.size], NUM_MICRO_BATCHES * size), setting)
    with memory.engine_of(case, memory.model_of(case, setting), size, setting) as engine:
        step = partial(engine.step, batch)
        num_steps, limit = setting.pick((20, 1.5), (3, 3.0), (2, 1.0))
        for _ in range(setting.pick(3, 1, 1)):
            step()
        seconds: list[float] = []
        while len(seconds) < num_steps and (len(seconds) < 2 or sum(seconds) < limit):
            seconds.append(timed(step, 1, setting))
    return statistics.median(seconds)


def on_device(batch: Batch, setting: Setting) -> Batch:
    """Return a batch whose tensors are on the device already."""
    return {name: tensor.to(setting.device) for name, tensor in batch.items()}


def timed(step: Block, num_steps: int, setting: Setting) -> float:
    """Return the seconds per step of a block of steps."""
    setting.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    setting.synchronize()
    return (time.perf_counter() - start) / num_steps


def alternated(steps: Mapping[str, Block], limit: float, num_steps: int, setting: Setting) -> dict[str, list[float]]:
    """Return the seconds per step of each variant, in blocks that alternate until the limit, in seconds, is reached."""
    names = list(steps)
    for step in steps.values():
        timed(step, setting.pick(3, 1, 1), setting)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start, number = time.perf_counter(), 0
    while number < 2 or time.perf_counter() - start < limit:  # a ratio needs more than one round
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            seconds[name].append(timed(steps[name], num_steps, setting))
        number += 1
    return seconds


def ratio(one: list[float], base: list[float]) -> float:
    """Return the median of the ratios of neighbouring blocks."""
    return statistics.median(a / b for a, b in zip(one, base, strict=True))


def plain_step(model: nn.Module, batch: Batch, num_micro_batches: int, clip: float | None) -> Block:
    """Return an accumulating step as one writes it by hand."""
    optimizer, parameters = torch.optim.SGD(model.parameters(), lr=1e-3), list(model.parameters())
    num_samples = len(batch["x"])
    total = torch.zeros((), device=batch["x"].device)

    def step() -> torch.Tensor:
        total.zero_()
        pieces = zip(*(batch[name].chunk(num_micro_batches) for name in ("x", "y")), strict=True)
        for x, y in pieces:
            loss = overhead.loss(model, {"x": x, "y": y}) * (len(x) / num_samples)
            loss.backward()
            total.add_(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def engine_overhead(setting: Setting) -> Rows:
    """Compare the engine's step with a plain loop, on models so small that the host decides how long a step takes."""
    models = {"3 layers, 1 thousand parameters": overhead.tiny, "13 layers, 10 million parameters": overhead.mid}
    for name, make in list(models.items())[: setting.pick(2, 2, 1)]:
        for num_micro_batches in setting.pick((1, 4, 16), (1, 4), (4,)):
            for clip in (None, 1.0):
                print(f"  {name}, {num_micro_batches} micro-batches", flush=True)
                size = 32
                batch = on_device(
                    {
                        "x": torch.randn(size * num_micro_batches, 16),
                        "y": torch.randint(10, (size * num_micro_batches,)),
                    },
                    setting,
                )
                with overhead_engine(make(), size, clip, setting) as engine:
                    steps: dict[str, Block] = {
                        "plain": plain_step(make().to(setting.device), batch, num_micro_batches, clip),
                        "engine": partial(engine.step, batch),
                    }
                    found = alternated(steps, setting.pick(0.5, 0.3, 0.05), STEPS_PER_BLOCK, setting)
                by_hand, by_engine = (statistics.median(found[which]) for which in steps)
                yield Row(
                    OVERHEAD,
                    {
                        "model": name,
                        "micro-batches": str(num_micro_batches),
                        "clip": str(clip or "none"),
                        "plain loop, ms": f"{1e3 * by_hand:.3f}",
                        "engine, ms": f"{1e3 * by_engine:.3f}",
                        "ratio": f"{ratio(found['engine'], found['plain']):.3f}",
                        "extra, us per step": f"{1e6 * (by_engine - by_hand):.0f}",
                    },
                )


def overhead_engine(model: nn.Module, size: int, clip: float | None, setting: Setting) -> ab.Engine:
    """Return the engine that takes the same step as the plain loop."""
    return ab.Engine(
        model,
        lambda named: torch.optim.SGD((parameter for _, parameter in named), lr=1e-3),
        ab.mean_over_samples(overhead.loss),
        micro_batch_size=size,
        clip=clip,
        measure_gradient_norm=clip is not None,
        world=ab.World.from_environment(device=setting.device),
    )


def meters(setting: Setting) -> Rows:
    """Compare steps with meters and reports with the same steps without."""
    small, large = replace(CASES[TIMED[0]], micro_batch_size=1), CASES[TIMED[0]]
    cases = {
        "small decoder": (small, SCALES[setting.pick("small", "small", "tiny")]),
        "decoder": (large, SCALES[setting.size]),
    }
    for name, (case, scale) in list(cases.items())[: setting.pick(2, 2, 1)]:
        print(f"  {name}", flush=True)
        batch = on_device(case.batch(scale, NUM_MICRO_BATCHES * case.micro_batch_size * scale.times), setting)
        memory.emptied(setting)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # random data is not a training run, and the spike watch may warn
            steps = dict(variants(case, scale, batch, setting, stack))
            found = alternated(steps, setting.pick(4.0, 2.0, 0.1), setting.pick(STEPS_PER_BLOCK, 3, 2), setting)
        for which, seconds in found.items():
            yield Row(
                METERS,
                {
                    "model": name,
                    "variant": which,
                    "ms per step": f"{1e3 * statistics.median(seconds):.3f}",
                    "ratio": f"{ratio(seconds, found['without']):.3f}",
                },
            )


def variants(
    case: Case, scale: Scale, batch: Batch, setting: Setting, stack: contextlib.ExitStack
) -> Iterator[tuple[str, Block]]:
    """Yield the step of each variant by name."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    size = len(next(iter(batch.values()))) // NUM_MICRO_BATCHES

    def engine(**options: Any) -> ab.Engine:  # noqa: ANN401 (arguments of the engine)
        with torch.device(setting.device):
            model = case.make(scale)
        one = replace(case, options={**case.options, **options})
        return stack.enter_context(memory.engine_of(one, model, size, setting))

    def log(name: str) -> ab.JsonlLog:
        return stack.enter_context(ab.JsonlLog(folder / name))

    yield "without", partial(engine().step, batch)
    yield "without, again", partial(engine().step, batch)
    yield "noise meter, one step in ten (default)", partial(engine(noise=GradientNoise()).step, batch)
    yield "noise meter, every step", partial(engine(noise=GradientNoise(every=1)).step, batch)
    yield "spike watch", partial(engine(spikes="warn").step, batch)
    yield "log of JSON lines", partial(engine(observer=log("log")).step, batch)
    reading = engine()
    yield "loss and norm read in every step", lambda: (report := reading.step(batch)).loss + (report.grad_norm or 0.0)
    all_of_it = engine(noise=GradientNoise(), spikes="warn", observer=log("all"))
    yield "noise meter (default), spike watch and log", partial(all_of_it.step, batch)


CHECKS: tuple[Check, ...] = (step_times, engine_overhead, meters)
