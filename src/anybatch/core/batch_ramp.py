"""Chapter 26: an effective batch size that grows in stages during a run.

A ramp is a stateless function of the number of samples used so far: a run that is resumed anywhere, at any world size,
continues in the same stage, and the order of the samples does not depend on it.
"""

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Self

from anybatch.core.geometry import ceil_div
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import BatchSizeError

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
            raise BatchSizeError(message)
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
                raise BatchSizeError(message)
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
            raise BatchSizeError(message)
        begins = [int(begin or 0) for _, begin in stages]
        for former, later in pairwise(begins):
            if later <= former:
                message = f"{text!r} has a stage that begins at {later}, not after the one before it, at {former}."
                raise BatchSizeError(message)
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
            raise BatchSizeError(message)
        checked_int(f"samples of stage {number}", num_samples, error=BatchSizeError)
        if num_samples < size:
            message = (
                f"stage {number} of a ramp has steps of {size} samples and lasts for {num_samples}: not one whole "
                "step. Make it longer, its steps smaller, or leave it out."
            )
            raise BatchSizeError(message)


def sizes_of(effective_batch_size: int | BatchRamp) -> tuple[int, ...]:
    """Return the samples of one step, stage by stage; a plain size is one stage."""
    return effective_batch_size.sizes if isinstance(effective_batch_size, BatchRamp) else (effective_batch_size,)
