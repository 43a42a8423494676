"""Learning-rate schedules, and effective batch sizes that grow in stages.

A ramp is a function from the number of samples used so far to the effective batch size. It has no state: a run that is
resumed anywhere, at any world size, continues in the same stage, and the ramp does not change the order of the samples.

A schedule multiplies the learning rate by a factor in each step. Every schedule counts optimizer steps; durations in
samples or epochs are converted to steps beforehand.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Self

from anybatch.core.geometry import ceil_div, checked_int, require
from anybatch.errors import BatchSizeError, UserError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

Stage = tuple[int, int | None]
"""Samples of one step, and the length of the stage in samples; None for the rest of the run."""
_STAGE: Final = re.compile(r"(?P<size>\d+)(@(?P<begin>\d+))?")


@dataclass(frozen=True, slots=True, init=False)
class BatchRamp:
    """Effective batch sizes in stages, each for a number of samples.

    ```python
    ramp = BatchRamp((64, 100_000), (256, 400_000), (1024, None))
    for batch in ab.batches(dataset, effective_batch_size=ramp, epochs=3):
        engine.step(batch)  # an engine without effective_batch_size: accumulation follows the batch
    ```

    A step belongs to the stage in which it begins, and may reach into the next stage. The last batch of an epoch may be
    smaller, as without a ramp.

    The ramp does not change the learning rate. If it replaces a decay of the rate, keep SGD's rate constant (Smith et
    al. 2017, arXiv 1711.00489: the noise of an update is proportional to rate / batch size, far below the size of the
    data set and the limit of stability), and for Adam see `seesaw`. If it only starts a run with small batches (Brown
    et al. 2020, arXiv 2005.14165), which suffice while the noise scale is small, scale the rate, see `scale_rate`.

    Args:
        *stages: pairs (samples of one step over all ranks, length of the stage in samples); the last length is None.

    Raises:
        BatchSizeError: no stage, a size that is not a whole number of at least 1, a stage that is shorter than one of
            its steps, no None as the length of the last stage, or None as the length of another stage.
    """

    stages: tuple[Stage, ...]

    def __init__(self, *stages: Stage) -> None:
        object.__setattr__(self, "stages", stages)
        if not stages:
            message = "a ramp needs stages: BatchRamp((64, 100_000), (256, None)), for example."
            raise BatchSizeError(message, code="no_stages")
        for number, (size, num_samples) in enumerate(stages):
            checked_int(f"effective batch size of stage {number}", size, error=BatchSizeError)
            if (num_samples is None) != (number == len(stages) - 1):
                message = f"stage {number} lasts {num_samples} samples. Pass None for the last of {len(stages)} stages."
                raise BatchSizeError(message, code="end_of_stage")
            if num_samples is None:
                continue
            checked_int(f"samples of stage {number}", num_samples, error=BatchSizeError)
            if num_samples < size:
                message = f"stage {number} lasts {num_samples} samples, less than one step of {size}. Make it longer."
                raise BatchSizeError(message, code="stage_too_short")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a ramp such as `32,128@20000,512@100000`: sizes, and the sample at which each size begins.

        Raises:
            BatchSizeError: the text has another form, or its stages are not valid for `BatchRamp`.
        """
        matches = [_STAGE.fullmatch(part.strip()) for part in text.split(",")]
        stages = [(int(match["size"]), match["begin"]) for match in matches if match is not None]
        if len(stages) != len(matches) or stages[0][1] is not None or None in [begin for _, begin in stages[1:]]:
            message = f"{text!r} must be a size, then size@first_sample for each later stage, such as 32,128@20000."
            raise BatchSizeError(message, code="not_a_ramp")
        begins = [int(begin or 0) for _, begin in stages]
        for former, later in pairwise(begins):
            if later <= former:
                message = f"in {text!r}, the stage at {later} must begin after the previous stage, at {former}."
                raise BatchSizeError(message, code="stages_out_of_order")
        lengths = [later - former for former, later in pairwise(begins)]
        return cls(*((size, length) for (size, _), length in zip(stages, [*lengths, None], strict=True)))

    @property
    def notation(self) -> str:
        """The ramp in the format that `parse` reads."""
        begins = accumulate((length or 0 for _, length in self.stages), initial=0)
        sizes = zip(self.sizes, begins, strict=False)  # `begins` has one entry more: the end of the last stage
        return ",".join(f"{size}@{begin}" if begin else f"{size}" for size, begin in sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of one step, stage by stage."""
        return tuple(size for size, _ in self.stages)

    @property
    def num_samples(self) -> int:
        """Samples from the beginning of the run to the beginning of the last stage."""
        return sum(length for _, length in self.stages if length is not None)

    def at(self, num_samples: int) -> int:
        """Return the effective batch size of a step that begins after `num_samples` samples of the run."""
        for size, length in self.stages:
            if length is None or num_samples < length:
                return size
            num_samples -= length
        raise AssertionError(self)  # the last stage has no end

    def steps_of(self, num_samples: int) -> int:
        """Return the number of steps of the first `num_samples` samples of the run, rounded up."""
        checked_int("num_samples", num_samples, minimum=0)
        done = steps = end = 0
        for size, length in self.stages:
            end = num_samples if length is None else min(num_samples, end + length)
            # The last step of the previous stage may reach into this stage.
            stage_steps = ceil_div(max(0, end - done), size)
            steps, done = steps + stage_steps, done + stage_steps * size
        return steps

    def __str__(self) -> str:
        """Return the stages as text: `64 for 100,000 samples, then 256`."""
        return ", then ".join(
            f"{size:,}" if length is None else f"{size:,} for {length:,} samples" for size, length in self.stages
        )


def sizes_of(effective_batch_size: int | BatchRamp) -> tuple[int, ...]:
    """Return the samples of one step in each stage; a plain size is one stage."""
    return effective_batch_size.sizes if isinstance(effective_batch_size, BatchRamp) else (effective_batch_size,)


Schedule = Callable[[int], float]
"""Function (optimizer step, from 0 on) -> the factor of the learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """A factor that rises linearly from `start_factor` to 1 over `num_steps` steps, then stays 1.

    Args:
        num_steps: steps before the factor is 1. See `steps_of_samples` and `steps_of_epochs`.
        start_factor: factor of step 0, from 0 to 1. With 0 the first step changes nothing. Goyal et al. 2017 start at
            the rate of the base batch size, with the factor 1 / `ScaledRate.factor`.
    """

    num_steps: int
    start_factor: float

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, minimum=0)
        _check_fraction("start_factor", self.start_factor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.start_factor + (1.0 - self.start_factor) * _progress(step, self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """A factor that falls from 1 to `floor` along half a cosine over `num_steps` steps, then stays `floor`.

    Source: Loshchilov and Hutter 2016, arXiv 1608.03983, without restarts. Unlike torch's `CosineAnnealingLR`, it
    does not rise again after the last step.

    Args:
        num_steps: steps before the factor is `floor`.
        floor: last factor, from 0 to 1.
    """

    num_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, minimum=0)
        _check_fraction("floor", self.floor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * _progress(step, self.num_steps))) / 2.0


@dataclass(frozen=True, slots=True)
class SequentialSchedule:
    """Several schedules in sequence, each counting from its own step 0; made by `join_schedules`."""

    parts: tuple[WarmUp | Cosine, ...]

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step` from the schedule that covers it; after the end, from the last schedule."""
        *former, last = self.parts
        for part in former:
            if step < part.num_steps:
                return part(step)
            step -= part.num_steps
        return last(step)


def join_schedules(
    first: WarmUp | Cosine | SequentialSchedule, *rest: WarmUp | Cosine | SequentialSchedule
) -> SequentialSchedule:
    """Return a schedule that runs the given schedules in sequence, each from its own step 0 (as `SequentialLR`).

    `join_schedules(WarmUp(num_steps=500, start_factor=0.1), Cosine(num_steps=9500, floor=0.1))`.

    Raises:
        UserError: a part is not a schedule of this module.
    """
    parts: list[WarmUp | Cosine] = []
    for part in (first, *rest):
        is_valid = isinstance(part, (WarmUp, Cosine, SequentialSchedule))
        require(is_valid, "schedule", part, "a WarmUp, a Cosine, or a result of join_schedules")
        parts.extend(part.parts if isinstance(part, SequentialSchedule) else (part,))
    return SequentialSchedule(tuple(parts))


def steps_of_samples(num_samples: int, *, effective_batch_size: int | BatchRamp) -> int:
    """Return the number of optimizer steps for `num_samples` samples, over all ranks, rounded up.

    With a larger batch, keep a warm-up's length in samples, the unit of time in the SDE of Malladi et al. 2022.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_samples` is negative.
    """
    if isinstance(effective_batch_size, BatchRamp):
        return effective_batch_size.steps_of(num_samples)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    checked_int("num_samples", num_samples, minimum=0)
    return ceil_div(num_samples, effective_batch_size)


def steps_of_epochs(num_epochs: float, *, samples_per_epoch: int, effective_batch_size: int) -> int:
    """Return the number of optimizer steps of `num_epochs` epochs, rounded up; a smaller last batch is also a step.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_epochs` or `samples_per_epoch` is negative.
    """
    check_not_negative("num_epochs", num_epochs)
    steps_per_epoch = steps_of_samples(samples_per_epoch, effective_batch_size=effective_batch_size)
    exact = num_epochs * steps_per_epoch
    nearest = round(exact)
    # 0.1 epochs of 30 steps are 3 steps, although 0.1 * 30 > 3 in floating point
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact)


def attach_schedule(optimizer: "torch.optim.Optimizer", schedule: Schedule) -> "LambdaLR":
    """Return a torch scheduler that multiplies each group's learning rate by `schedule(step)`.

    Call the scheduler's `step` once after each optimizer step; its `last_epoch` counts optimizer steps. Its state_dict
    contains only the step and the base rates, so it loads with `weights_only=True`. It does not contain the schedule: a
    resumed run uses the schedule that is passed here.
    """
    from torch.optim.lr_scheduler import LambdaLR  # noqa: PLC0415 (command lines parse ramps, before torch is imported)

    # LambdaLR saves and restores the __dict__ of a callable object; a partial has an empty __dict__.
    return LambdaLR(optimizer, partial(schedule))


def seesaw(num_samples: int, *, effective_batch_size: int, num_doublings: int) -> tuple[BatchRamp, Schedule]:
    """Return a ramp and learning rates for Adam that replace a cosine decay over `num_samples` samples.

    Where the cosine has halved the rate once more, the batch doubles and the rate is divided by sqrt 2 (Seesaw, Meterez
    et al. 2025, arXiv 2510.14717). Limits: below the critical batch size; the rate never reaches 0.

    Raises:
        BatchSizeError: a stage is shorter than one of its steps.
    """
    halvings = range(1, num_doublings + 1)
    ends = [0, *(round(num_samples * math.acos(2.0 ** (1 - number) - 1.0) / math.pi) for number in halvings)]
    lengths = [*(end - begin for begin, end in pairwise(ends)), None]
    ramp = BatchRamp(*((effective_batch_size * 2**number, length) for number, length in enumerate(lengths)))
    begins = [ramp.steps_of(end) for end in ends[1:]]
    return ramp, lambda step: 2.0 ** (-sum(step >= begin for begin in begins) / 2)


def _progress(step: int, num_steps: int) -> float:
    """Return the fraction of `num_steps` that is complete before `step`, from 0 to 1."""
    checked_int("step", step, minimum=0)
    # Compare first, to avoid a division by 0.
    return 1.0 if step >= num_steps else step / num_steps


def check_not_negative(name: str, value: float) -> None:
    """Raise a `UserError` if a number is negative or not finite."""
    # NaN fails every comparison, so it is refused too.
    if not 0.0 <= value < math.inf:
        message = f"{name}={value} must be a finite number that is not negative."
        raise UserError(message, code="negative")


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        message = f"{name}={value} must be from 0 to 1."
        raise UserError(message, code="not_a_fraction")
