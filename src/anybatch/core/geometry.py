"""Chapter 1: effective batch = ranks x accumulation steps x micro-batch, ragged where it must be."""

from dataclasses import dataclass
from typing import Any

from anybatch.core.whole_numbers import checked_int
from anybatch.errors import BatchSizeError


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

    Args:
        world_size: number of ranks, `W`.
        effective_batch_size: samples of one optimizer step over all ranks, `E`; None if not given.
        micro_batch_size: maximum samples of one forward and backward, `m`; None if not given.
        accumulation_steps: micro-batches per rank and step, `K`; None if not given.

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
        raise BatchSizeError(message, **sizes)
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
        raise BatchSizeError(message, **sizes)
