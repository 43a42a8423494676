"""Learning-rate schedules, and effective batch sizes that grow in stages.

A ramp is a stateless function of the number of samples used so far: a run that is resumed anywhere, at any world size,
continues in the same stage, and the order of the samples does not depend on it.

A schedule multiplies the rate by a factor in each step. Every schedule counts optimizer steps; durations in samples or
epochs are converted to steps beforehand.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Protocol, Self

from anybatch.core.geometry import ceil_div, checked_int
from anybatch.errors import BatchSizeError, UserError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

Stage = tuple[int, int | None]
"""Samples of one step, and the number of samples the stage lasts; None for the rest of the run."""
_STAGE: Final = re.compile(r"(?P<size>\d+)(@(?P<begin>\d+))?")


@dataclass(frozen=True, slots=True, init=False)
class BatchRamp:
    """Effective batch sizes in stages, each for a number of samples.

    ```python
    ramp = BatchRamp((64, 100_000), (256, 400_000), (1024, None))
    for batch in ab.batches(dataset, effective_batch_size=ramp, epochs=3):
        engine.step(batch)  # an engine without effective_batch_size: accumulation follows the batch
    ```

    A step belongs to the stage in which it begins, and may reach into the next one; an epoch's last batch may be
    smaller, as always.

    The ramp changes no learning rate, and its two uses need different ones. If it replaces a decay (Smith et al. 2017,
    arXiv 1711.00489), keep the rate constant: the noise of an update is proportional to rate / batch size, so B -> aB
    has the effect of rate -> rate / a, while B is far below the size of the data set and the rate below its limit of
    stability. If it starts a run with small batches (Brown et al. 2020, arXiv 2005.14165), which suffice while the
    noise scale is small (McCandlish et al. 2018, arXiv 1812.06162), scale the rate by a rule: `scale_rate` at each
    size, or `AdaScale`.

    Args:
        *stages: pairs (samples of one step over all ranks, number of samples it lasts); the last has None there.

    Raises:
        BatchSizeError: no stage, a size that is not a whole number of at least 1, a stage that is shorter than one of
            its steps, or a None that is missing in the last stage or present in another.
    """

    stages: tuple[Stage, ...]

    def __init__(self, *stages: Stage) -> None:
        object.__setattr__(self, "stages", stages)
        if not stages:
            message = "a ramp needs stages: BatchRamp((64, 100_000), (256, None)), for example."
            raise BatchSizeError(message, code="no_stages")
        for number, (size, num_samples) in enumerate(stages):
            checked_int(f"effective batch size of stage {number}", size, error=BatchSizeError)
            self._check_length(number, size, num_samples)

    @classmethod
    def in_tokens(cls, *stages: Stage, tokens_per_sample: int) -> Self:
        """Return a ramp whose stages are given in tokens: (tokens of one step, number of tokens it lasts).

        Args:
            *stages: as in `BatchRamp`, in tokens; sizes must be whole samples, lengths are rounded up to them.
            tokens_per_sample: the same in every sample, as in packed windows.

        Raises:
            BatchSizeError: a size is not a multiple of `tokens_per_sample`, or as for `BatchRamp`.
        """
        checked_int("tokens_per_sample", tokens_per_sample, error=BatchSizeError)
        for number, (size, _) in enumerate(stages):
            if size % tokens_per_sample:
                message = (
                    f"stage {number} has {size} tokens a step, and samples have {tokens_per_sample}: not a whole "
                    f"number of samples. The nearest are {size // tokens_per_sample * tokens_per_sample} and "
                    f"{ceil_div(size, tokens_per_sample) * tokens_per_sample} tokens."
                )
                raise BatchSizeError(message, code="no_whole_samples")
        return cls(
            *(
                (size // tokens_per_sample, None if length is None else ceil_div(length, tokens_per_sample))
                for size, length in stages
            )
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the ramp of a text such as `32,128@20000,512@100000`: sizes, and the samples at which each begins.

        Raises:
            BatchSizeError: the text has another form, or as for `BatchRamp`.
        """
        found = [_STAGE.fullmatch(part.strip()) for part in text.split(",")]
        stages = [(int(one["size"]), one["begin"]) for one in found if one is not None]
        if len(stages) != len(found) or stages[0][1] is not None or None in [begin for _, begin in stages[1:]]:
            message = (
                f"{text!r} must be sizes, each but the first with the sample at which it begins: 32,128@20000 is a "
                "batch of 32 samples that grows to 128 after 20,000 samples."
            )
            raise BatchSizeError(message, code="not_a_ramp")
        begins = [int(begin or 0) for _, begin in stages]
        for former, later in pairwise(begins):
            if later <= former:
                message = f"{text!r} has a stage that begins at {later}, not after the one before it, at {former}."
                raise BatchSizeError(message, code="stages_out_of_order")
        lengths = [later - former for former, later in pairwise(begins)]
        return cls(*((size, length) for (size, _), length in zip(stages, [*lengths, None], strict=True)))

    @property
    def notation(self) -> str:
        """The text that `parse` reads."""
        begins = accumulate((length or 0 for _, length in self.stages), initial=0)
        sizes = zip(self.sizes, begins, strict=False)  # the last stage ends, and none begins after it
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
        checked_int("num_samples", num_samples, least=0)
        done = steps = end = 0
        for size, length in self.stages:
            end = num_samples if length is None else min(num_samples, end + length)
            # The last step of the previous stage may reach into this one.
            of_stage = ceil_div(max(0, end - done), size)
            steps, done = steps + of_stage, done + of_stage * size
        return steps

    def __str__(self) -> str:
        """Return the stages in words: `64 for 100,000 samples, then 256`."""
        return ", then ".join(
            f"{size:,}" if length is None else f"{size:,} for {length:,} samples" for size, length in self.stages
        )

    def _check_length(self, number: int, size: int, num_samples: int | None) -> None:
        is_last = number == len(self.stages) - 1
        if is_last or num_samples is None:
            if is_last and num_samples is None:
                return
            what = f"is the last and ends after {num_samples} samples" if is_last else "has no end, and is not the last"
            message = f"stage {number} of a ramp {what}. The last stage, and only that one, has None for its length."
            raise BatchSizeError(message, code="end_of_stage")
        checked_int(f"samples of stage {number}", num_samples, error=BatchSizeError)
        if num_samples < size:
            message = (
                f"stage {number} of a ramp has steps of {size} samples and lasts for {num_samples}: not one whole "
                "step. Make it longer, its steps smaller, or leave it out."
            )
            raise BatchSizeError(message, code="stage_too_short")


def sizes_of(effective_batch_size: int | BatchRamp) -> tuple[int, ...]:
    """Return the samples of one step, stage by stage; a plain size is one stage."""
    return effective_batch_size.sizes if isinstance(effective_batch_size, BatchRamp) else (effective_batch_size,)


Schedule = Callable[[int], float]
"""Function (optimizer step, from 0 on) -> the factor of the learning rate."""


class BoundedSchedule(Protocol):
    """A schedule with a known number of steps: one of the classes below, or several joined by `join_schedules`."""

    @property
    def num_steps(self) -> int | None:
        """Steps until it ends; None if it never does."""
        ...

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Linear from `start_factor` to 1 over `num_steps` steps, then 1.

    Args:
        num_steps: steps before the factor is 1. See `steps_of_samples` and `steps_of_epochs`.
        start_factor: factor of step 0, from 0 to 1. With 0 the first step changes nothing. Goyal et al. 2017 start
            at the rate of the base batch size, 1 / `ScaledRate.factor`.
    """

    num_steps: int
    start_factor: float

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("start_factor", self.start_factor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.start_factor + (1.0 - self.start_factor) * _progress(step, self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same factor in every step.

    Args:
        factor: not negative.
        num_steps: steps until the next schedule begins, if joined with others; None if it never ends.
    """

    factor: float = 1.0
    num_steps: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.num_steps is not None:
            checked_int("num_steps", self.num_steps, least=0)
        _check_not_negative("factor", self.factor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        checked_int("step", step, least=0)
        return self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """From 1 to `floor` along half a cosine over `num_steps` steps, then `floor`.

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
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("floor", self.floor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * _progress(step, self.num_steps))) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDecay:
    """Linear from 1 to `floor` over `num_steps` steps, then `floor`.

    Args:
        num_steps: steps before the factor is `floor`.
        floor: last factor, from 0 to 1.
    """

    num_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("floor", self.floor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return 1.0 - (1.0 - self.floor) * _progress(step, self.num_steps)


@dataclass(frozen=True, slots=True)
class SequentialSchedule:
    """Schedules one after another, each counting from its own step 0; made by `join_schedules`."""

    parts: tuple[BoundedSchedule, ...]

    @property
    def num_steps(self) -> int | None:
        """Steps of all parts together; None if the last part never ends."""
        last = self.parts[-1].num_steps
        return None if last is None else sum(_required_num_steps(part) for part in self.parts)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step` from its part; after the end, from the last part."""
        checked_int("step", step, least=0)
        starts = list(itertools.accumulate((_required_num_steps(part) for part in self.parts[:-1]), initial=0))
        number = sum(start <= step for start in starts) - 1
        return self.parts[number](step - starts[number])


def join_schedules(first: BoundedSchedule, *rest: BoundedSchedule) -> SequentialSchedule:
    """Return one schedule that runs these one after another, each from its own step 0 (like torch's `SequentialLR`).

    `join_schedules(WarmUp(num_steps=500, start_factor=0.1), Cosine(num_steps=9500, floor=0.1))`.

    Args:
        first: the first schedule; the next one begins after its `num_steps`.
        rest: the schedules after it, in order; only the last one may have `num_steps=None`.

    Raises:
        UserError: a schedule that never ends is not the last.
    """
    parts = itertools.chain.from_iterable(
        part.parts if isinstance(part, SequentialSchedule) else (part,) for part in (first, *rest)
    )
    joined = SequentialSchedule(tuple(parts))
    # Check here and not in the middle of a run.
    for part in joined.parts[:-1]:
        _required_num_steps(part)
    return joined


def steps_of_samples(num_samples: int, *, effective_batch_size: int | BatchRamp) -> int:
    """Return the number of optimizer steps that `num_samples` samples take, over all ranks, rounded up.

    A warm-up in samples: `WarmUp(num_steps=steps_of_samples(50_000, effective_batch_size=256), start_factor=0.1)`. Keep
    the number of samples when the batch grows: the SDE of Malladi et al. 2022 measures time in samples, not steps.

    Args:
        num_samples: counted from the beginning of a run.
        effective_batch_size: samples of one step, or a ramp of them; smaller batches at the end of an epoch are
            ignored.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_samples` is negative.
    """
    if isinstance(effective_batch_size, BatchRamp):
        return effective_batch_size.steps_of(num_samples)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    checked_int("num_samples", num_samples, least=0)
    return ceil_div(num_samples, effective_batch_size)


def steps_of_epochs(num_epochs: float, *, samples_per_epoch: int, effective_batch_size: int) -> int:
    """Return the number of optimizer steps of `num_epochs` epochs, rounded up; a smaller last batch is also a step.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_epochs` or `samples_per_epoch` is negative.
    """
    _check_not_negative("num_epochs", num_epochs)
    steps_per_epoch = steps_of_samples(samples_per_epoch, effective_batch_size=effective_batch_size)
    exact = num_epochs * steps_per_epoch
    nearest = round(exact)
    # 0.1 epochs of 30 steps are 3 steps, although 0.1 * 30 > 3 in floating point
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact)


def attach_schedule(optimizer: "torch.optim.Optimizer", schedule: Schedule) -> "LambdaLR":
    """Return a torch scheduler that multiplies each group's learning rate by `schedule(step)`.

    Call its `step` once after each optimizer step; its `last_epoch` counts optimizer steps. Its state_dict has the step
    and the base rates, so it loads with `weights_only=True`. It does not have the schedule: a resumed run uses the
    schedule that is passed here.

    Args:
        optimizer: its groups' learning rates are multiplied by the factor.
        schedule: function (step) -> factor, from step 0 on.
    """
    from torch.optim.lr_scheduler import LambdaLR  # noqa: PLC0415 (command lines parse ramps, before torch is imported)

    # LambdaLR saves and restores the __dict__ of a callable object; the __dict__ of a partial is empty
    return LambdaLR(optimizer, partial(schedule))


def _progress(step: int, num_steps: int) -> float:
    """Return the fraction of `num_steps` that is complete before `step`, from 0 to 1."""
    checked_int("step", step, least=0)
    # In this order, so that 0 steps need no division.
    return 1.0 if step >= num_steps else step / num_steps


def _required_num_steps(part: BoundedSchedule) -> int:
    """Return the steps of a schedule that another one follows; refuse one that never ends."""
    if part.num_steps is None:
        message = f"{part} has num_steps=None, so nothing can follow it. Give it num_steps, or put it last."
        raise UserError(message, code="endless_schedule")
    return part.num_steps


def _check_not_negative(name: str, value: float) -> None:
    # NaN fails every comparison, so it is refused too.
    if not 0.0 <= value < math.inf:
        message = f"{name}={value} must be a finite number that is not negative."
        raise UserError(message, code="negative")


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        message = f"{name}={value} must be from 0 to 1."
        raise UserError(message, code="not_a_fraction")
