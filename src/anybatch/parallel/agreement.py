"""The messages of an effective batch: whether ranks are in the same step, sums for the report, and gathered rows."""

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from anybatch.parallel.call_tracker import NUM_DIGESTS
from anybatch.parallel.control import Message
from anybatch.parallel.world import World

_DIGEST_BYTES = 8 * NUM_DIGESTS
_CONTINUES, _OUT_OF_MEMORY = range(2)
"""The first byte of a rank's message."""


class StepAbortedError(Exception):
    """A rank ran out of memory: all ranks discard the step's gradients, and no collective is pending.

    Raised on all ranks for the same effective batch. The engine retries it with smaller micro-batches.
    """


class StepsDifferError(Exception):
    """Ranks disagree about the step: the gradients are invalid, and no collective is pending.

    Raised on all ranks; `differing` has the indices in `CallTracker.digests` of the digests that differ.
    """

    def __init__(self, differing: tuple[int, ...]) -> None:
        super().__init__(differing)
        self.differing = differing


class StepAgreement:
    """One message in the control group, sent once per effective batch by every rank that sums gradients.

    It contains whether this rank aborts the step, whether it has hooks to run, the parameters that it has used
    (`flags`), checksums of its step (`CallTracker.digests`), and on a CPU the sums of the report. On an accelerator the
    default group adds up these sums, so that the host can send the flags before the device has computed the sums.
    """

    def __init__(self, report_sums: Float[Tensor, " sums"], flags: Sequence[bool], world: World) -> None:
        self._report_sums, self._flags, self._world = report_sums, flags, world
        self._on_cpu = report_sums.device.type == "cpu"
        self._state = _CONTINUES
        self._message: Message | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Send the message; on an accelerator, also start adding up the report in the default group."""
        if (call_tracker := self._world.call_tracker) is not None:
            call_tracker.has_agreed = True
            flags = bytes([self._state, call_tracker.has_hooks, *self._flags])
            sums = array("d", self._report_sums.tolist() if self._on_cpu else ())
            self._message = self._world.start_gather(
                flags + sums.tobytes() + array("q", call_tracker.digests).tobytes()
            )
        if not self._on_cpu:
            self._work = dist.all_reduce(self._report_sums, async_op=True)

    def wait(self) -> tuple[Float[Tensor, " sums"], list[bool]]:
        """Return the sums of the report over all ranks, and for each flag whether any rank has set it.

        Raises:
            StepAbortedError: a rank has run out of memory.
            StepsDifferError: ranks disagree about the step.
        """
        message, self._message = self._message, None  # not kept, because it references the process group
        rows = [] if message is None else self._world.finish_gather(message)
        if self._work is not None:
            self._work.wait()
        if self._world.call_tracker is None:  # the other ranks are simulated
            return self._report_sums, list(self._flags)
        if any(row[0] == _OUT_OF_MEMORY for row in rows):
            raise StepAbortedError
        digests = zip(*(array("q", row[-_DIGEST_BYTES:]) for row in rows), strict=True)
        if differing := tuple(index for index, of_ranks in enumerate(digests) if len(set(of_ranks)) > 1):
            raise StepsDifferError(differing)
        self._world.call_tracker.any_hooks = any(row[1] for row in rows)
        sums_start = 2 + len(self._flags)
        used = 0
        for row in rows:
            used |= int.from_bytes(row[2:sums_start])
        flags = [bool(flag) for flag in used.to_bytes(len(self._flags))]
        if not self._on_cpu:
            return self._report_sums, flags
        sums = [0.0] * len(self._report_sums)
        for row in rows:  # in rank order, so that all ranks get the same bits
            sums = [total + x for total, x in zip(sums, array("d", row[sums_start:-_DIGEST_BYTES]), strict=True)]
        return self._report_sums.new_tensor(sums), flags

    def reset_to_abort(self) -> None:
        """Turn this into the message of a rank that has run out of memory."""
        self._state = _OUT_OF_MEMORY
        self._report_sums.zero_()


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shape of a tensor's rows, without the first axis, and their dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


def make_gather_buffers(layouts: Sequence[RowLayout], sizes: Sequence[int], world: World) -> list[Tensor] | None:
    """Allocate the bytes that `gather_rows` sends and receives; None on one rank.

    Separate from the gather, because a rank that runs out of memory within the gather would leave other ranks waiting.
    """
    if world.size == 1:
        return None
    # Every rank sends the same number of bytes, the largest share: an all-gather needs equal shares.
    sent = torch.zeros(max(sizes) * sum(layout.num_bytes for layout in layouts), dtype=torch.uint8, device=world.device)
    return [sent, sent.new_empty(world.size * len(sent))]


def gather_rows(
    pieces: Sequence[Sequence[torch.Tensor]],
    layouts: Sequence[RowLayout],
    sizes: Sequence[int],
    world: World,
    notify: Callable[[int], AbstractContextManager[object]],
    *,
    buffers: list[Tensor] | None,
) -> list[torch.Tensor]:
    """Return one tensor per layout with the rows of all ranks, rank 0 first, gathered as bytes in one all-gather.

    `pieces` are this rank's rows, in order, each piece with one tensor (rows, *shape) per layout; `sizes` are the
    numbers of rows of all ranks; `notify(bytes that this rank sends)` returns a context around the collective.
    """
    if buffers is None:
        return [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    (sent, received), max_rows = buffers, max(sizes)
    start = 0
    for number, layout in enumerate(layouts):
        rows = sent[start : start + sizes[world.rank] * layout.num_bytes]
        filled = 0
        for piece in pieces if len(rows) else ():
            # As bytes, so that one message can contain tensors of different dtypes.
            row_bytes = piece[number].detach().contiguous().flatten().view(torch.uint8)
            rows[filled : filled + len(row_bytes)].copy_(row_bytes)
            filled += len(row_bytes)
        start += max_rows * layout.num_bytes
    with notify(len(sent)), world.collective():
        # The chunks are views, so every rank's bytes arrive in place, without a copy.
        dist.all_gather(list(received.chunk(world.size)), sent)
    gathered, start = [], 0
    by_rank = received.unflatten(0, (world.size, -1))
    for layout in layouts:
        parts = [by_rank[rank, start : start + size * layout.num_bytes] for rank, size in enumerate(sizes)]
        gathered.append(torch.cat(parts).view(layout.dtype).reshape(sum(sizes), *layout.shape))
        start += max_rows * layout.num_bytes
    return gathered
