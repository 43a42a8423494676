"""The tensors that an engine keeps from step to step, by what they are held for."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from anybatch.core.torch_internals import sparse_bytes, storage_key
from anybatch.engine.update.precision import Target
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.memory.trace import Category
from anybatch.parallel.strategy import Prepared

Held = Mapping[Category, Sequence[torch.Tensor]]


def held_tensors(modules: nn.Module, prepared: Prepared, target: Target, average: WeightAverage | None) -> Held:
    """Return what an engine holds at this moment beside the batch, by what it is held for.

    Weights are those of the modules, frozen ones too. What the optimizer needs beside them is the optimizer's: its
    state, master weights, averaged weights. Tensors may share memory; see `num_bytes_of`.

    Args:
        modules: all that trains.
        prepared: what the strategy has made of it.
        target: the optimizer and what it updates.
        average: the averaged weights, if there are any.
    """
    weights = list(modules.parameters())
    own = set(map(id, weights))
    masters = [parameter for parameter in target.updated if id(parameter) not in own]
    states = itertools.chain.from_iterable(state.values() for state in target.optimizer.state.values())
    averaged = () if average is None else average.weights.values()
    return {
        "weights": weights,
        "buffers": list(modules.buffers()),
        "gradients": [
            *prepared.gradient_buffers,
            *(parameter.grad for parameter in (*weights, *masters) if parameter.grad is not None),
        ],
        "optimizer": [*masters, *(value for value in states if isinstance(value, torch.Tensor)), *averaged],
    }


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all memory that tensors are in; what several of them share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        else:
            sizes[id(tensor)] = sparse_bytes(tensor)
    return sum(sizes.values())
