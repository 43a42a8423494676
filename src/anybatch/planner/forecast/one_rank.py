"""Time one rank on this machine, as input for a forecast."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from anybatch.core.batch import EffectiveBatch
from anybatch.core.geometry import SecondsFit, checked_int
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import BatchSizeError, PlanError
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.world import World

SizedJob = Callable[[int], tuple[TrainSpec, Callable[[int], Iterable[EffectiveBatch]]]]
"""Function of an effective batch size that returns a new `TrainSpec` and its data, as for `tune`."""
_LEAST_ROUNDS, _LEAST_SECONDS = 5, 2.0
"""Minimum number of rounds and total time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRank:
    """Measurements of one rank; fields as in `Workload`."""

    micro_batch: SecondsFit
    micro_batch_size: int
    update_seconds: float
    gradient_bytes: int
    num_parameters: int


def time_one_rank(
    job: SizedJob,
    micro_batch_size: int,
    *,
    most_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
    world: World | None = None,
) -> OneRank:
    """Time steps with one micro-batch, with two, and with one of half the size, interleaved.

    With `a + b m` seconds for a micro-batch of m samples, and u for the update and other work once per step:

    ```text
    two of m  - one of m            = a + b m
    one of m  - one of m / 2        = b m / 2
    one of m  - (a + b m)           = u
    ```

    Each difference is the median over rounds with one step of each, so that other load on the machine affects all three
    equally and single delays do not matter.

    Args:
        job: creates the `TrainSpec` and its data.
        micro_batch_size: m.
        most_seconds: start no round after this time.
        clock: monotonic time in seconds.
        world: the rank to measure; None reads the environment.

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
    with Engine.from_spec(spec_for_repeated_steps(train), hardware) as engine:
        rounds = _rounds(engine, world.device, [CachedBatch(part) for part in (batch, *parts)], most_seconds, clock)
    whole = median(two - one for two, one, _ in rounds)
    if whole <= 0.0:
        two, one, _ = (median(times) for times in zip(*rounds, strict=True))
        message = (
            f"a step took {two:.3g} s with two micro-batches and {one:.3g} s with one: the times are too noisy. "
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
    return OneRank(
        micro_batch=SecondsFit(whole - slope * micro_batch_size, slope),
        micro_batch_size=micro_batch_size,
        update_seconds=max(0.0, median(2.0 * one - two for two, one, _ in rounds)),
        gradient_bytes=gradient_bytes(trained),
        num_parameters=len(trained),
    )


def _rounds(
    engine: Engine,
    device: torch.device,
    batches: Sequence[EffectiveBatch],
    most_seconds: float,
    clock: Callable[[], float],
) -> list[tuple[float, float, float]]:
    """Return the seconds of a step of each of the three batches, two micro-batches first, round by round."""

    def now() -> float:
        # Kernels run asynchronously: wait, or a step would seem to end when it has only been launched.
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return clock()

    def seconds(batch: EffectiveBatch) -> float:
        begun = now()
        if sizes := engine.step(batch).too_large:
            message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {device}: try smaller ones."
            raise BatchSizeError(message, micro_batch_size=sizes[0])
        return now() - begun

    for batch in batches:  # creates the optimizer's state, loads the samples, and warms the caches
        seconds(batch)
    found: list[tuple[float, float, float]] = []
    begun = now()
    while (passed := now() - begun) < most_seconds or not found:
        rising = bool(found) and median(two - one for two, one, _ in found) > 0.0
        if rising and len(found) >= _LEAST_ROUNDS and passed >= _LEAST_SECONDS:
            break
        two, one, less = (seconds(batch) for batch in batches)
        found.append((two, one, less))
    return found
