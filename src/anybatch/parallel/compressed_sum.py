"""Sums over ranks whose messages are in bf16 and whose additions are in float32.

An all-reduce in bf16 adds in bf16: each of its additions is rounded, the more the more ranks there are. Here each rank
owns a part of the tensor. It is sent all other ranks' numbers for that part in bf16, adds them up in float32, and sends
the rounded sum to all. So a number is rounded twice, on however many ranks: once when it is sent, once as a sum.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from anybatch.errors import CompositionError, UserError
from anybatch.parallel.strategy import ReductionObserver

Compression = Literal["bf16"] | None


class CompressedSum:
    """Sums one flat float32 tensor over ranks, in two collectives.

    All memory is taken at once, as much as that of the tensor: a rank that has run out of it can still take part.

    Args:
        flat: shape (numbers,), float32; the sum takes its place, the same on all ranks, bit for bit.
        rank: of this process.
        world_size: number of ranks.
        group: of these ranks; None for the default group.
    """

    def __init__(
        self, flat: torch.Tensor, rank: int, world_size: int, group: "dist.ProcessGroup | None" = None
    ) -> None:
        self._flat = flat
        self._rank = rank
        self._group = group
        size = -(-len(flat) // world_size)
        self._total = torch.zeros(size, dtype=torch.float32, device=flat.device)
        self._own = torch.zeros(size, dtype=torch.bfloat16, device=flat.device)
        # The last part may be shorter: what is behind it stays zero until the sums take their place.
        self._sent = torch.zeros(world_size, size, dtype=torch.bfloat16, device=flat.device)
        self._received = torch.zeros_like(self._sent)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """What this rank hands to the all-to-all, and to the all-gather."""
        return self._sent.numel() * self._sent.itemsize, self._own.numel() * self._own.itemsize

    def start(self, notify: ReductionObserver | None, bucket: int) -> dist.Work:
        """Round, and send each part to its owner."""
        if notify is not None:
            notify(bucket, self.num_bytes[0], torch.bfloat16, "all_to_all")
        self._sent.view(-1)[: len(self._flat)].copy_(self._flat)
        work: dist.Work | None = dist.all_to_all_single(
            self._received.view(-1), self._sent.view(-1), group=self._group, async_op=True
        )
        assert work is not None
        return work

    def gather(self, notify: ReductionObserver | None, bucket: int) -> dist.Work:
        """Add up the part that this rank owns, once it has arrived, and send the sum to all."""
        if notify is not None:
            notify(bucket, self.num_bytes[1], torch.bfloat16, "all_gather")
        first = self._rank * len(self._total)
        own = self._flat[first : first + len(self._total)]
        self._total.zero_()
        self._total[: len(own)].copy_(own)  # its own numbers have not been rounded
        for rank, part in enumerate(self._received):
            if rank != self._rank:
                self._total.add_(part)
        self._own.copy_(self._total)
        work: dist.Work | None = dist.all_gather(list(self._sent.unbind()), self._own, group=self._group, async_op=True)
        assert work is not None
        return work

    def finish(self) -> None:
        """Put the sums, once they have arrived, into the tensor. Every rank takes the rounded ones, its own too."""
        self._flat.copy_(self._sent.view(-1)[: len(self._flat)])
        self._sent.view(-1)[len(self._flat) :].zero_()


def check_compression(compression: Compression) -> Compression:
    """Return the argument of a strategy.

    Raises:
        UserError: it is neither "bf16" nor None.
    """
    if compression not in ("bf16", None):
        message = f"{compression=} must be 'bf16' (bf16 messages, float32 sums) or None."
        raise UserError(message)
    return compression


def told(compression: Compression) -> dict[str, str]:
    """Return what a strategy says of it among its decisions."""
    if compression is None:
        return {}
    return {"compression": "gradients travel in bf16 and are summed in float32: each is rounded twice, to 2**-9"}


def refuse_wide(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse gradients whose digits a message in bf16 would lose for nothing.

    Raises:
        CompositionError: a parameter is in float64.
    """
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            message = (
                f"compression='bf16' does not compose with float64 parameters ({name!r} is one): their gradients have "
                "53 significant bits, and a message in bf16 keeps 8 of them. Leave compression out, or use float32 "
                "parameters."
            )
            raise CompositionError(message)
