"""The last message of an effective batch: what ranks sum beside the gradients, and whether one of them gives up."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from anybatch.parallel.world import World


class AbandonedError(Exception):
    """A rank ran out of memory, and every rank knows it: no collective is under way, and the gradients are worthless.

    Raised on all ranks for the same effective batch. The engine begins it anew.
    """


class Closing:
    """One message in the control group, sent once per effective batch by every rank that sums gradients.

    It carries the flags: which parameters this rank has used, and whether it gives up. On a CPU the numbers of the
    report travel with them. From an accelerator reading the flags would make the host wait for the device if they
    travelled with numbers that are there, so that the numbers go their own way, in the data group.

    Args:
        numbers: on the rank's device; summed.
        flags: summed over ranks too.
        world: the ranks.
        gives_up: this rank has not finished.
    """

    def __init__(
        self, numbers: Float[Tensor, " numbers"], flags: Sequence[bool], world: World, *, gives_up: bool = False
    ) -> None:
        self._world = world
        self._numbers = numbers
        self._own = [*flags, gives_up]
        self._num_together = len(numbers) if numbers.device.type == "cpu" else 0
        told = torch.tensor(self._own, dtype=torch.float64)
        self._message = torch.cat([numbers.double(), told]) if self._num_together else told
        self._works: list[dist.Work | None] = []

    def start(self) -> None:
        """Send it. What travels in the data group does so behind all that has been started there."""
        self._works = [self._world.start_sum(self._message)]
        if not self._num_together:
            self._works.append(dist.all_reduce(self._numbers, async_op=True))

    def wait(self) -> tuple[Float[Tensor, " numbers"], list[bool]]:
        """Return the summed numbers, and for each flag whether any rank has set it.

        Raises:
            AbandonedError: a rank has given up.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        numbers = self._message[: self._num_together] if self._num_together else self._numbers
        if self._works[0] is None:  # the other ranks are imagined, and the message may hold no data
            *flags, given_up = self._own
        else:
            *flags, given_up = (flag > 0 for flag in self._message[self._num_together :].tolist())
        if given_up:
            raise AbandonedError
        return numbers, flags

    def again(self) -> None:
        """Make it what it was for a rank that gives up: nothing used, nothing to report. Allocates nothing."""
        self._own[:] = [False] * (len(self._own) - 1) + [True]
        self._message.zero_()
        self._message[-1:].fill_(1.0)
        self._numbers.zero_()
