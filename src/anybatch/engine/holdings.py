"""What a rank holds beside activations, in bytes, and what could be done where there is no room."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.engine.precision import Target
from anybatch.events.quantities import in_bytes
from anybatch.parallel.gradients import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Holdings:
    """Reads what is held from the parts of an engine, whenever it is asked.

    Attributes:
        modules: weights and buffers.
        target: gradients, optimizer and master weights.
        precision: of the engine.
    """

    modules: nn.Module
    target: Target
    precision: str

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind that stay from step to step."""
        weights = [*self.modules.parameters()]
        masters = self.target.updated if self.target.update == "master_weights" else ()
        own = {id(parameter) for parameter in weights}
        found = {
            "weights": _total(weights) + _total(p for p in masters if id(p) not in own),
            "gradients": sum(p.numel() * accumulation_dtype(p).itemsize for p in self.target.parameters),
            "optimizer state": optimizer_bytes(self.target.optimizer),
            "buffers": _total(self.modules.buffers()),
        }
        return {kind: num for kind, num in found.items() if num}

    def remedy(self) -> str:
        """Return what is held and what would take less, in sentences."""
        held = self.num_bytes()
        listed = ", ".join(f"{kind} {in_bytes(num)}" for kind, num in held.items())
        ideas = ["activation checkpointing", "shorter or smaller samples", "a smaller model, or a part of it frozen"]
        if self.precision == "fp32":
            ideas.insert(0, "precision='bf16'")
        state, weights = held.get("optimizer state", 0), held.get("weights", 0)
        if state > 1.5 * weights:
            ideas.append("an optimizer with less state (this one holds " + in_bytes(state) + ")")
        if getattr(self.target.optimizer, "defaults", {}).get("fused") is None:
            ideas.append("fused=True in the optimizer, which needs no copies in its step")
        return f"Held beside activations: {listed}. What takes less: {'; '.join(ideas)}."


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return _total(value for state in optimizer.state.values() for value in state.values())


def _total(values: Iterable[object]) -> int:
    return sum(value.numel() * value.itemsize for value in values if isinstance(value, torch.Tensor))
