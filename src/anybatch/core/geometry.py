"""Effective batch = ranks x accumulation steps x micro-batch: checks of sizes, and candidates for the micro-batch.

The largest size that fits is seldom the fastest: it may exceed the caches, and a ragged last micro-batch costs nearly a
full one. So a few sizes are timed, and whole steps are compared.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anybatch.errors import AnyBatchError, BatchSizeError, UserError

_END = 1 << 64  # seeds may have 64 bits


def checked_int(
    name: str, value: object, *, least: int | None = 1, error: type[AnyBatchError] = UserError, cure: str = ""
) -> int:
    """Return `value` if it is a whole number of at least `least` (None: any); a bool is refused.

    `cure` is a sentence with the fix for the message; it may be empty.

    Raises:
        AnyBatchError: of the class `error`; `value` is of another type, below `least`, or has over 64 bits.
    """
    # `True` would pass as 1, and is nearly always an argument in the wrong position.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        if abs(value) < _END:
            return value
        message = f"{name} has {value.bit_length()} bits; it must be below 2**64.{cure and f' {cure}'}"
        raise error(message)
    bound = "" if least is None else f" of at least {least}"
    kind = "" if type(value) is int else f", not {type(value).__name__}"
    message = f"{name}={value!r} must be a whole number{bound}{kind}.{cure and f' {cure}'}"
    raise error(message, code="not_a_whole_number")


def refuse_unless(
    is_valid: bool,  # noqa: FBT001 (a condition, as in `assert`)
    name: str,
    value: object,
    expected: str,
    error: type[AnyBatchError] = UserError,
) -> None:
    """Raise an `error` unless `is_valid`; `expected` is a noun phrase for the message: "a function of a sample"."""
    if not is_valid:
        # An argument in the wrong position may be a whole data set.
        message = f"{name}={reprlib.repr(value)} must be {expected}, not {type(value).__name__}."
        raise error(message, code="wrong_kind_of_value")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The three sizes as far as the user has fixed them, on `world_size` ranks.

    At least one of `micro_batch_size` and `accumulation_steps` is None unless all three agree: a size that was not
    given is computed from each batch, so that the last batch of an epoch may be smaller.

    Args:
        world_size: number of ranks.
        effective_batch_size: samples of one optimizer step over all ranks; None: the size of each batch.
        micro_batch_size: maximum samples of one forward and backward; None: the rank share in equal parts.
        accumulation_steps: micro-batches per rank and step; None: as few as fit.
        budget_tokens: the user's maximum of tokens of one forward and backward, if batches are cut by length.
        micro_batch_tokens: the maximum in use: lower than `budget_tokens` after an out-of-memory error, or if faster.
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
    """Check the three sizes against each other and fill in the effective size if it follows from the other two.

    `E = W x K x m`, where the last micro-batch of a share may be smaller: on `W` ranks a share has at most `ceil(E /
    W)` samples, hence `K = ceil(ceil(E / W) / m)` micro-batches. A missing micro-batch size or number of accumulation
    steps stays None, because it depends on each batch.

    Raises:
        BatchSizeError: a size below 1, more accumulation steps than a share has samples, or three sizes that
            contradict.
    """
    given = {
        "world_size": world_size,
        "effective_batch_size": effective_batch_size,
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if value is not None:
            checked_int(name, value, error=BatchSizeError, cure="Leave it out if the other sizes decide it.")
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
            f"accumulation_steps={steps} is more than the {share} samples of a rank share "
            f"(effective_batch_size={effective} on {world_size} rank{'s' * (world_size > 1)}). "
            f"Use at most {share}, or leave it out."
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
            f"Give any two of them: with micro_batch_size={micro} the accumulation steps would be {needed}; "
            f"with accumulation_steps={steps} the micro-batch size would be {ceil_div(share, steps)}."
        )
        raise BatchSizeError(message, **sizes, code="sizes_contradict")


NEAR_BEST = 1.03
"""A step within this factor of the fastest one counts as equally fast."""
_KNEE = 0.95


@dataclass(frozen=True, slots=True)
class KnownSize:
    """A size that an earlier measurement found to be the fastest."""

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
