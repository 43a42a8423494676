"""The tensors that an engine keeps from step to step, in bytes, and what could be done where there is no room."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.core.torch_internals import sparse_bytes, storage_key
from anybatch.core.units import in_bytes
from anybatch.engine.update.precision import Target
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.memory.trace import Category
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.strategy import Prepared

ResidentTensors = Mapping[Category, Sequence[torch.Tensor]]


def resident_tensors(
    modules: nn.Module, prepared: Prepared, target: Target, average: WeightAverage | None
) -> ResidentTensors:
    """Return the tensors of an engine at this moment, beside those of the batch, by what they are for.

    Weights are those of the modules, frozen ones too. What the optimizer needs beside them is the optimizer's: its
    state, master weights, averaged weights. Tensors may share memory; see `num_bytes_of`.

    Args:
        modules: all that trains.
        prepared: what the strategy has made of it.
        target: the optimizer and what it updates.
        average: the averaged weights, if there are any.
    """
    local = prepared.layout.local
    weights = list(modules.parameters())
    beside = tuple(target.beside.values())
    states = itertools.chain.from_iterable(state.values() for state in target.optimizer.state.values())
    averaged = () if average is None else average.weights.values()
    gradients = (parameter.grad for parameter in (*weights, *target.updated) if parameter.grad is not None)
    state = (value for value in states if isinstance(value, torch.Tensor))
    found: dict[Category, Iterable[torch.Tensor]] = {
        "weights": weights,
        "buffers": modules.buffers(),
        "gradients": (*prepared.gradient_buffers, *gradients),
        "optimizer": (*beside, *state, *averaged),
    }
    return {category: [local(tensor) for tensor in tensors] for category, tensors in found.items()}


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all memory that tensors are in; what several of them share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        else:
            # A sparse tensor has no storage of its own that could be asked for.
            sizes[id(tensor)] = sparse_bytes(tensor)
    return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes of the tensors that stay from step to step, read whenever they are asked for.

    Attributes:
        tensors: function () -> the tensors that stay from step to step.
        target: what gradients there will be, and the optimizer.
        precision: of the engine.
    """

    tensors: Callable[[], ResidentTensors]
    target: Target
    precision: str

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind that stay from step to step; of gradients those that a step will make."""
        tensors = self.tensors()
        found = {
            "weights": num_bytes_of(tensors["weights"]),
            "gradients": gradient_bytes(self.target.parameters),
            "optimizer state": num_bytes_of(tensors["optimizer"]),
            "buffers": num_bytes_of(tensors["buffers"]),
        }
        return {kind: num for kind, num in found.items() if num}

    def remedy(self, *, in_update: bool = False) -> str:
        """Return what a step needs beside activations, and what would need less, in sentences.

        Args:
            in_update: memory ran out in the optimizer's own step.
        """
        num_bytes = self.num_bytes()
        listed = ", ".join(f"{kind} {in_bytes(num)}" for kind, num in num_bytes.items())
        ideas = ["activation checkpointing", "shorter or smaller samples", "a smaller model, or a part of it frozen"]
        if self.precision == "fp32":
            ideas.insert(0, "precision='bf16'")
        state, weights = num_bytes.get("optimizer state", 0), num_bytes.get("weights", 0)
        # Momentum keeps one copy of the weights, Adam two.
        if state > 1.5 * weights:
            ideas.append("an optimizer with less state (this one has " + in_bytes(state) + ")")
        if in_update and getattr(self.target.optimizer, "defaults", {}).get("fused") is None:
            ideas.append("fused=True in the optimizer, which needs no copies in its step")
        return f"Besides activations a step needs: {listed}. To reduce memory: {'; '.join(ideas)}."
