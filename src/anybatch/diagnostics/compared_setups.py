"""The training setups that `compare` runs, such as accumulation on one device, or DDP on several."""

from dataclasses import dataclass
from typing import Literal

from anybatch.core.geometry import ceil_div
from anybatch.errors import BatchSizeError

BatchKind = Literal["small", "whole", "micro-batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One combination of devices, strategy and micro-batch size."""

    name: str
    strategy: str | None  # of the engine; None: DDP that reduces after every micro-batch (`ReduceEveryMicroBatch`)
    num_devices: int
    num_ranks: int
    num_samples: int  # of one update
    micro_batch_size: int  # at most, per forward on a rank
    lines_by_hand: int  # changed lines in a plain loop, counted by benchmarks/lines_by_hand.py
    lines_with_anybatch: int
    unmeasured: str = ""  # why it is not measured


_WAYS: tuple[tuple[str, str | None, bool, BatchKind, int], ...] = (
    ("small batch", "single", False, "small", 0),
    ("native", "single", False, "whole", 0),
    ("accumulated", "single", False, "micro-batches", 2),
    ("DataParallel", "data_parallel", True, "whole", 2),
    ("DDP", "ddp", True, "whole", 2),
    ("DDP without no_sync", None, True, "micro-batches", 4),
    ("DDP accumulated", "ddp", True, "micro-batches", 5),
    ("all_reduce accumulated", "all_reduce", True, "micro-batches", 5),
    ("ZeRO-1 accumulated", "zero1", True, "micro-batches", 7),
    ("FSDP accumulated", "fsdp", True, "micro-batches", 12),
)
"""Name, strategy, whether it uses all devices, which batch it uses, and the lines by hand."""
_LINES_WITH_ANYBATCH = 3


def training_setups(*, effective_batch_size: int, micro_batch_size: int, num_devices: int) -> tuple[TrainingSetup, ...]:
    """Return the training setups to compare at one effective batch size."""
    if not 1 <= micro_batch_size <= effective_batch_size:
        message = f"{micro_batch_size=} must be between 1 and {effective_batch_size}, the samples in the batch."
        given = {"effective_batch_size": effective_batch_size, "micro_batch_size": micro_batch_size}
        raise BatchSizeError(message, code="size_out_of_range", **given)
    if num_devices > effective_batch_size:
        message = f"{effective_batch_size=} is less than one sample for each of {num_devices} devices."
        raise BatchSizeError(
            message, code="too_few_samples", effective_batch_size=effective_batch_size, world_size=num_devices
        )
    setups = []
    for name, strategy, uses_all, kind, lines in _WAYS:
        num_ranks = num_devices if uses_all and strategy != "data_parallel" else 1
        num_samples = micro_batch_size if kind == "small" else effective_batch_size
        share = ceil_div(num_samples, num_ranks)
        unmeasured = ""
        if uses_all and num_devices == 1:
            unmeasured = "it needs several devices, but only one is used"
        elif kind == "micro-batches" and micro_batch_size >= share:
            unmeasured = f"the {share} samples of a rank are one micro-batch, so nothing is accumulated"
        setups.append(
            TrainingSetup(
                name=name,
                strategy=strategy,
                num_devices=num_devices if uses_all else 1,
                num_ranks=num_ranks,
                num_samples=num_samples,
                micro_batch_size=min(share, micro_batch_size if kind == "micro-batches" else share),
                lines_by_hand=lines,
                lines_with_anybatch=_LINES_WITH_ANYBATCH if lines else 0,
                unmeasured=unmeasured,
            )
        )
    return tuple(setups)
