"""The compared ways of using devices, as frozen records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from anybatch.core.geometry import ceil_div
from anybatch.diagnostics.comparison import loops
from anybatch.diagnostics.comparison.loops import lines_changed
from anybatch.errors import BatchSizeError

Cut = Literal["small", "whole", "micro-batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of using devices.

    Attributes:
        name: its name in tables.
        strategy: the engine's strategy; None: a loop by hand, for ways without the engine.
        num_devices: devices that it needs.
        num_ranks: number of processes.
        num_samples: samples of one update.
        micro_batch_size: maximum samples per forward and backward on a rank.
        lines_by_hand: changed lines in a plain loop.
        lines_with_anybatch: changed lines with anybatch.
        unmeasured: why it is not measured; empty if it is.
    """

    name: str
    strategy: str | None
    num_devices: int
    num_ranks: int
    num_samples: int
    micro_batch_size: int
    lines_by_hand: int
    lines_with_anybatch: int
    unmeasured: str = ""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the largest rank share."""
        return ceil_div(ceil_div(self.num_samples, self.num_ranks), self.micro_batch_size)


_WAYS: tuple[tuple[str, str | None, bool, Cut, Callable[..., None]], ...] = (
    ("small batch", "single", False, "small", loops.plain),
    ("native", "single", False, "whole", loops.plain),
    ("accumulated", "single", False, "micro-batches", loops.accumulated),
    ("DataParallel", "data_parallel", True, "whole", loops.data_parallel),
    ("DDP", "ddp", True, "whole", loops.ddp),
    ("DDP without no_sync", None, True, "micro-batches", loops.ddp_without_no_sync),
    ("DDP accumulated", "ddp", True, "micro-batches", loops.ddp_accumulated),
    ("all_reduce accumulated", "all_reduce", True, "micro-batches", loops.ddp_accumulated),
    ("ZeRO-1 accumulated", "zero1", True, "micro-batches", loops.zero1),
    ("FSDP accumulated", "fsdp", True, "micro-batches", loops.fsdp),
)
"""Name, strategy, whether it uses all devices, how the batch is cut, and the loop by hand."""


def ways_of(*, effective_batch_size: int, micro_batch_size: int, num_devices: int) -> tuple[Way, ...]:
    """Return the ways of training with one effective batch size."""
    if not 1 <= micro_batch_size <= effective_batch_size:
        message = f"{micro_batch_size=} must be from 1 to the {effective_batch_size} samples of the batch."
        raise BatchSizeError(message, effective_batch_size=effective_batch_size, micro_batch_size=micro_batch_size)
    if num_devices > effective_batch_size:
        message = f"{effective_batch_size=} is less than one sample for each of {num_devices} devices."
        raise BatchSizeError(message, effective_batch_size=effective_batch_size, world_size=num_devices)
    with_anybatch = lines_changed(loops.with_engine)
    ways = []
    for name, strategy, uses_all, cut, loop in _WAYS:
        num_ranks = num_devices if uses_all and strategy != "data_parallel" else 1
        num_samples = micro_batch_size if cut == "small" else effective_batch_size
        share = ceil_div(num_samples, num_ranks)
        unmeasured = ""
        if uses_all and num_devices == 1:
            unmeasured = "it needs several devices, and one is used"
        elif cut == "micro-batches" and micro_batch_size >= share:
            unmeasured = f"a share of {share} samples is one micro-batch, so nothing is accumulated"
        ways.append(
            Way(
                name=name,
                strategy=strategy,
                num_devices=num_devices if uses_all else 1,
                num_ranks=num_ranks,
                num_samples=num_samples,
                micro_batch_size=min(share, micro_batch_size if cut == "micro-batches" else share),
                lines_by_hand=lines_changed(loop),
                lines_with_anybatch=0 if loop is loops.plain else with_anybatch,
                unmeasured=unmeasured,
            )
        )
    return tuple(ways)
