"""Chapter 1: effective batch = ranks x accumulation steps x micro-batch, ragged where it must be."""

from dataclasses import dataclass

from anybatch.core.whole_numbers import checked_int
from anybatch.errors import BatchSizeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The three sizes as far as the user has fixed them, on `world_size` ranks.

    At least one of `micro_batch_size` and `accumulation_steps` is None unless all three agree: whichever was not given
    is not stored but follows from the batch at hand, so that the last batch of an epoch may be smaller.

    Args:
        world_size: number of ranks.
        effective_batch_size: samples of one optimizer step over all ranks; None means "as many as a batch brings".
        micro_batch_size: most samples of one forward and backward; None means "the rank share in equal parts".
        accumulation_steps: micro-batches per rank and step; None means "as many as it takes".
        budget_tokens: most tokens of one forward and backward that the user allows, where batches are cut by length.
        micro_batch_tokens: the same as they are cut now: fewer where memory has run out, or where it is faster.
        fixed_tokens: what a micro-batch then costs beside its tokens, in tokens; None where it is still to be found.
        packed: whether batches whose collate function can pad and pack are packed; None where that is not settled.
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
        """Return `" = 2 ranks x 4 accumulation steps x 16"` where that is where the effective size came from."""
        if self.micro_batch_size is None or self.accumulation_steps is None:
            return ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f" = {ranks} x {self.accumulation_steps} accumulation steps x {self.micro_batch_size}"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return `numerator / denominator` rounded up.

    Args:
        numerator: 0 or more.
        denominator: 1 or more.
    """
    return -(-numerator // denominator)


def resolve_sizes(
    *,
    world_size: int,
    effective_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation_steps: int | None = None,
) -> Sizes:
    """Check the three sizes against each other and fill in the one that follows.

    effective = ranks x accumulation steps x micro-batch, where the last micro-batch of a share may be smaller: on
    `W` ranks a share has at most `ceil(E / W)` samples, hence `K = ceil(ceil(E / W) / m)` micro-batches.

    Args:
        world_size: number of ranks, `W`.
        effective_batch_size: samples of one optimizer step over all ranks, `E`; None where it was not given.
        micro_batch_size: most samples of one forward and backward, `m`; None where it was not given.
        accumulation_steps: micro-batches per rank and step, `K`; None where it was not given.

    Returns:
        Sizes in which `effective_batch_size` is filled in when the other two were given. A missing micro-batch size
        or number of accumulation steps stays None where it depends on the batch at hand.

    Raises:
        BatchSizeError: a size below 1, more accumulation steps than a share has samples, or three that contradict.
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
    sizes = {
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
    # By numbers of micro-batches and not by the product, since the last one of a share may be smaller.
    if needed != steps:
        message = (
            f"effective_batch_size={effective} contradicts {world_size} rank{'s' * (world_size > 1)} x "
            f"accumulation_steps={steps} x micro_batch_size={micro} = {world_size * steps * micro}. "
            f"Give any two of them: with micro_batch_size={micro} the accumulation steps would be {needed}; "
            f"with accumulation_steps={steps} the micro-batch size would be {ceil_div(share, steps)}."
        )
        raise BatchSizeError(message, **sizes)
