"""Which bucket sizes are worth a trial for a model, and which of them are the same buckets."""

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.core.geometry import ceil_div

MEBIBYTE = 2**20
USUAL_SIZES = tuple(size * MEBIBYTE for size in (1, 5, 25, 50, 100))
_SHARES = (1, 2, 4, 8)
"""Numbers of nearly equal parts of a model's gradients, as further candidates."""


@dataclass(frozen=True, slots=True)
class BucketCut:
    """Bucket sizes that cut the gradients of a model into the same buckets."""

    num_buckets: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """Return the number of buckets, in words."""
        return f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"


def bucket_cuts(
    gradient_sizes: Sequence[int], asked: Sequence[int] | None, current: int, *, least: int = 1
) -> tuple[BucketCut, ...]:
    """Return the candidate bucket sizes, from the smallest to the largest; `current` is always among them."""
    total = sum(gradient_sizes)
    own = [max(1, ceil_div(total, parts)) for parts in _SHARES]
    tried = asked if asked is not None else (*USUAL_SIZES, *own)
    sizes = sorted({current, *(size for size in tried if size >= least)})
    cuts: dict[tuple[int, ...], list[int]] = {}
    for size in sizes:
        cuts.setdefault(buckets_of(gradient_sizes, size), []).append(size)
    return tuple(BucketCut(len(buckets), tuple(same)) for buckets, same in cuts.items())


def buckets_of(gradient_sizes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each bucket: parameters from the last to the first, closed once it holds `bucket_bytes`."""
    closed, held = [], 0
    for size in reversed(gradient_sizes):
        held += size
        if held >= bucket_bytes:
            closed.append(held)
            held = 0
    return (*closed, held) if held else tuple(closed)
