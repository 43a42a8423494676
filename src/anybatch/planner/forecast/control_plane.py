"""Messages of the control plane in a step, and the time that ranks wait for them."""

from dataclasses import dataclass

from anybatch.core.collective_times import Link, bruck_all_gather, doubling_all_reduce
from anybatch.core.message_rounds import gather_messages, sum_messages
from anybatch.parallel.roll_call import NUM_DIGESTS

_NUMBER_BYTES = 8
_NUM_FLAGS = 2
_NUM_REPORTED = 1  # the loss of one term
_COUNT_NUMBERS = 4  # whether a rank has failed, its count, whether it has anything to run, and a request


@dataclass(frozen=True, slots=True)
class ControlMessages:
    """The collectives of the control group in a step, after the first steps and the check of the loss.

    `parallel/step_agreement.py` sums one float64 message in each step: the numbers of the report, a flag for each
    parameter, two for leaving, and a digest and its square for each of `NUM_DIGESTS`. If counts need the data,
    `World.gather_from` gathers a few numbers before it. Ranks in agreement send no other messages.

    Attributes:
        agreement_bytes: bytes of the sum.
        count_bytes: bytes of a rank's part of the gather; 0 without a gather.
    """

    agreement_bytes: int
    count_bytes: int

    @classmethod
    def of(cls, num_parameters: int, *, counts_need_data: bool) -> "ControlMessages":
        """Return the messages of a model with `num_parameters` tensors and a loss of one term."""
        numbers = _NUM_REPORTED + num_parameters + _NUM_FLAGS + 2 * NUM_DIGESTS
        return cls(_NUMBER_BYTES * numbers, _NUMBER_BYTES * _COUNT_NUMBERS if counts_need_data else 0)

    def agreement_seconds(self, num_ranks: int, link: Link) -> float:
        """Return the seconds of the sum at the end of a step, whose latency grows with the ranks' logarithm."""
        return doubling_all_reduce(self.agreement_bytes, num_ranks, link)

    def count_seconds(self, num_ranks: int, link: Link) -> float:
        """Return the seconds of the gather before a step, whose bytes grow with the number of ranks."""
        return bruck_all_gather(self.count_bytes * num_ranks, num_ranks, link) if self.count_bytes else 0.0

    def messages(self, num_ranks: int) -> int:
        """Return the number of messages that all ranks send in a step, without acknowledgements."""
        return sum_messages(num_ranks) + (gather_messages(num_ranks) if self.count_bytes else 0)
