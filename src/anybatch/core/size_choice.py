"""Chapter 13: candidate micro-batch sizes to time, and the choice between them.

The largest size that fits is seldom the fastest: it may exceed the caches, and a ragged last micro-batch costs nearly a
full one. So a few sizes are timed, and whole steps are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from anybatch.core.geometry import ceil_div

NEAR_BEST = 1.03
"""A step within this factor of the fastest one counts as equally fast."""
_KNEE = 0.95


@dataclass(frozen=True, slots=True)
class KnownSize:
    """A size that an earlier measurement found to be the fastest.

    Attributes:
        size: samples of one micro-batch.
        samples_per_second: forward and backward, over all ranks.
        date: date of the measurement, as 2030-12-31.
    """

    size: int
    samples_per_second: float
    date: str


@dataclass(frozen=True, slots=True)
class SecondsFit:
    """Seconds of one micro-batch of m samples: `fixed_seconds + sample_seconds * m`."""

    fixed_seconds: float
    sample_seconds: float

    @property
    def knee(self) -> int:
        """Return the smallest size that reaches 95% of the limiting rate.

        Samples per second are `m / (a + b m)`, which tend to `1 / b`; 95% of that is reached at `m = 19 a / b`. The
        line ignores caches: beyond the knee a device may become slower.
        """
        return max(1, round(_KNEE / (1.0 - _KNEE) * self.fixed_seconds / self.sample_seconds))

    def seconds(self, size: int) -> float:
        """Return the seconds of a micro-batch of `size` samples."""
        return self.fixed_seconds + self.sample_seconds * size


def even_size(share: int, limit: int, *, group: int = 1) -> int:
    """Return the size that cuts a share into the fewest parts that `limit` allows, as equal as possible.

    A share of 64 with room for 20 is cut into 4 parts of 16, not into 20 + 20 + 20 + 4. Parts hold whole groups of
    `group` samples; `limit` is at least `group`, unless the share is smaller.
    """
    groups = ceil_div(share, group)
    parts = ceil_div(groups, max(1, limit // group))
    return min(share, ceil_div(groups, parts) * group)


def fit_seconds(seconds: Mapping[int, float]) -> SecondsFit | None:
    """Return the least-squares line through the three smallest sizes; None if it does not rise."""
    sizes = sorted(seconds)[:3]
    if len(sizes) < 2:  # noqa: PLR2004 (a line takes two points)
        return None
    mean_size = sum(sizes) / len(sizes)
    mean_seconds = sum(seconds[size] for size in sizes) / len(sizes)
    slope = sum((size - mean_size) * (seconds[size] - mean_seconds) for size in sizes)
    slope /= sum((size - mean_size) ** 2 for size in sizes)
    fixed = mean_seconds - slope * mean_size
    # Noise can make the line fall, or start below zero; times do neither.
    return SecondsFit(max(0.0, fixed), slope) if slope > 0.0 else None


def sizes_to_time(share: int, largest: int, seconds: Mapping[int, float], *, group: int = 1) -> tuple[int, ...]:
    """Return at most five sizes, rising: the largest, a half and a quarter of it, the knee, and the best one seen.

    Each is evened out by `even_size`. `seconds` maps the sizes seen on the way to the largest to the seconds of one
    micro-batch.
    """
    line = fit_seconds(seconds)
    wanted = [largest, ceil_div(largest, 2), ceil_div(largest, 4)]
    wanted += [line.knee] if line is not None and line.fixed_seconds else []
    wanted += [min(seconds, key=lambda size: step_seconds(share, size, seconds[size], line))] if seconds else []
    smallest = max(group, min(2, largest))  # a single sample has no variance and does not fill a device
    limits = (max(smallest, min(limit, largest)) for limit in wanted)
    return tuple(sorted({even_size(share, limit, group=group) for limit in limits}))


def step_seconds(share: int, size: int, seconds: float, line: SecondsFit | None) -> float:
    """Return the seconds of all forwards and backwards of a share, its ragged last micro-batch included.

    `seconds` is the time of one full micro-batch; a smaller share takes this long too. `line` scales it for the last
    one; None: it takes as long as a full one.
    """
    full, rest = divmod(share, size)
    if not rest:
        return full * seconds
    part = 1.0 if line is None else line.seconds(rest) / line.seconds(size)
    return (full + part) * seconds


def smallest_of_the_fastest(seconds: Mapping[int, float]) -> int:
    """Return the smallest size whose step takes at most 3% longer than the fastest; it leaves the most memory free."""
    limit = NEAR_BEST * min(seconds.values())
    return min(size for size, value in seconds.items() if value <= limit)
