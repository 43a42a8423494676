"""Chapter 8: the report of a step. Values stay on the device until they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.batch import Position
from anybatch.core.gradient_noise import NoiseEstimate
from anybatch.core.splitting import BatchPlan


# eq=False: comparing two reports would compare tensors, and wait for the device.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """The result of one optimizer step. Reading a number waits for the device; not reading it costs nothing.

    Attributes:
        step: number of this step, from 0.
        plan: the units of each rank.
        position: position in the data after the step.
        learning_rates: rate of each parameter group in this step.
        skipped: whether the update was skipped, because fp16 gradients overflowed or a spike watch rolls back instead
            of ending the run; all ranks skip together.
        update: how gradients reached the parameters: "direct", "master_weights", "cast", "split" or "stochastic".
        contributions: tensor (terms,): weight x mean of each loss term over the whole effective batch.
        weights: weight of each loss term, by name.
        counts: tensor (terms,): items of each term over the whole effective batch.
        gradient_norm: zero-axis tensor, the 2-norm over all gradients before clipping; None if not measured.
        noise: the gradient noise, smoothed over the steps up to this one; None in a step that did not measure it.
        too_large: largest micro-batches of the cuts that ran out of memory, in order; the step was retried after each,
            and `plan` is the cut that succeeded.
    """

    step: int
    plan: BatchPlan
    position: Position
    learning_rates: tuple[float | torch.Tensor, ...]
    skipped: bool
    update: str
    contributions: Float[Tensor, " term"]
    weights: Mapping[str, float]
    counts: Float[Tensor, " term"]
    gradient_norm: Float[Tensor, ""] | None
    noise: NoiseEstimate | None = None
    too_large: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Return the report as a paragraph; reading its numbers waits for the device."""
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.losses.items())
        rates = ", ".join(f"{float(rate):.4g}" for rate in dict.fromkeys(self.learning_rates))
        sizes = ", ".join(map(str, self.too_large))
        parts = (
            f"loss {self.loss:.4g}" + f" ({terms})" * (len(self.weights) > 1),
            "" if self.gradient_norm is None else f"gradient norm {self.grad_norm:.4g}",
            f"learning rate {rates}",
            str(self.plan),
            f"next: epoch {self.position.epoch}, sample {self.position.sample_offset}",
            "update skipped" if self.skipped else "",
            f"repeated after out of memory at micro-batches of {sizes}" if sizes else "",
        )
        return f"step {self.step}: {', '.join(filter(None, parts))}"

    @property
    def loss(self) -> float:
        """The loss of the whole effective batch, over all ranks."""
        return float(self.contributions.sum())

    @property
    def losses(self) -> dict[str, float]:
        """The mean of each term over the whole effective batch; NaN for a term of weight 0 or without items."""
        values = self.contributions.tolist()
        return {
            name: value / weight if weight and count else float("nan")
            for (name, weight), value, count in zip(self.weights.items(), values, self.counts.tolist(), strict=True)
        }

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm before clipping, as a number."""
        return None if self.gradient_norm is None else float(self.gradient_norm)

    @property
    def num_samples(self) -> int:
        """Samples of the effective batch, over all ranks."""
        return self.plan.num_samples
