"""The last message of an effective batch: numbers that ranks sum beside the gradients, and whether a rank aborts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from anybatch.parallel.process_groups import PendingSum
from anybatch.parallel.world import World


class StepAbortedError(Exception):
    """A rank ran out of memory, and every rank knows it: no collective is under way, and the gradients are worthless.

    Raised on all ranks for the same effective batch. The engine repeats it in smaller micro-batches.
    """


class StepAgreement:
    """One message in the control group, sent once per effective batch by every rank that sums gradients.

    It carries flags: which parameters this rank has used, and whether it aborts. On a CPU the numbers of the report
    travel with them. On an accelerator the numbers travel by themselves, in the data group: if they travelled with the
    flags, the host would have to wait for the device before it could read these.

    Args:
        numbers: on the rank's device, shape (numbers,); summed over ranks.
        flags: summed over ranks too.
        world: the ranks.
        aborts: this rank has run out of memory, and its gradients are incomplete.
    """

    def __init__(
        self, numbers: Float[Tensor, " numbers"], flags: Sequence[bool], world: World, *, aborts: bool = False
    ) -> None:
        self._world = world
        self._numbers = numbers
        self._own = [*flags, aborts]
        self._num_together = len(numbers) if numbers.device.type == "cpu" else 0
        # In the type of the numbers that may travel with them; sums of flags are exact in it.
        own_flags = torch.tensor(self._own, dtype=torch.float64)
        self._message = torch.cat([numbers.double(), own_flags]) if self._num_together else own_flags
        self._works: list[PendingSum | dist.Work | None] = []

    def start(self) -> None:
        """Send it. What travels in the data group does so behind all that has been started there."""
        self._works = [self._world.start_sum(self._message)]
        if not self._num_together:
            self._works.append(dist.all_reduce(self._numbers, async_op=True))

    def wait(self) -> tuple[Float[Tensor, " numbers"], list[bool]]:
        """Return the summed numbers, and for each flag whether any rank has set it.

        Raises:
            StepAbortedError: a rank has aborted.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        numbers = self._message[: self._num_together] if self._num_together else self._numbers
        if self._works[0] is None:  # the other ranks are imagined, and the message may hold no data
            *flags, any_aborts = self._own
        else:
            *flags, any_aborts = (flag > 0 for flag in self._message[self._num_together :].tolist())
        if any_aborts:
            raise StepAbortedError
        return numbers, flags

    def reset_to_abort(self) -> None:
        """Make it the message of a rank that aborts: nothing used, nothing to report. Allocates nothing."""
        self._own[:] = [False] * (len(self._own) - 1) + [True]
        self._message.zero_()
        self._message[-1:].fill_(1.0)
        self._numbers.zero_()
