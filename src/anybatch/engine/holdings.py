"""What a rank holds beside activations, in bytes, and what could be done where there is no room."""

from collections.abc import Callable
from dataclasses import dataclass

from anybatch.core.units import in_bytes
from anybatch.engine.update.precision import Target
from anybatch.engine.update.resident_tensors import Held, num_bytes_of
from anybatch.parallel.gradient_buckets import gradient_bytes


@dataclass(frozen=True, slots=True)
class Holdings:
    """Reads what is held from the parts of an engine, whenever it is asked.

    Attributes:
        held: returns the tensors that stay from step to step.
        target: what gradients there will be, and the optimizer.
        precision: of the engine.
    """

    held: Callable[[], Held]
    target: Target
    precision: str

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of each kind that stay from step to step; of gradients those that a step will make."""
        held = self.held()
        found = {
            "weights": num_bytes_of(held["weights"]),
            "gradients": gradient_bytes(self.target.parameters),
            "optimizer state": num_bytes_of(held["optimizer"]),
            "buffers": num_bytes_of(held["buffers"]),
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
