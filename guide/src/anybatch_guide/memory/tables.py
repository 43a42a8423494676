"""Plans as tables, in which the page looks up the plan of a traced step.

The peak of live tensors is piecewise linear in the micro-batch size, so the tables store its pieces, exact at every
size. The allocator's reserved memory and the largest size that fits a device are not linear; this module computes them
by replaying the allocator, for each device and each possible size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from anybatch.core.geometry import ceil_div, even_size
from anybatch.memory.trace import Category, MemoryEnvelope, Phase
from anybatch.planner.budget import budget_of
from anybatch.planner.envelopes import Envelopes

SIZES_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
"""Devices offered by size, in addition to named devices."""
NAMES = (
    *("RTX 3090", "RTX 4090", "RTX 5090", "T4", "V100-16", "V100-32", "A10", "A10G", "A100-40", "A100-80", "RTX A6000"),
    *("L4", "L40S", "H100", "H100 PCIe", "H200", "B200", "MI300X", "MI325X"),
)
"""Devices offered by name: the most common ones of `anybatch plan`."""
DEVICE_NAMES = (*NAMES, *(f"{size}GiB" for size in SIZES_GIB))
"""All offered devices, as arguments of `anybatch plan`."""
NUM_RANKS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
"""Offered numbers of ranks."""
EFFECTIVE_BATCH_SIZES = tuple(2**power for power in range(13))
"""Offered effective batch sizes."""
MEBIBYTE = 1 << 20


def tables(envelopes: Envelopes, *, multi_rank: bool) -> dict[str, Any]:
    """Return the tables of a step for the page."""
    shares = rank_shares(multi_rank=multi_rank)
    usable = [budget_of(name, world_size=2 if multi_rank else 1, headroom=None).usable_bytes for name in DEVICE_NAMES]
    largest = [envelopes.largest_allocated(limit) if limit > 0 else 0 for limit in usable]
    # Only sizes that a plan can have, because the allocator is replayed for each size.
    sizes = sorted({micro_batch_size(share, limit) for share in shares for limit in largest})
    return {
        "steady": [list(piece) for piece in peak_pieces(envelopes.steady)],
        "first": [list(piece) for piece in peak_pieces(envelopes.first)],
        "largest": largest,
        "reserved_mebibytes": [[size, _whole_mebibytes(envelopes.reserved_bytes(size))] for size in sizes],
    }


def rank_shares(*, multi_rank: bool) -> list[int]:
    """Return the largest rank share of every offered combination of effective batch size and number of ranks."""
    ranks = [number for number in NUM_RANKS if (number > 1) == multi_rank]
    return sorted({ceil_div(size, number) for size in EFFECTIVE_BATCH_SIZES for number in ranks})


def micro_batch_size(share: int, largest: int | None) -> int:
    """Return the micro-batch size of a plan: the share in even parts that fit, or one sample if nothing fits."""
    return even_size(share, max(1, share if largest is None else min(share, largest)))


def peak_pieces(envelope: MemoryEnvelope) -> Iterator[tuple[int, int, str, list[int], list[int]]]:
    """Yield the pieces of peak(m) = max over events t of (A_t + B_t m), for all m >= 1."""
    lines = _highest_by_slope(envelope)
    size = 1
    while True:
        constant, slope, event = _highest(lines, size)
        yield size, *_moment(envelope, event)
        crossings = [_overtakes(line, (constant, slope, event)) for line in lines if line[1] > slope]
        if not crossings:
            return
        # Advance by at least one, in case several lines meet at this size.
        size = max(size + 1, min(crossings))


_Line = tuple[int, int, int]
"""Bytes in use after an event, as constant and slope, and the number of the event."""


def _highest_by_slope(envelope: MemoryEnvelope) -> list[_Line]:
    """Return the highest line of each slope (the earliest of equal lines); no other line is ever the peak."""
    best: dict[int, _Line] = {}
    held = zip(envelope.held.constant.tolist(), envelope.held.slope.tolist(), strict=True)
    for event, (constant, slope) in enumerate(held):
        if slope not in best or constant > best[slope][0]:
            best[slope] = (constant, slope, event)
    return list(best.values())


def _highest(lines: Sequence[_Line], size: int) -> _Line:
    return max(lines, key=lambda line: (line[0] + line[1] * size, -line[2]))


def _overtakes(steeper: _Line, line: _Line) -> int:
    """Return the first size at which a steeper line is the peak; of two equal lines, the earlier event is the peak."""
    deficit, gain = line[0] - steeper[0], steeper[1] - line[1]
    size = ceil_div(deficit, gain)
    is_tie = size * gain == deficit
    return size + 1 if is_tie and steeper[2] > line[2] else size


def _moment(envelope: MemoryEnvelope, event: int) -> tuple[int, str, list[int], list[int]]:
    """Return phase, operation and the bytes in use by category after an event, like `at_peak`."""
    trace = envelope.trace
    constant, slope = envelope.allocated.constant.tolist(), envelope.allocated.slope.tolist()
    categories = get_args(Category)
    constants, slopes = [0] * len(categories), [0] * len(categories)
    for signed in trace.events[: event + 1]:
        number, sign = abs(signed) - 1, 1 if signed > 0 else -1
        category_index = categories.index(trace.allocations[number].category)
        constants[category_index] += sign * constant[number]
        slopes[category_index] += sign * slope[number]
    last = trace.allocations[abs(trace.events[event]) - 1]
    return get_args(Phase).index(last.phase), last.operation, constants, slopes


def _whole_mebibytes(num_bytes: int) -> int:
    mebibytes, rest = divmod(num_bytes, MEBIBYTE)
    assert rest == 0, "segments are whole mebibytes"
    return mebibytes
