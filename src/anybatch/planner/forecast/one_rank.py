"""Times one rank on this machine: what a forecast needs to know of computing."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from anybatch.core.batch import EffectiveBatch
from anybatch.core.size_choice import SecondsFit
from anybatch.core.whole_numbers import checked_int
from anybatch.diagnostics.tune import tune
from anybatch.engine.spec import TrainSpec
from anybatch.errors import PlanError
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.world import World

SizedJob = Callable[[int], tuple[TrainSpec, Callable[[int], Iterable[EffectiveBatch]]]]
"""Function of an effective batch size to what is trained, made anew, and to its data, as `tune` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRank:
    """What was measured of one rank; fields as in `Workload`."""

    micro_batch: SecondsFit
    micro_batch_size: int
    update_seconds: float
    gradient_bytes: int
    num_parameters: int


def time_one_rank(
    job: SizedJob,
    micro_batch_size: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    world: World | None = None,
) -> OneRank:
    """Time steps of one micro-batch, of two, and of one of half the size; each time is the shortest of three.

    With `a + b m` seconds for a micro-batch of m samples, and u for the update and all else that a step does once:

    ```text
    two of m  - one of m            = a + b m
    one of m  - one of m / 2        = b m / 2
    one of m  - (a + b m)           = u
    ```

    Args:
        job: what is trained, and its data.
        micro_batch_size: m.
        clock: monotonic time in seconds.
        world: the one rank that is measured; None asks the environment.

    Raises:
        BatchSizeError: it does not fit, or the data set is smaller.
        PlanError: times do not rise with the samples, so that they tell nothing.
    """
    checked_int("micro_batch_size", micro_batch_size)
    half = max(1, micro_batch_size // 2)

    def seconds(num_samples: int, size: int) -> float:
        train, data = job(num_samples)
        rate = tune(train, data, micro_batch_sizes=[size], clock=clock, world=world).rates[size]
        return num_samples / rate

    one, two = seconds(micro_batch_size, micro_batch_size), seconds(2 * micro_batch_size, micro_batch_size)
    whole = two - one
    if whole <= 0.0:
        message = (
            f"a step of two micro-batches took {two:.3g} s, and one of one {one:.3g} s: times that do not rise tell "
            "nothing. Try again while the machine does nothing else, or larger micro-batches."
        )
        raise PlanError(message)
    slope = 0.0
    if half < micro_batch_size:
        slope = (one - seconds(half, half)) / (micro_batch_size - half)
    # Noise can make either part negative; times are not.
    slope = min(max(slope, 0.0), whole / micro_batch_size)
    model = job(micro_batch_size)[0].model
    modules = [model] if isinstance(model, torch.nn.Module) else list(model.values())
    trained = [one for module in modules for one in module.parameters() if one.requires_grad]
    return OneRank(
        micro_batch=SecondsFit(whole - slope * micro_batch_size, slope),
        micro_batch_size=micro_batch_size,
        update_seconds=max(0.0, one - whole),
        gradient_bytes=gradient_bytes(trained),
        num_parameters=len(trained),
    )
