"""Merge the statistics of several parts of a batch, differentiably, and normalise by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.dtypes import widened
from anybatch.norms.layers import Ranks


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """The statistics of one part of a batch, a micro-batch or a group, per channel.

    Attributes:
        count: values per channel.
        mean: their mean.
        squares: sum of their squared differences from the mean.
    """

    count: int
    mean: Float[Tensor, " channels"]
    squares: Float[Tensor, " channels"]


@dataclass(frozen=True, slots=True)
class MergedStatistics:
    """The statistics of all parts together, per channel; the variance is biased, as BatchNorm normalises by it."""

    mean: Float[Tensor, " channels"]
    variance: Float[Tensor, " channels"]


def partial_statistics(values: Float[Tensor, "samples channels *rest"]) -> PartialStatistics:
    """Return the statistics of some values; saves only the values for the backward."""
    mean, squares = _PartialStatistics.apply(values)  # type: ignore[no-untyped-call]
    return PartialStatistics(values.numel() // values.shape[1], mean, squares)


def merge_statistics(
    parts: Sequence[PartialStatistics], ranks: Ranks, token: Float[Tensor, ""]
) -> tuple[MergedStatistics, Float[Tensor, ""]]:
    """Return the statistics of all parts of all ranks together, and the next token.

    Parts whose count is 0 add nothing, but stay in the graph, which has to be the same on all ranks. The token orders
    the backward's sums over ranks: each waits for the sum of the next layer in forward order, so that all ranks run
    them in the same order.

    Args:
        parts: the statistics of this rank's parts, at least one.
        ranks: the other ranks; all of them call this for the same layers in the same order.
        token: a scalar that requires a gradient, returned by the previous layer.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979:
    mean = sum n_k mean_k / N, and N variance = sum (squares_k + n_k (mean_k - mean)^2).
    """
    like = parts[0].mean
    count = like.new_full((1,), float(sum(part.count for part in parts)))
    total = sum((part.mean * part.count for part in parts), start=torch.zeros_like(like))
    # One message for both. The squares need another one, since they are around the mean of all ranks.
    first, token = _sum(torch.cat([count, total]), ranks, token)
    count, total = first[:1].detach(), first[1:]
    count = count.clamp(min=1)  # 0 if every rank runs a filler with weight 0: the result must be finite
    mean = total / count
    squares = torch.zeros_like(like)
    for part in parts:
        # Parts of weight 0 are multiplied by 0, not left out, so that the graph and the backward's collectives stay the
        # same.
        own = part.squares + (part.mean - mean).square() * part.count
        squares = squares + (own if part.count else own * 0)
    squares, token = _sum(squares, ranks, token)
    return MergedStatistics(mean, squares / count), token


def normalise_with(
    values: Float[Tensor, "samples channels *rest"],
    statistics: MergedStatistics,
    weight: Float[Tensor, " channels"] | None,
    bias: Float[Tensor, " channels"] | None,
    eps: float,
) -> Float[Tensor, "samples channels *rest"]:
    """Return `(values - mean) / sqrt(variance + eps) * weight + bias` per channel, in the values' dtype.

    Args:
        values: (samples, channels, ...), of one micro-batch.
        statistics: per channel, of all values that are normalised together; differentiable.
        weight: per channel; None for 1.
        bias: per channel; None for 0.
        eps: added to the variance.
    """
    inverse = (statistics.variance + eps).rsqrt()
    weight = torch.ones_like(inverse) if weight is None else weight.to(inverse.dtype)
    bias = torch.zeros_like(inverse) if bias is None else bias.to(inverse.dtype)
    output: Tensor = _Normalise.apply(values, statistics.mean, inverse * weight, bias)  # type: ignore[no-untyped-call]
    return output


def _sum(value: Tensor, ranks: Ranks, token: Tensor) -> tuple[Tensor, Tensor]:
    if ranks.size == 1:
        return value, token
    summed, token = _RankSum.apply(value, token, ranks.sum)  # type: ignore[no-untyped-call]
    return summed, token


def _along_channels(vector: Tensor, values: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (values.dim() - 2))


def _other_axes(values: Tensor) -> list[int]:
    return [axis for axis in range(values.dim()) if axis != 1]


class _PartialStatistics(torch.autograd.Function):
    """Mean and sum of squared differences from it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (torch's context has no type)
        variance, mean = torch.var_mean(widened(values), _other_axes(values), correction=0)
        ctx.save_for_backward(values, mean)
        ctx.count = values.numel() // values.shape[1]
        return mean, variance * ctx.count

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor, squares_grad: Tensor) -> Tensor:  # noqa: ANN401
        values, mean = ctx.saved_tensors
        centred = values - _along_channels(mean, values)
        slope, offset = _along_channels(2 * squares_grad, values), _along_channels(mean_grad / ctx.count, values)
        return torch.addcmul(offset, centred, slope).to(values.dtype)


class _Normalise(torch.autograd.Function):
    """`(values - mean) * scale + bias` per channel; saves the values, which are shared with their statistics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(values, mean, scale)
        centred = values - _along_channels(mean, values)
        return torch.addcmul(_along_channels(bias, values), centred, _along_channels(scale, values)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        values, mean, scale = ctx.saved_tensors
        grad = widened(grad)
        axes = _other_axes(values)
        total = grad.sum(axes)
        along = (grad * (values - _along_channels(mean, values))).sum(axes)
        return (grad * _along_channels(scale, values)).to(values.dtype), -total * scale, along, total


class _RankSum(torch.autograd.Function):
    """The sum over ranks: its gradient is the sum of the gradients over ranks, since each rank uses the same sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.total = total
        # Copies: the collective writes into its argument, and a Function's output must not be its input.
        return total(value.clone()), token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, token_grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        return ctx.total(grad.clone()), token_grad, None
