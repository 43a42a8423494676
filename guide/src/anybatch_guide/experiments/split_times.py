"""The time of a step over 64 samples at each micro-batch size: the price of the memory in `memory_accumulation`."""

import platform
import statistics
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anybatch as ab
from anybatch_guide.claims.measuring import time_round
from anybatch_guide.experiment import Data, Emit, Experiment, emit_progress
from anybatch_guide.experiments.memory_accumulation import EFFECTIVE, MICRO_SIZES
from anybatch_guide.memory.accumulated import AccumulationConfig, all_configs, engine_of
from anybatch_guide.memory.small import ACCUMULATED

ROUNDS = 5
CPU_INFO = Path("/proc/cpuinfo")


def run(emit: Emit) -> Data:
    """Time every configuration at every split of the effective batch."""
    return {
        "processor": processor(),
        "rounds": ROUNDS,
        "effective": EFFECTIVE,
        "micro_sizes": list(MICRO_SIZES),
        "ways": [_timed(config, emit, number=number) for number, config in enumerate(all_configs())],
    }


def _timed(config: AccumulationConfig, emit: Emit, *, number: int) -> dict[str, Any]:
    """Return the median CPU time of a step at each micro-batch size; rounds are interleaved."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_of(ACCUMULATED, config, micro_batch_size=size)) for size in MICRO_SIZES]
        steps = {size: partial(_step, engine) for size, engine in zip(MICRO_SIZES, engines, strict=True)}
        for step in steps.values():
            step()  # creates the optimizer state
        seconds: dict[int, list[float]] = {size: [] for size in steps}
        for done in range(ROUNDS):
            what = f"{config.optimizer}, {config.precision}{', checkpointing' * config.checkpointing}"
            emit_progress(emit, number * ROUNDS + done, len(all_configs()) * ROUNDS, what)
            time_round(steps, seconds)
    return {
        "optimizer": config.optimizer,
        "precision": config.precision,
        "checkpointing": config.checkpointing,
        "seconds": [statistics.median(seconds[size]) for size in MICRO_SIZES],
        "spread": statistics.median(map(relative_range, seconds.values())),
    }


def _step(engine: ab.Engine) -> None:
    engine.step(ACCUMULATED.batch(EFFECTIVE))


def relative_range(values: list[float]) -> float:
    """Return the range between the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def processor() -> str:
    """Return the name of the processor."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


EXPERIMENT = Experiment(
    name="split_times",
    question="How long does a step of 64 samples take, in one pass and in micro-batches?",
    run=run,
    seconds=150,
    runs_here=False,
    noisy=("processor", "seconds", "spread"),
)
