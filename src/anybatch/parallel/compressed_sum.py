"""Sums over ranks with messages in bf16 and additions in float32.

An all-reduce in bf16 adds in bf16, with one rounding per addition, so more ranks mean more error. Here each rank owns a
part of the tensor. It receives all other ranks' numbers for that part in bf16, adds them up in float32, and sends the
rounded sum to all. So a number is rounded twice on any number of ranks: once when sent, once as a sum.
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

    All memory, the size of the tensor, is allocated in advance: a rank that has run out of memory can still take part.

    Args:
        flat: shape (numbers,), float32; replaced by the sum, bitwise the same on all ranks.
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
        # The last part may be shorter: its padding stays zero until the sums replace it.
        self._sent = torch.zeros(world_size, size, dtype=torch.bfloat16, device=flat.device)
        self._received = torch.zeros_like(self._sent)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends in the all-to-all, and in the all-gather."""
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
        """Add up the part that this rank owns, once received, and send the sum to all."""
        if notify is not None:
            notify(bucket, self.num_bytes[1], torch.bfloat16, "all_gather")
        first = self._rank * len(self._total)
        own = self._flat[first : first + len(self._total)]
        self._total.zero_()
        self._total[: len(own)].copy_(own)  # own numbers, not rounded
        for rank, part in enumerate(self._received):
            if rank != self._rank:
                self._total.add_(part)
        self._own.copy_(self._total)
        work: dist.Work | None = dist.all_gather(list(self._sent.unbind()), self._own, group=self._group, async_op=True)
        assert work is not None
        return work

    def finish(self) -> None:
        """Write the received sums into the tensor. Every rank uses the rounded ones, also for its own part."""
        self._flat.copy_(self._sent.view(-1)[: len(self._flat)])
        self._sent.view(-1)[len(self._flat) :].zero_()


def check_compression(compression: Compression) -> Compression:
    """Return the compression argument of a strategy; refuse values other than "bf16" and None."""
    if compression not in ("bf16", None):
        message = f"{compression=} must be 'bf16' (bf16 messages, float32 sums) or None."
        raise UserError(message)
    return compression


def told(compression: Compression) -> dict[str, str]:
    """Return the strategy's decision about compression."""
    if compression is None:
        return {}
    return {"compression": "gradients travel in bf16 and are summed in float32: each is rounded twice, to 2**-9"}


def refuse_wide(parameters: dict[str, nn.Parameter]) -> None:
    """Raise a `CompositionError` for float64 gradients, whose precision a bf16 message would waste."""
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            message = (
                f"compression='bf16' does not compose with float64 parameters ({name!r} is one): their gradients have "
                "53 significant bits, and a message in bf16 keeps 8 of them. Leave compression out, or use float32 "
                "parameters."
            )
            raise CompositionError(message)
