"""Running statistics of the effective batch: summed over micro-batches and ranks, and updated once.

Functions that the hook of a layer calls have no annotated shapes, because torch.compile cannot trace a shape checker.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.tensors import widened, widest_dtype
from anybatch.core.torch_internals import BatchNormBase, change_each
from anybatch.norms.layers import Ranks


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """For a part of a batch, per channel: the number of values, their mean, and their sum of squared deviations."""

    count: int
    mean: Float[Tensor, " channels"]
    squares: Float[Tensor, " channels"]


Statistics = tuple[Float[Tensor, " channels"], Float[Tensor, " channels"]]
"""The mean and biased variance per channel with which BatchNorm normalises."""


def partial_statistics(values: Float[Tensor, "samples channels *rest"]) -> PartialStatistics:
    """Return the statistics of `values` per channel; only `values` and the mean are saved for the backward."""
    mean, squares = _PartialStatistics.apply(values)  # type: ignore[no-untyped-call]
    return PartialStatistics(values.numel() // values.shape[1], mean, squares)


def merge_statistics(
    parts: Sequence[PartialStatistics], ranks: Ranks, token: Float[Tensor, ""]
) -> tuple[Statistics, Float[Tensor, ""]]:
    """Return the statistics of all parts of all ranks together, and the next token.

    Parts without samples (count 0) contribute nothing, but stay in the graph, which has to be the same on all ranks.
    The token orders the sums over ranks in the backward: each depends on the sum of the next layer in forward order, so
    that all ranks run the sums in the same order.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979:
    mean = sum n_k mean_k / N, and N variance = sum (squares_k + n_k (mean_k - mean)^2).
    """
    like = parts[0].mean
    count = like.new_full((1,), float(sum(part.count for part in parts)))
    total = sum((part.mean * part.count for part in parts), start=torch.zeros_like(like))
    # One message for count and total. The squares are around the mean of all ranks, so they need a second message.
    sums, token = _sum(torch.cat([count, total]), ranks, token)
    count, total = sums[:1].detach(), sums[1:]
    count = count.clamp(min=1)  # 0 if all ranks run fillers (micro-batches of weight 0); avoids 0 / 0
    mean = total / count
    squares = torch.zeros_like(like)
    for part in parts:
        # A part with a count of 0 is multiplied by 0, so that graph and collectives are the same on all ranks.
        part_squares = part.squares + (part.mean - mean).square() * part.count
        squares = squares + (part_squares if part.count else part_squares * 0)
    squares, token = _sum(squares, ranks, token)
    return (mean, squares / count), token


def normalise_with(
    values: Float[Tensor, "samples channels *rest"],
    statistics: Statistics,
    weight: Float[Tensor, " channels"] | None,
    bias: Float[Tensor, " channels"] | None,
    eps: float,
) -> Float[Tensor, "samples channels *rest"]:
    """Return `(values - mean) / sqrt(variance + eps) * weight + bias` per channel, in the values' dtype."""
    mean, variance = statistics
    inverse = (variance + eps).rsqrt()
    weight = torch.ones_like(inverse) if weight is None else weight.to(inverse.dtype)
    bias = torch.zeros_like(inverse) if bias is None else bias.to(inverse.dtype)
    output: Tensor = _Normalise.apply(values, mean, inverse * weight, bias)  # type: ignore[no-untyped-call]
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
    """The mean per channel, and the sum of squared differences from the mean."""

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
    """`(values - mean) * scale + bias` per channel; saves `values`, which `_PartialStatistics` saves too."""

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
    """The sum over ranks. Its gradient is the sum of all ranks' gradients, since every rank uses the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.total = total
        # Copy, because the collective writes to its argument, and a Function must not return its input.
        return total(value.clone()), token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, token_grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        return ctx.total(grad.clone()), token_grad, None


class RunningStatistics:
    """Adds up the statistics of micro-batches, and updates the layers' buffers once per effective batch.

    The result equals one forward over the whole effective batch: buffers are updated once, by the mean and the unbiased
    variance over all samples of all ranks, and `num_batches_tracked` counts effective batches. A layer that is called
    several times in a forward is updated once per call, in the order of the calls.

    The sums are sums of differences from the previous running mean, in float64. So they can be added in any order, and
    over ranks in one message. If a mean is d standard deviations from the running mean, precision decreases by a factor
    of d squared.

    Source: with c any constant, sum (x - mean)^2 = sum (x - c)^2 - n (mean - c)^2; parts are added by Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    def __init__(self, layers: Mapping[str, BatchNormBase], device: torch.device) -> None:
        self.layers = list(layers.values())
        self.device = device
        self.recording = False
        self.calls = [0] * len(self.layers)
        self._dtype = widest_dtype(device)
        self._sizes = [layer.num_features for layer in self.layers]
        numbers = torch.arange(len(self.layers), device=device)
        repeats = torch.tensor(self._sizes, dtype=torch.int64, device=device)
        self._owner = numbers.repeat_interleave(repeats, output_size=sum(self._sizes))
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
        self._counters = [counter.clone() for counter in self._counters_of_layers()]
        torch.stack([counter.to(self._dtype) for counter in self._counters], out=self._num_updates)
        for sums in self.sums_by_call:
            change_each("zero", sums.all)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the buffers that `begin` saved; do not change the sums."""
        if not self.layers:
            return
        self._write(self._centre, self._variances)
        change_each("copy", self._counters_of_layers(), self._counters)

    @contextmanager
    def forward(self, *, counts: bool) -> Iterator[None]:
        """Return a context for a forward that records statistics if `counts` (False for a filler, which has weight 0).

        A forward that is recomputed in a backward is not recorded.
        """
        self.calls[:] = [0] * len(self.calls)
        self.recording = counts
        try:
            yield
        finally:
            self.recording = False

    def next_call(self, number: int) -> int:
        """Return the index of this call of layer `number` within the forward, and count the call."""
        call = self.calls[number]
        self.calls[number] = call + 1
        while len(self.sums_by_call) <= call:
            self.sums_by_call.append(self._new_sums())
        return call

    @torch.no_grad()
    def add_parts(self, running_mean: Tensor, parts: Sequence[PartialStatistics]) -> None:
        """Add the statistics of one call of a layer, part by part.

        `running_mean` is the layer's buffer, shape (channels,), which identifies the layer.
        """
        number = self._index[id(running_mean)]
        call = self.next_call(number)
        for part in parts:
            self.add(number, call, part.count, part.mean, part.squares)

    def add(self, number: int, call: int, count: float, mean: Tensor, squares: Tensor) -> None:
        """Add statistics of one call of layer `number`; `count` is the number of values per channel."""
        sums = self.sums_by_call[call]
        shift = mean.detach() - self.centres[number]
        sums.counts[number].add_(count)
        sums.shifts[number].add_(shift, alpha=count)
        sums.squares[number].add_(squares.detach()).addcmul_(shift, shift, value=count)

    @torch.no_grad()
    def update(self, ranks: Ranks) -> None:
        """Update the buffers once, from the sums of all ranks."""
        if not self.layers:
            return
        # Pad the messages of all ranks to one length, because a rank may have called its layers less often.
        num_calls = ranks.max(len(self.sums_by_call)) if ranks.size > 1 else len(self.sums_by_call)
        self.sums_by_call += [self._new_sums() for _ in range(num_calls - len(self.sums_by_call))]
        # One message contains all sums of all layers.
        message = torch.stack([torch.cat(sums.all) for sums in self.sums_by_call])
        if ranks.size > 1:
            message = ranks.sum(message)
        momentum = self._momentum().to(message.device)
        means, variances, num_updates = self._centre.clone(), self._variances.clone(), self._num_updates.clone()
        for row in message:
            layer_counts, shifts, squares = row.split([len(self.layers), len(means), len(means)])
            active = layer_counts > 0
            num_updates += active
            # A negative momentum stands for momentum=None: a cumulative mean over effective batches.
            rates = torch.where(momentum < 0, 1 / num_updates.clamp(min=1), momentum)[self._owner]
            # At least 1, to avoid 0 / 0 for layers without values; their rate is 0, so they do not change.
            counts = layer_counts[self._owner].clamp(min=1)
            shift = shifts / counts
            unbiased = (squares - shifts * shift) / (counts - 1).clamp(min=1)
            rates = torch.where(active[self._owner], rates, 0)
            means.lerp_(self._centre + shift, rates)
            variances.lerp_(unbiased, rates)
        self._write(means, variances)
        increments = (num_updates - self._num_updates).long().unbind()
        change_each("add", self._counters_of_layers(), list(increments))

    def _momentum(self) -> Tensor:
        """Return the momentum of each layer, -1 for a cumulative mean."""
        values = [-1.0 if layer.momentum is None else layer.momentum for layer in self.layers]
        return torch.tensor(values, dtype=self._dtype)

    def _new_sums(self) -> "_CallSums":
        return _CallSums(self._sizes, self._centre)

    def _counters_of_layers(self) -> list[Tensor]:
        counters = [layer.num_batches_tracked for layer in self.layers]
        return [counter for counter in counters if counter is not None]

    def _write(self, means: Tensor, variances: Tensor) -> None:
        buffers = [layer.running_mean for layer in self.layers] + [layer.running_var for layer in self.layers]
        values = [*means.split(self._sizes), *variances.split(self._sizes)]
        change_each("copy", [b for b in buffers if b is not None], values)


class _CallSums:
    """The sums of every layer's k-th call within a forward, for one k.

    Every sum is a separate tensor, because compiled code loses writes to several views of one tensor (torch 2.13).
    """

    def __init__(self, sizes: list[int], like: Tensor) -> None:
        self.counts = [like.new_zeros(1) for _ in sizes]
        self.shifts = [like.new_zeros(size) for size in sizes]
        self.squares = [like.new_zeros(size) for size in sizes]

    @property
    def all(self) -> list[Tensor]:
        """All sums: the counts of all layers, then the shifts, then the squares."""
        return [*self.counts, *self.shifts, *self.squares]


class BufferReader:
    """A forward hook that reads the statistics of a layer's input from its buffers; the layer must have momentum 1."""

    def __init__(self, statistics: RunningStatistics, number: int) -> None:
        self._statistics = statistics
        self._number = number

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the statistics of the layer's last input."""
        del output
        statistics = self._statistics
        # Skip the recomputation of a checkpointed block in the backward, because its forward has been recorded.
        if not statistics.recording or not layer.training:
            return
        values, mean, variance = args[0], layer.running_mean, layer.running_var
        assert isinstance(mean, Tensor)
        assert isinstance(variance, Tensor)
        call = statistics.next_call(self._number)
        with torch.no_grad():
            count = values.numel() // values.shape[1]
            statistics.add(self._number, call, count, mean, variance * (count - 1))
