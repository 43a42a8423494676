"""The messages of an effective batch: sums next to the gradients, whether ranks are in the same step, gathered rows.

Sums alone show whether ranks agree on the step: each sends a digest h and h * h, and all digests are equal if and only
if (sum of h)^2 = ranks * (sum of h * h), by the Cauchy-Schwarz inequality. With h below 2**20 the sums are exact in
float64 on up to 8192 ranks.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from anybatch.parallel.control import PendingMessage
from anybatch.parallel.roll_call import NUM_DIGESTS
from anybatch.parallel.world import World

_HOOKS = 2.0**-20  # exact, and less than 1 in a sum over a million ranks
_NUM_LEAVING = 2  # flags: whether a rank has run out of memory, and whether it has failed


class StepAbortedError(Exception):
    """A rank ran out of memory: all ranks discard the step's gradients, and no collective is pending.

    Raised on all ranks for the same effective batch. The engine retries it with smaller micro-batches.
    """


class StepFailedError(Exception):
    """A rank has left the effective batch with an error: the gradients are invalid, and no collective is pending.

    Raised on all other ranks for the same effective batch. The rank has published its error.
    """


class StepsDifferError(Exception):
    """Ranks disagree about the step: the gradients are invalid, and no collective is pending.

    Raised on all ranks; `differing` are the indices of the digests of `RollCall.digests` that differ.
    """

    def __init__(self, differing: tuple[int, ...]) -> None:
        super().__init__(differing)
        self.differing = differing


class StepAgreement:
    """One message in the control group, sent once per effective batch by every rank that sums gradients.

    It carries flags: the parameters that this rank has used, whether it has hooks on parameters to run, and whether it
    leaves the effective batch; and digests of its step (`RollCall.digests`). On a CPU the numbers of the report are
    included. On an accelerator the numbers are sent separately, in the data group: otherwise the host would have to
    wait for the device before it could read the flags. With `aborts`, it will be the message of a rank that leaves, see
    `reset_to_abort`.
    """

    def __init__(
        self, numbers: Float[Tensor, " numbers"], flags: Sequence[bool], world: World, *, aborts: bool = False
    ) -> None:
        self._world = world
        self._numbers = numbers
        roll_call = world.roll_call
        # One number for both: whether it leaves, and as a fraction whether it has hooks.
        leaves = float(aborts) or (_HOOKS if roll_call is not None and roll_call.has_hooks else 0.0)
        self._own: list[float] = [*flags, leaves, False]
        self._num_together = len(numbers) if numbers.device.type == "cpu" else 0
        digests, shards = ((0,) * NUM_DIGESTS, 0)
        if not aborts and roll_call is not None:
            digests, shards = roll_call.digests, roll_call.shards_digest
        # Shards of weights are equal only within a data group: each group has a separate entry.
        num_groups = len(world.data_groups) if world.has_model_groups else 0
        by_group = [shards if place == world.data_group else 0 for place in range(num_groups)]
        words = [float(word) for digest in (*digests, *by_group) for word in (digest, digest * digest)]
        self._num_words = len(words)
        # Number of ranks that have sent each digest.
        self._brought_by = [world.num_processes] * NUM_DIGESTS + [world.size] * len(by_group)
        if not world.speaks:  # all processes of a rank have computed its numbers
            numbers.zero_()
        # Flags have the dtype of the numbers that may be included; their sums are exact in it.
        own = torch.tensor([*self._own, *words], dtype=torch.float64)
        self._message = torch.cat([numbers.double(), own]) if self._num_together else own
        self._works: list[PendingMessage | dist.Work | None] = []

    def start(self) -> None:
        """Send the message; numbers in the data group follow everything that was started there."""
        if self._world.roll_call is not None:
            self._world.roll_call.has_agreed = True
        self._works = [self._world.start_sum(self._message)]
        if not self._num_together:
            # Over all processes: a process that does not represent a rank has set its numbers to zero.
            self._works.append(dist.all_reduce(self._numbers, async_op=True))

    def wait(self) -> tuple[Float[Tensor, " numbers"], list[bool]]:
        """Return the summed numbers, and for each flag whether any rank has set it.

        Raises:
            StepFailedError: a rank has left with an error.
            StepAbortedError: a rank has run out of memory.
            StepsDifferError: ranks disagree about the step.
        """
        # Not kept: the message of a leaving rank stays alive, and would keep the process group.
        works, self._works = self._works, []
        for work in works:
            if work is not None:
                work.wait()
        numbers = self._message[: self._num_together] if self._num_together else self._numbers
        if works[0] is None:  # the other ranks are simulated, and the message may have no data
            sums, words = self._own, []
        else:
            both = self._message[self._num_together :].tolist()
            sums, words = both[: -self._num_words], both[-self._num_words :]
        *used, num_leaving, num_failed = sums
        if num_failed:
            raise StepFailedError
        if num_leaving >= 1:
            raise StepAbortedError
        differing = {
            min(number, NUM_DIGESTS - 1)  # weights, whole or in shards
            for number, size in enumerate(self._brought_by[: len(words) // 2])
            if int(words[2 * number]) ** 2 != size * int(words[2 * number + 1])
        }
        if differing:
            raise StepsDifferError(tuple(sorted(differing)))
        if self._world.roll_call is not None:
            self._world.roll_call.any_hooks = num_leaving > 0
        return numbers, [flag > 0 for flag in used]

    def reset_to_abort(self, *, failed: bool) -> None:
        """Make it the message of a rank that leaves: nothing used, nothing to report. Allocates nothing.

        Unless the rank `failed`, it has run out of memory, and the ranks retry.
        """
        self._own[:] = [False] * len(self._own)
        self._own[-1 if failed else -2] = True
        self._message.zero_()
        place = len(self._message) - self._num_words - (1 if failed else _NUM_LEAVING)
        self._message[place : place + 1].fill_(1.0)
        self._numbers.zero_()


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shape of a tensor's rows, without the first axis, and their dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GatherBuffers:
    """The memory of a gather, as bytes: rows of this rank, padded to those of the largest, and of all ranks."""

    sent: torch.Tensor
    received: torch.Tensor


def make_gather_buffers(layouts: Sequence[RowLayout], sizes: Sequence[int], world: World) -> GatherBuffers | None:
    """Allocate the buffers of `gather_rows` for the row layouts and each rank's number of rows; None on one rank.

    Separate from the gather, because a rank that runs out of memory within the gather would leave the others waiting.
    """
    if world.size == 1:
        return None
    # Every rank sends the same number of bytes, the largest share: an all-gather needs equal shares.
    sent = torch.zeros(max(sizes) * sum(layout.num_bytes for layout in layouts), dtype=torch.uint8, device=world.device)
    return GatherBuffers(sent, sent.new_empty(world.size * len(sent)))


def gather_rows(
    pieces: Sequence[Sequence[torch.Tensor]],
    layouts: Sequence[RowLayout],
    sizes: Sequence[int],
    world: World,
    notify: Callable[[int], AbstractContextManager[object]],
    *,
    buffers: GatherBuffers | None,
) -> list[torch.Tensor]:
    """Return each tensor with the rows of all ranks, rank by rank.

    Everything travels as bytes in one buffer, so that tensors of several types and ranks with different numbers of
    rows, or none, take one all-gather. `pieces` are this rank's, in row order, each with one tensor (rows, *shape) per
    layout; `sizes` are the numbers of rows of all ranks; `notify` maps the number of bytes that this rank sends to a
    context around the collective.
    """
    if buffers is None:
        return [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    sent, received, most = buffers.sent, buffers.received, max(sizes)
    start = 0
    for number, layout in enumerate(layouts):
        own = sent[start : start + sizes[world.rank] * layout.num_bytes]
        filled = 0
        for piece in pieces if len(own) else ():
            # As bytes, so that tensors of different dtypes can travel in one message.
            row_bytes = piece[number].detach().contiguous().flatten().view(torch.uint8)
            own[filled : filled + len(row_bytes)].copy_(row_bytes)
            filled += len(row_bytes)
        start += most * layout.num_bytes
    with notify(len(sent)), world.collective():
        # The chunks are views, so every rank's bytes arrive in place, without a copy.
        dist.all_gather(list(received.chunk(world.size)), sent, group=world.group)
    found, start = [], 0
    by_rank = received.unflatten(0, (world.size, -1))
    for layout in layouts:
        parts = [by_rank[rank, start : start + size * layout.num_bytes] for rank, size in enumerate(sizes)]
        found.append(torch.cat(parts).view(layout.dtype).reshape(sum(sizes), *layout.shape))
        start += most * layout.num_bytes
    return found
