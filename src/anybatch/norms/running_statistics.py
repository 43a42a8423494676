"""Running statistics of the effective batch: summed over micro-batches and ranks, and updated once.

Shapes are in words here: torch.compile traces functions called by a layer's hook, but not a shape checker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.tensors import widened, widest_dtype
from anybatch.core.torch_internals import InstanceNormBase, add_to_each, copy_each, num_axes_unbatched, zero_each
from anybatch.norms.layers import Ranks, Tracking


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """Number of values per channel of a part of a batch, their mean, and the sum of squared differences from it."""

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
    """Return `(values - mean) / sqrt(variance + eps) * weight + bias` per channel, in the values' dtype."""
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


class RunningStatistics:
    """Adds up the statistics of micro-batches, and updates the layers' buffers once per effective batch.

    Equal to one forward over the whole effective batch: buffers are updated once, by the mean and the unbiased variance
    over all samples of all ranks, and `num_batches_tracked` counts effective batches. A layer that is called several
    times in a forward is updated as often, in that order.

    Sums are taken around the previous running mean, in float64. So they may be added in any grouping, and over ranks in
    one message; a mean that is d standard deviations away from it costs a factor d squared in precision.

    Source: with c any constant, sum (x - mean)^2 = sum (x - c)^2 - n (mean - c)^2; parts are added by Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    def __init__(self, layers: Mapping[str, Tracking], device: torch.device) -> None:
        self.layers = list(layers.values())
        self.device = device
        self.recording = False
        self.calls = [0] * len(self.layers)
        self._dtype = widest_dtype(device)
        self._sizes = [layer.num_features for layer in self.layers]
        numbers = torch.arange(len(self.layers), device=device)
        repeats = torch.tensor(self._sizes, dtype=torch.int64, device=device)
        self._owner = numbers.repeat_interleave(repeats, output_size=sum(self._sizes))
        self._single = [isinstance(layer, InstanceNormBase) for layer in self.layers]
        self._is_single = torch.tensor(self._single, dtype=torch.bool, device=device)
        self._centre = torch.zeros(sum(self._sizes), dtype=self._dtype, device=device)
        self._variances = torch.zeros_like(self._centre)
        self.centres = self._centre.split(self._sizes)
        self.sums_by_call = [self._new_sums()]
        self._counters: list[Tensor] = []
        self._num_updates = torch.zeros(len(self.layers), dtype=self._dtype, device=device)
        self._index = {id(layer.running_mean): number for number, layer in enumerate(self.layers)}

    @torch.no_grad()
    def begin(self) -> None:
        """Save the buffers, and set all sums to zero."""
        if not self.layers:
            return
        torch.cat([layer.running_mean.to(self._dtype) for layer in self.layers], out=self._centre)  # type: ignore[union-attr]
        torch.cat([layer.running_var.to(self._dtype) for layer in self.layers], out=self._variances)  # type: ignore[union-attr]
        self._counters = [counter.clone() for counter in self._counting()]
        torch.stack([counter.to(self._dtype) for counter in self._counters], out=self._num_updates)
        for one in self.sums_by_call:
            zero_each(one.all)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the buffers that `begin` saved; the sums stay."""
        if not self.layers:
            return
        self._write(self._centre, self._variances)
        copy_each(self._counting(), self._counters)

    @contextmanager
    def forward(self, *, counts: bool) -> Iterator[None]:
        """Record the statistics of this forward's inputs, unless it is a filler.

        A forward within a backward is not recorded.
        """
        self.calls[:] = [0] * len(self.calls)
        self.recording = counts
        try:
            yield
        finally:
            self.recording = False

    def next_call(self, number: int) -> int:
        """Return the index of this call of a layer within the forward, and count it; always 0 for InstanceNorm."""
        if self._single[number]:
            return 0
        call = self.calls[number]
        self.calls[number] = call + 1
        while len(self.sums_by_call) <= call:
            self.sums_by_call.append(self._new_sums())
        return call

    @torch.no_grad()
    def add_parts(self, running_mean: Tensor, parts: Sequence[PartialStatistics]) -> None:
        """Add the statistics of one call of a layer, part by part, with counts in values per channel.

        `running_mean` is the layer's own buffer, shape (channels,), which identifies it.
        """
        number = self._index[id(running_mean)]
        call = self.next_call(number)
        for part in parts:
            self.add(number, call, part.count, part.mean, part.squares)

    def add(
        self,
        number: int,
        call: int,
        count: float,
        mean: Tensor,
        squares: Tensor,
    ) -> None:
        """Add the statistics of some values of one call of a layer, per channel.

        For InstanceNorm `count` is samples, and `squares` the sum of the samples' variances.
        """
        one = self.sums_by_call[call]
        shift = mean.detach() - self.centres[number]
        one.counts[number].add_(count)
        one.shifts[number].add_(shift, alpha=count)
        one.squares[number].add_(squares.detach())
        if not self._single[number]:
            one.squares[number].addcmul_(shift, shift, value=count)

    @torch.no_grad()
    def update(self, ranks: Ranks) -> None:
        """Update the buffers once, from the sums of all ranks."""
        if not self.layers:
            return
        # A rank may have called its layers less often, or have run nothing: pad the messages to one length.
        num_calls = ranks.most(len(self.sums_by_call)) if ranks.size > 1 else len(self.sums_by_call)
        self.sums_by_call += [self._new_sums() for _ in range(num_calls - len(self.sums_by_call))]
        # All sums of all layers travel in one message.
        message = torch.stack([torch.cat(one.all) for one in self.sums_by_call])
        if ranks.size > 1:
            message = ranks.sum(message)
        momentum = self._momentum().to(message.device)
        means, variances, num_updates = self._centre.clone(), self._variances.clone(), self._num_updates.clone()
        for row in message:
            layer_counts, shifts, squares = row.split([len(self.layers), len(means), len(means)])
            active = layer_counts > 0
            num_updates += active & ~self._is_single  # torch's InstanceNorm does not count
            # A negative momentum means momentum=None: a cumulative mean over effective batches.
            rates = torch.where(momentum < 0, 1 / num_updates.clamp(min=1), momentum)[self._owner]
            # The 1 avoids 0 / 0 for layers without values; their rate is 0, so they do not change.
            counts = layer_counts[self._owner].clamp(min=1)
            shift = shifts / counts
            unbiased = (squares - shifts * shift) / (counts - 1).clamp(min=1)
            # InstanceNorm tracks the mean of its samples' variances.
            found = torch.where(self._is_single[self._owner], squares / counts, unbiased)
            rates = torch.where(active[self._owner], rates, 0)
            means.lerp_(self._centre + shift, rates)
            variances.lerp_(found, rates)
        self._write(means, variances)
        moved = (num_updates - self._num_updates).long().unbind()
        add_to_each(self._counting(), list(moved))

    def _momentum(self) -> Tensor:
        """Return the layers' momentum, -1 for a cumulative mean; 0 for an InstanceNorm layer without momentum."""
        replacing_none = [0.0 if single else -1.0 for single in self._single]
        found = [
            n if layer.momentum is None else layer.momentum
            for layer, n in zip(self.layers, replacing_none, strict=True)
        ]
        return torch.tensor(found, dtype=self._dtype)

    def _new_sums(self) -> "_CallSums":
        return _CallSums(self._sizes, self._centre)

    def _counting(self) -> list[Tensor]:
        found = [layer.num_batches_tracked for layer in self.layers]
        return [counter for counter in found if counter is not None]

    def _write(self, means: Tensor, variances: Tensor) -> None:
        buffers = [layer.running_mean for layer in self.layers] + [layer.running_var for layer in self.layers]
        values = [*means.split(self._sizes), *variances.split(self._sizes)]
        copy_each([b for b in buffers if b is not None], values)


class _CallSums:
    """The sums of every layer's first call within a forward, or of every layer's second one, and so on.

    Each is a separate tensor: compiled code loses writes to several views of one tensor (torch 2.13).
    """

    def __init__(self, sizes: list[int], like: Tensor) -> None:
        self.counts = [like.new_zeros(1) for _ in sizes]
        self.shifts = [like.new_zeros(size) for size in sizes]
        self.squares = [like.new_zeros(size) for size in sizes]

    @property
    def all(self) -> list[Tensor]:
        """All sums: a count for each layer, then shifts, then squares."""
        return [*self.counts, *self.shifts, *self.squares]


class BufferReader:
    """A forward hook that reads a layer's statistics from its buffers, written with a momentum of 1."""

    def __init__(self, statistics: RunningStatistics, number: int) -> None:
        self._statistics = statistics
        self._number = number

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the statistics of the layer's last input."""
        del output
        statistics = self._statistics
        # Not recording: a checkpointed block runs again in the backward, and its inputs have been counted.
        if not statistics.recording or not layer.training:
            return
        values, mean, variance = args[0], layer.running_mean, layer.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(variance, Tensor)
        call = statistics.next_call(self._number)
        with torch.no_grad():
            if isinstance(layer, InstanceNormBase):
                batched = values.dim() > num_axes_unbatched(layer)
                count = values.shape[0] if batched else 1
                statistics.add(self._number, call, count, mean, variance * count)
            else:
                count = values.numel() // values.shape[1]
                statistics.add(self._number, call, count, mean, variance * (count - 1))


@contextmanager
def momentum_of_one(layers: list[Tracking]) -> Iterator[None]:
    """Let layers write the statistics of each forward into their buffers undiluted, with a momentum of 1."""
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
