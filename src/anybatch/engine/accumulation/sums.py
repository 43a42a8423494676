"""Sums over micro-batches, kept on the device until they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.dtypes import widest_dtype
from anybatch.core.loss import Loss, TermFactors
from anybatch.core.torch_internals import dense_values, multiply_each
from anybatch.parallel.local_parts import local_part


@dataclass(slots=True)
class Sums:
    """Contributions of the micro-batches of one rank share, in the order they ran.

    Attributes:
        contributions: per micro-batch its factors, and weight x sum / divisor of each term that had a count, detached.
        late_counts: per micro-batch the count that only the loss function knew.
    """

    contributions: list[tuple[tuple[TermFactors, ...], Sequence[torch.Tensor]]] = field(default_factory=list)
    late_counts: list["int | float | torch.Tensor"] = field(default_factory=list)

    def totals(self, loss: Loss, device: torch.device) -> Float[Tensor, " numbers"]:
        """Return a tensor (terms,) of this rank's contributions, or (2,) with the count behind it if that came late."""
        # Sums of many micro-batches lose digits in float32.
        dtype = widest_dtype(device)
        if len(loss.kind.terms) == 1:  # without a value where a mean counts nothing in a micro-batch
            columns = [[value for _, values in self.contributions for value in values]]
        else:
            columns = self._columns(len(loss.kind.terms))
        if loss.kind.brings_count:
            columns.append([torch.as_tensor(count, device=device, dtype=dtype) for count in self.late_counts])
        sums = [_summed(column, dtype, device) for column in columns]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _columns(self, num_terms: int) -> list[list[torch.Tensor]]:
        """Return the contributions of each term."""
        columns: list[list[torch.Tensor]] = [[] for _ in range(num_terms)]
        for factors, values in self.contributions:
            value = iter(values)
            for column, factor in zip(columns, factors, strict=True):
                # A mean that counts nothing in a micro-batch has returned no value there.
                if factor.has_value:
                    column.append(next(value))
        return columns


def _summed(values: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "1"]:
    if len(values) == 1:  # of a step of one micro-batch; a copy, since ranks sum in place what observers see singly
        return torch.empty(1, dtype=dtype, device=device).copy_(values[0])
    return (
        torch.stack(values).sum(0, keepdim=True, dtype=dtype) if values else torch.zeros(1, dtype=dtype, device=device)
    )


class LateDivision:
    """Divides by a count that came with the losses, once ranks have agreed on a step: it may not run out of memory.

    What it needs is made beforehand, where running out of memory still begins the step again on all ranks.

    Args:
        guess: what micro-batches were divided by, the number of samples, to keep fp16 in range.
        device: of the numbers.
        dtype: of the gradients.
    """

    def __init__(self, guess: float, device: torch.device, dtype: torch.dtype) -> None:
        self._guess = guess
        self._factor = torch.empty(1, dtype=widest_dtype(device), device=device)
        self._factor_of_gradients = torch.empty((), dtype=dtype, device=device)

    @torch.no_grad()
    def divide(
        self, gradients: Sequence[torch.Tensor], totals: Float[Tensor, "2"]
    ) -> tuple[Float[Tensor, "1"], Float[Tensor, "1"]]:
        """Divide gradients and the contribution in place; return (contributions, counts), parts of `totals`."""
        contribution, count = totals[:1], totals[1:]
        # All that is left to divide by is one factor.
        torch.reciprocal(count, out=self._factor).mul_(self._guess)
        if gradients:
            self._factor_of_gradients.copy_(self._factor[0])
            multiply_each([dense_values(local_part(one)) for one in gradients], self._factor_of_gradients)
        return contribution.mul_(self._factor), count
