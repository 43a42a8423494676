"""The collectives of FSDP2, with reports of reductions and without waiting for ranks that will not come."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.parallel.roll_call import RollCall
from anybatch.parallel.strategy import ReductionObserver

# Renamed in torch 2.13, where the old names warn.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class _Memory:
    """FSDP2's interface for allocating the input and output memory of collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for `size` numbers."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Memory):
    """Gathers the weights of a group of parameters.

    `roll_call` checks for failed ranks while this one waits; None for accelerators, where torch waits.
    """

    def __init__(self, roll_call: RollCall | None) -> None:
        self._roll_call = roll_call

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 (torch's protocol)
    ) -> dist.Work | None:
        """Gather the shards of all ranks of the group."""
        is_watched = self._roll_call is not None and not async_op
        work: dist.Work | None = getattr(dist, _ALL_GATHER)(
            output_tensor, input_tensor, group=group, async_op=async_op or is_watched
        )
        if self._roll_call is None or async_op or work is None:
            return work
        self._roll_call.wait(work)
        return None


class ReduceScatter(_Memory):
    """Sums the gradients of a group of parameters; each rank keeps its shard.

    `roll_call` as for `AllGather`; `on_reduction` is a function () -> the observer, or None; `number` is the group's.
    """

    def __init__(
        self, roll_call: RollCall | None, on_reduction: Callable[[], ReductionObserver | None], number: int
    ) -> None:
        self._roll_call = roll_call
        self._on_reduction = on_reduction
        self._number = number

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 (torch's protocol)
    ) -> dist.Work | None:
        """Sum over the ranks of the group."""
        on_reduction = self._on_reduction()
        if on_reduction is not None:
            num_bytes = input_tensor.numel() * input_tensor.itemsize
            on_reduction(self._number, num_bytes, input_tensor.dtype, "reduce_scatter")
        if self._roll_call is None or async_op:
            started: dist.Work | None = getattr(dist, _REDUCE_SCATTER)(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return started
        # Gloo's reduce_scatter is an all-reduce of a copy too, but ignores the timeout.
        work = dist.all_reduce(input_tensor, op=op, group=group, async_op=True)
        assert work is not None
        self._roll_call.wait(work)
        output_tensor.copy_(input_tensor.narrow(0, group.rank() * len(output_tensor), len(output_tensor)))
        return None
