"""Recompute BatchNorm's running statistics after training, exactly, from all of the data."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anybatch.core.dtypes import widest_dtype
from anybatch.core.torch_internals import BatchNormBase
from anybatch.errors import DataError
from anybatch.norms.layers import ModelCall, Ranks, tracking_layers


class _StopForward(BaseException):  # not an Exception, which a model might catch
    """Ends a forward after the last call of the layer whose input is measured."""


def recompute_statistics(
    model: nn.Module, batches: Iterable[Any], *, call: ModelCall | None = None, ranks: Ranks | None = None
) -> tuple[str, ...]:
    """Replace the running statistics of all BatchNorm layers by exact ones of the data, and return the layers' names.

    Afterwards each layer's mean and unbiased variance are the statistics of its inputs over all batches, with the
    layers before it normalising by *their* new statistics: the inputs in evaluation. So the result does not depend on
    the cut of the data, unlike one pass in train mode. Layers are processed one after the other, each with one pass
    over the data, up to that layer, and one pass finds their order.

    Args:
        model: the trained model; its modes, its parameters and everything but the statistics are unchanged.
        batches: can be iterated over several times, such as a list or a loader without shuffling; on several ranks each
            rank's own part.
        call: runs the model on a batch; None: `model(batch)`.
        ranks: the other ranks, see `anybatch.norms.layers.Ranks`; None for one rank.

    Returns:
        The names of the layers, in the order of their first call.

    Raises:
        DataError: batches that can be iterated over only once, or none.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3, for its use; their method is one pass.
    """
    ranks = ranks or Ranks()
    if isinstance(batches, Iterator):
        message = f"{type(batches).__name__} can be iterated over once only, but every layer takes a pass. Give a list."
        raise DataError(message)
    run = call or (lambda module, batch: module(batch))
    layers = {name: layer for name, layer in tracking_layers(model).items() if isinstance(layer, BatchNormBase)}
    with _in_evaluation_mode(model), torch.no_grad():
        order = _order(model, layers, batches, run)
        for name, num_calls in order.items():
            mean, variance = _statistics(model, layers[name], batches, run, num_calls=num_calls, ranks=ranks)
            layer = layers[name]
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
    return tuple(order)


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _order(
    model: nn.Module, layers: dict[str, BatchNormBase], batches: Iterable[Any], run: ModelCall
) -> dict[str, int]:
    """Return the number of calls of each layer in one forward, in the order of the first calls."""
    found: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            found[name] = found.get(name, 0) + 1

        return hook

    handles: list[RemovableHandle] = [layer.register_forward_hook(counting(name)) for name, layer in layers.items()]
    try:
        for batch in batches:
            run(model, batch)
            return found
    finally:
        for handle in handles:
            handle.remove()
    message = "statistics need at least one batch, and `batches` is empty."
    raise DataError(message)


def _statistics(
    model: nn.Module, layer: BatchNormBase, batches: Iterable[Any], run: ModelCall, *, num_calls: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of a layer's inputs over all batches and ranks."""
    assert layer.running_mean is not None
    dtype = widest_dtype(layer.running_mean.device)
    count = torch.zeros(1, dtype=dtype, device=layer.running_mean.device)
    mean, squares = (torch.zeros_like(layer.running_mean, dtype=dtype) for _ in range(2))
    calls = 0

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal calls
        values = args[0].transpose(0, 1).flatten(1).to(dtype)  # (channels, samples and positions)
        variance, own = torch.var_mean(values, 1, correction=0)
        _merge((count, mean, squares), values.shape[1], own, variance * values.shape[1])
        calls += 1
        if calls == num_calls:
            calls = 0
            raise _StopForward

    handle = layer.register_forward_pre_hook(hook)
    try:
        for batch in batches:
            # A forward that called the layer less often than the first one has left its count.
            calls = 0
            try:
                run(model, batch)
            except _StopForward:
                continue
    finally:
        handle.remove()
    # Two messages: squares are taken around the mean of all ranks, from the first one.
    total = ranks.sum(torch.cat([count, mean * count]))
    overall = total[1:] / total[:1]
    squares = ranks.sum(squares + (mean - overall).square() * count)
    return overall, squares / (total[:1] - 1).clamp(min=1)


def _merge(into: tuple[Tensor, Tensor, Tensor], count: int, mean: Tensor, squares: Tensor) -> None:
    """Merge the statistics of some values into others, in place.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    total_count, total_mean, total_squares = into
    distance = mean - total_mean
    together = total_count + count
    total_squares += squares + distance.square() * total_count * count / together
    total_mean += distance * count / together
    total_count += count
