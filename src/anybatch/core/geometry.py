"""Effective batch = ranks x accumulation steps x micro-batch: check the sizes, and choose micro-batch sizes to time.

The largest micro-batch that fits is seldom the fastest: it may exceed the caches, and a smaller last micro-batch takes
nearly as long as a full one. So the engine times a few sizes and compares whole steps.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anybatch.errors import AnyBatchError, BatchSizeError, UserError

_END = 1 << 64  # seeds may have 64 bits


def checked_int(
    name: str, value: object, *, minimum: int | None = 1, error: type[AnyBatchError] = UserError, hint: str = ""
) -> int:
    """Return `value` if it is a whole number of at least `minimum` (None: any whole number); refuse a bool.

    `hint` is a sentence with the fix, which the message appends; it may be empty.

    Raises:
        AnyBatchError: of the class `error`; `value` is of another type, below `minimum`, or has over 64 bits.
    """
    # `True` would pass as 1, and is nearly always an argument in the wrong position.
    if isinstance(value, int) and not isinstance(value, bool) and (minimum is None or value >= minimum):
        if abs(value) < _END:
            return value
        message = f"{name} has {value.bit_length()} bits; it must be below 2**64.{hint and f' {hint}'}"
        raise error(message)
    bound = "" if minimum is None else f" of at least {minimum}"
    kind = "" if type(value) is int else f", not {type(value).__name__}"
    message = f"{name}={value!r} must be a whole number{bound}{kind}.{hint and f' {hint}'}"
    raise error(message, code="not_a_whole_number")


def require(
    is_valid: bool,  # noqa: FBT001 (a condition, as in `assert`)
    name: str,
    value: object,
    expected: str,
    error: type[AnyBatchError] = UserError,
) -> None:
    """Raise `error` unless `is_valid`; `expected` describes a valid value in the message: "a function of a sample"."""
    if not is_valid:
        # An argument in the wrong position may be a whole data set.
        message = f"{name}={reprlib.repr(value)} must be {expected}, not {type(value).__name__}."
        raise error(message, code="wrong_kind_of_value")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Effective batch size, micro-batch size and accumulation steps, as far as the user has set them.

    A size that the user has not set is None, and is computed from each batch, so that the last batch of an epoch may be
    smaller. If all three are set, they agree.

    Args:
        world_size: number of ranks.
        effective_batch_size: samples of one optimizer step over all ranks; None: the size of each batch.
        micro_batch_size: maximum samples of one forward and backward; None: a rank's samples are split into
            `accumulation_steps` equal parts.
        accumulation_steps: micro-batches per rank and step; None: as few as `micro_batch_size` allows.
        budget_tokens: maximum tokens of one forward and backward in the user's token budget; None without a budget.
        micro_batch_tokens: the limit in use: below `budget_tokens` after an out-of-memory error, or if that is faster.
        fixed_tokens: fixed cost of a micro-batch, in tokens; None until it is measured.
        packed: whether batches are packed if their collate function can both pad and pack; None until it is decided.
    """

    world_size: int
    effective_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    budget_tokens: int | None = None
    micro_batch_tokens: int | None = None
    fixed_tokens: float | None = None
    packed: bool | None = None

    @property
    def product(self) -> str:
        """Return `" = 2 ranks x 4 accumulation steps x 16"` if the effective size was computed from the other two."""
        if self.micro_batch_size is None or self.accumulation_steps is None:
            return ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f" = {ranks} x {self.accumulation_steps} accumulation steps x {self.micro_batch_size}"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return `numerator / denominator` rounded up, for a numerator of at least 0 and a denominator of at least 1."""
    return -(-numerator // denominator)


def resolve_sizes(
    *,
    world_size: int,
    effective_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation_steps: int | None = None,
) -> Sizes:
    """Check the three sizes against each other; compute the effective batch size if the other two are given.

    `E = W x K x m`, where the last micro-batch of a rank may be smaller: each of `W` ranks has at most `ceil(E / W)`
    samples, hence `K = ceil(ceil(E / W) / m)` micro-batches. A missing micro-batch size or number of accumulation steps
    stays None, because it depends on each batch.

    Raises:
        BatchSizeError: a size below 1, more accumulation steps than a rank has samples, or contradictory sizes.
    """
    sizes = {
        "world_size": world_size,
        "effective_batch_size": effective_batch_size,
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": accumulation_steps,
    }
    for name, value in sizes.items():
        if value is not None:
            checked_int(name, value, error=BatchSizeError, hint="Leave it out if the other sizes decide it.")
    if effective_batch_size is None:
        if micro_batch_size is not None and accumulation_steps is not None:
            effective_batch_size = world_size * accumulation_steps * micro_batch_size
    elif accumulation_steps is not None:
        _check_product(world_size, effective_batch_size, micro_batch_size, accumulation_steps)
    return Sizes(
        world_size=world_size,
        effective_batch_size=effective_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
    )


def _check_product(world_size: int, effective: int, micro: int | None, steps: int) -> None:
    share = ceil_div(effective, world_size)
    sizes: dict[str, Any] = {
        "effective_batch_size": effective,
        "micro_batch_size": micro,
        "accumulation_steps": steps,
        "world_size": world_size,
    }
    if steps > share:
        message = (
            f"accumulation_steps={steps} is more than the {share} samples of each rank "
            f"(effective_batch_size={effective} on {world_size} rank{'s' * (world_size > 1)}). Use at most {share}, "
            "or leave it out."
        )
        raise BatchSizeError(message, **sizes, code="too_many_steps")
    if micro is None:
        return
    needed = ceil_div(share, micro)
    # Compare numbers of micro-batches, not products: the last micro-batch of a share may be smaller.
    if needed != steps:
        message = (
            f"effective_batch_size={effective} contradicts {world_size} rank{'s' * (world_size > 1)} x "
            f"accumulation_steps={steps} x micro_batch_size={micro} = {world_size * steps * micro}. "
            f"Leave one of them out: with micro_batch_size={micro} there are {needed} accumulation steps; "
            f"with accumulation_steps={steps} the micro-batch size is {ceil_div(share, steps)}."
        )
        raise BatchSizeError(message, **sizes, code="sizes_contradict")


NEAR_BEST = 1.03
"""A step within this factor of the fastest one counts as equally fast."""


@dataclass(frozen=True, slots=True)
class SecondsFit:
    """Linear model of the seconds of one micro-batch of m samples: `fixed_seconds + sample_seconds * m`."""

    fixed_seconds: float
    sample_seconds: float

    def seconds(self, size: int) -> float:
        """Return the seconds of a micro-batch of `size` samples."""
        return self.fixed_seconds + self.sample_seconds * size


def even_size(share: int, limit: int, *, group: int = 1) -> int:
    """Return the size that splits `share` samples into the fewest parts of at most `limit`, as equal as possible.

    For 64 samples and a limit of 20 it is 16: four parts of 16 instead of 20 + 20 + 20 + 4. Parts hold whole groups of
    `group` samples; `limit` is at least `group`, unless the share is smaller.
    """
    groups = ceil_div(share, group)
    parts = ceil_div(groups, max(1, limit // group))
    return min(share, ceil_div(groups, parts) * group)


def sizes_to_time(share: int, largest: int, seconds: Mapping[int, float], *, group: int = 1) -> tuple[int, ...]:
    """Return at most four sizes, in ascending order: the largest, its half, its quarter, and the fastest size so far.

    Each size is reduced by `even_size`. `seconds` maps the sizes that were tried in the search for the largest size to
    the seconds of one micro-batch.
    """
    wanted = [largest, ceil_div(largest, 2), ceil_div(largest, 4)]
    if seconds:
        wanted.append(min(seconds, key=lambda size: seconds[size] / size))
    smallest = max(group, min(2, largest))  # a single sample has no variance and does not fill a device
    limits = (max(smallest, min(limit, largest)) for limit in wanted)
    return tuple(sorted({even_size(share, limit, group=group) for limit in limits}))


def smallest_of_the_fastest(seconds: Mapping[int, float]) -> int:
    """Return the smallest size whose step takes at most 3% longer than the fastest; it needs the least memory."""
    limit = NEAR_BEST * min(seconds.values())
    return min(size for size, value in seconds.items() if value <= limit)
