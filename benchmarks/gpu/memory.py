"""Planned memory against the memory that a training step takes on the device.

Plans are made by `ab.plan` in processes that never touch the device, while the device measures earlier models. A model
is measured over its first two steps, of two micro-batches each, starting from an empty allocator. On a CPU the counters
of the CPU allocator replace the device's counters.
"""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import memory_accuracy
import torch
from gpu.memory_cases import CASES, SCALES, Case
from gpu.stage import FAILED, Check, Row, Rows, Setting, Size
from torch import nn
from torch.profiler import record_function

import anybatch as ab
from anybatch.errors import MemoryExhaustedError
from anybatch.memory.device_memory import driver_bytes, outside_bytes
from anybatch.planner.budget import budget_of
from anybatch.planner.verification import verify
from anybatch.testing import memory_budget

TITLE = "Planned against measured memory"
MEMORY = "Peak memory of a step in MiB: allocated (tensors and workspaces), reserved, and of the whole device"
LARGEST = "Largest micro-batch under a memory limit, planned and found by trying"
LIBRARIES = "Memory of libraries in MiB, planned and measured"
VERIFIED = "`anybatch plan --verify`"
NUM_MICRO_BATCHES = 2
MEBIBYTE = 2**20
OPTIONAL = ("peft", "transformers")
IN_CI = ("decoder, bf16 autocast",)
LIMITED = {"decoder, bf16 autocast": 8 * 2**30, "U-Net, bf16 autocast": 12 * 2**30}
"""Cases to find the largest micro-batch for, with the limit on a GPU; on a CPU it is 2.5 times a small step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan's sizes in bytes."""

    tensors: int
    reserved: int
    workspace: int
    outside: int
    largest: int
    seconds: float


def planned(
    name: str, size: Size, device: str | int, micro_batch_size: int | None, headroom: float | None = None
) -> Planned:
    """Plan a case as a user would, in a process without CUDA.

    Args:
        name: of the case.
        size: of the setting.
        device: as `ab.plan` takes it.
        micro_batch_size: of the step; None for the largest.
        headroom: as `ab.plan` takes it.

    Raises:
        RuntimeError: planning has touched the device.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case, scale = CASES[name], SCALES[size]
    # More than fit into a micro-batch; on a CPU the inputs of all of them are in its memory.
    most = 64 if isinstance(device, str) else 4096
    plan = ab.plan(
        partial(case.make, scale),
        case.optimizer,
        case.loss,
        case.batch(scale, 1),
        device=device,
        effective_batch_size=NUM_MICRO_BATCHES * micro_batch_size if micro_batch_size else most,
        micro_batch_size=micro_batch_size,
        precision=case.options.get("precision"),
        headroom=headroom,
        proposals=False,
    )
    if torch.cuda.is_initialized():
        message = "planning has initialised CUDA; it must not touch the device"
        raise RuntimeError(message)
    fit = plan.baseline
    return Planned(
        tensors=fit.peak.num_bytes,
        reserved=fit.reserved_bytes_without_limit,
        workspace=plan.budget.workspace_bytes,
        outside=plan.budget.outside_bytes,
        largest=fit.largest,
        seconds=plan.seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Peaks of two steps in bytes; None where a CPU has no such figure."""

    allocated: int
    reserved: int | None = None
    device: int | None = None
    workspaces: int | None = None


def engine_of(case: Case, model: nn.Module, micro_batch_size: int, setting: Setting) -> ab.Engine:
    """Return the engine that runs a case; as in a plan, it does not check the loss."""
    return ab.Engine(
        model,
        case.optimizer,
        case.loss,
        micro_batch_size=micro_batch_size,
        check_loss=False,
        norms="keep",
        world=ab.World.from_environment(device=setting.device),
        **case.options,
    )


def emptied(setting: Setting) -> None:
    """Free everything that earlier models have left on the device, workspaces included."""
    gc.collect()
    if setting.on_gpu:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 (its only name)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def model_of(case: Case, setting: Setting) -> nn.Module:
    """Return the model, created on the device, which takes less time."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = case.make(SCALES[setting.size])
    emptied(setting)
    return model


def measured(case: Case, setting: Setting) -> Measured:
    """Return the peaks of two steps of the real engine."""
    size = case.micro_batch_size * SCALES[setting.size].times
    emptied(setting)
    if not setting.on_gpu:
        return Measured(allocated=allocated_on_cpu(case, size, setting))
    batch = case.batch(SCALES[setting.size], NUM_MICRO_BATCHES * size)
    with engine_of(case, model_of(case, setting), size, setting) as engine:
        for _ in range(2):
            engine.step(batch)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        device = driver_bytes(torch.device(setting.device))
    del engine
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 (its only name)
    workspaces = before - torch.cuda.memory_allocated()
    return Measured(allocated=allocated, reserved=reserved, device=device, workspaces=workspaces)


def allocated_on_cpu(case: Case, size: int, setting: Setting) -> int:
    """Return the peak of the CPU allocator's memory in the second step."""
    with memory_accuracy.AllocatorEvents() as allocator:
        batch = case.batch(SCALES[setting.size], NUM_MICRO_BATCHES * size)
        with engine_of(case, model_of(case, setting), size, setting) as engine:
            engine.step(batch)
            with record_function(memory_accuracy.SECOND_STEP):
                engine.step(batch)
    return allocator.peak_bytes()


def compared(name: str, plan: Planned, found: Measured) -> Row:
    """Return the row of a case."""
    pairs = (
        ("allocated", plan.tensors + plan.workspace, found.allocated),
        ("reserved", plan.reserved + plan.workspace, found.reserved),
        ("device", plan.reserved + plan.workspace + plan.outside, found.device),
    )
    cells = {"model": name}
    for what, expected, seen in pairs:
        cells[f"{what}, planned"] = in_mebibytes(expected)
        cells[f"{what}, measured"] = "-" if seen is None else in_mebibytes(seen)
        cells[f"{what}, error, %"] = "-" if seen is None else f"{100 * (expected / seen - 1):+.2f}"
    # Workspaces of cuBLAS depend on the card; without them the plan's tensors are compared with the real ones.
    tensors = found.allocated - (found.workspaces or 0)
    cells["tensors alone, error, %"] = f"{100 * (plan.tensors / tensors - 1):+.2f}"
    cells["planned in, s"] = f"{plan.seconds:.1f}"
    return Row(MEMORY, cells)


def in_mebibytes(num_bytes: int) -> str:
    """Return a size as text."""
    return f"{num_bytes / MEBIBYTE:,.1f}"


def failed(name: str, error: Exception) -> Row:
    """Return the row of a case that failed in the plan or the run; a missing optional package is not a failure."""
    if isinstance(error, ImportError) and error.name in OPTIONAL:
        return Row("Left out", {"what": name, "why": str(error)})
    return Row(FAILED, {"check": name, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})


def plan_device(setting: Setting) -> str | int:
    """Return the device to plan for, with this device's memory."""
    if not setting.on_gpu:
        return "cpu:16GiB"
    return int(torch.cuda.get_device_properties(setting.device).total_memory)


@contextlib.contextmanager
def planners(setting: Setting) -> Iterator[concurrent.futures.Executor]:
    """Yield processes that plan; stop the unfinished ones at the end."""
    num_processes = setting.pick(max(1, min(12, (os.cpu_count() or 2) - 2)), 2, 1)
    pool = concurrent.futures.ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def peaks(setting: Setting) -> Rows:
    """Compare the planned peaks of all cases with measured ones, and the largest micro-batch of two."""
    names = setting.pick(tuple(CASES), tuple(CASES), IN_CI)
    if not setting.on_gpu:
        torch.set_num_threads(1)
    limits = {name: limit_of(name, setting) for name in LIMITED if name in names}
    times = SCALES[setting.size].times
    with planners(setting) as pool:
        plans = {
            name: pool.submit(planned, name, setting.size, plan_device(setting), CASES[name].micro_batch_size * times)
            for name in names
        }
        largest = {
            name: pool.submit(planned, name, setting.size, device_of(limit, setting), None, 0.0)
            for name, limit in limits.items()
        }
        for name in names:
            print(f"  {name}", flush=True)
            try:
                found = measured(CASES[name], setting)
                yield compared(name, plans[name].result(), found)
                if setting.on_gpu and name == names[0]:
                    yield from libraries(plans[name].result(), found, setting)
            except Exception as error:  # noqa: BLE001 (the other models are still measured)
                yield failed(name, error)
        for name, limit in limits.items():
            print(f"  largest micro-batch, {name}", flush=True)
            try:
                yield largest_row(name, limit, largest[name].result().largest, setting)
            except Exception as error:  # noqa: BLE001 (the other model is still measured)
                yield failed(f"largest micro-batch, {name}", error)


def libraries(plan: Planned, found: Measured, setting: Setting) -> Rows:
    """Compare the planned memory of libraries with their real memory."""
    outside = outside_bytes(torch.device(setting.device))
    rows = (("cuBLAS workspaces", plan.workspace, found.workspaces), ("outside the allocator", plan.outside, outside))
    for what, expected, seen in rows:
        cells = {"memory": what, "planned": in_mebibytes(expected), "measured": in_mebibytes(seen or 0)}
        yield Row(LIBRARIES, cells)


def limit_of(name: str, setting: Setting) -> int:
    """Return the limit for finding the largest micro-batch, including the context."""
    if setting.on_gpu:
        return min(LIMITED[name], plan_device(setting) // 2)  # type: ignore[operator]
    return int(2.5 * peak_under(name, 2, 1 << 40, setting)[0])


def device_of(limit: int, setting: Setting) -> str | int:
    """Return the limit in the form that `ab.plan` takes."""
    return limit if setting.on_gpu else f"cpu:{limit}B"


def largest_row(name: str, limit: int, expected: int, setting: Setting) -> Row:
    """Find the largest micro-batch that runs under a limit, starting at the planned one."""
    start = time.perf_counter()
    # A plan leaves room for the context, which the allocator's limit does not include.
    allowed = limit - planner_outside(setting)
    tried: dict[int, bool] = {}

    def fits(size: int) -> bool:
        if size < 1:  # nothing was planned to fit
            return True
        if size not in tried:
            tried[size] = peak_under(name, size, allowed, setting)[1]
        return tried[size]

    low, high = bracket(fits, expected)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Row(
        LARGEST,
        {
            "model": name,
            "limit, MiB": in_mebibytes(limit),
            "planned": str(expected),
            "planned runs": "yes" if fits(expected) else "no",
            "one more runs": "yes" if fits(expected + 1) else "no",
            "largest that runs": str(low),
            "planned / largest": f"{expected / low:.3f}" if low else "-",
            "tries": str(len(tried)),
            "seconds": f"{time.perf_counter() - start:.1f}",
        },
    )


def bracket(fits: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """Return a size that fits and a larger one that does not, near a guess; 0 fits by definition."""
    low = high = max(1, guess)
    step = max(1, guess // 32)
    if fits(low):
        high = low + 1
        while fits(high):
            low, high, step = high, high + step, 2 * step
        return low, high
    while low > 0 and not fits(low):
        low, high, step = max(0, low - step), low, 2 * step
    return low, high


def planner_outside(setting: Setting) -> int:
    """Return the bytes that a plan reserves for the context."""
    return budget_of(1 << 40).outside_bytes if setting.on_gpu else 0


def peak_under(name: str, size: int, num_bytes: int, setting: Setting) -> tuple[int, bool]:
    """Take two steps under a memory limit; return the peak, and whether all micro-batches of this size fitted."""
    case = CASES[name]
    emptied(setting)
    model, batch = model_of(case, setting), case.batch(SCALES[setting.size], NUM_MICRO_BATCHES * size)
    with limited(num_bytes, setting, model, *batch.values()) as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with engine_of(case, model, size, setting) as engine:
                fitted = not any(engine.step(batch).too_large for _ in range(2))
                setting.synchronize()
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            fitted = False
        return peak(), fitted


@contextlib.contextmanager
def limited(num_bytes: int, setting: Setting, *holders: Any) -> Iterator[Callable[[], int]]:  # noqa: ANN401 (modules and tensors)
    """Limit the allocator to this many bytes; yield a function that returns the peak."""
    if not setting.on_gpu:
        with memory_budget(num_bytes, *holders) as budget:
            yield lambda: budget.peak_bytes
        return
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield torch.cuda.max_memory_reserved
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def verification(setting: Setting) -> Rows:
    """Compare a plan with the device as `anybatch plan --verify` does."""
    name, scale = IN_CI[0], SCALES[setting.size]
    case = CASES[name]
    size = case.micro_batch_size * scale.times
    plan = ab.plan(
        partial(case.make, scale),
        case.optimizer,
        case.loss,
        case.batch(scale, 1),
        device=plan_device(setting),
        effective_batch_size=NUM_MICRO_BATCHES * size,
        micro_batch_size=size,
        precision=case.options.get("precision"),
        proposals=False,
    )
    for line in str(verify(plan.spec, plan.baseline, setting.device)).splitlines():
        yield Row(VERIFIED, {"model": name, "result": line})


CHECKS: tuple[Check, ...] = (peaks, verification)
