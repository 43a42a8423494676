"""The tensors that an engine keeps across steps, in bytes, and suggestions if memory does not suffice."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from anybatch.core.units import in_bytes
from anybatch.engine.notifier import ResidentTensors, num_bytes_of
from anybatch.engine.update.precision import Target
from anybatch.engine.update.weight_average import WeightAverage
from anybatch.memory.trace import Category
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.strategy import Prepared


def resident_tensors(
    modules: nn.Module, prepared: Prepared, target: Target, average: WeightAverage | None
) -> ResidentTensors:
    """Return the engine's current tensors without the batch, by category.

    "weights" includes frozen ones; "optimizer" includes its state, master weights and averaged weights. Tensors may
    share memory; see `num_bytes_of`.

    Args:
        modules: all trained modules.
        prepared: the model, prepared by the strategy.
        target: the optimizer and the tensors it updates.
        average: the averaged weights, or None.
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


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Bytes of the tensors that stay across steps, computed on each call.

    Attributes:
        tensors: function () -> the tensors that stay across steps.
        target: the optimizer and the parameters with gradients.
        precision: precision of the engine.
    """

    tensors: Callable[[], ResidentTensors]
    target: Target
    precision: str

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind that stay across steps; for gradients, the bytes that a step will need."""
        tensors = self.tensors()
        found = {
            "weights": num_bytes_of(tensors["weights"]),
            "gradients": gradient_bytes(self.target.parameters),
            "optimizer state": num_bytes_of(tensors["optimizer"]),
            "buffers": num_bytes_of(tensors["buffers"]),
        }
        return {kind: num for kind, num in found.items() if num}

    def remedy(self, *, in_update: bool = False) -> str:
        """Return the memory that a step needs in addition to activations, and ways to reduce it, as sentences.

        Args:
            in_update: memory ran out in the optimizer's step.
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
