"""Memory formulas for transformers from the literature, to explain and to verify a plan.

A formula describes one architecture; the trace of `memory_model` describes the program. If they differ, trust the
trace, unless it differs by a large factor.
"""

from dataclasses import dataclass
from typing import Literal

from anybatch.errors import PlanError

Stage = Literal[0, 1, 2, 3]
"""What ZeRO deals to ranks: nothing; the optimizer's state; gradients too; weights too (as FSDP does)."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes allocated for one parameter throughout a step.

    Attributes:
        weight: the weight that forward and backward use.
        gradient: its gradient.
        optimizer: everything only the update needs: momenta and, where there is one, the weight in full precision.
    """

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """Return all of it."""
        return self.weight + self.gradient + self.optimizer


MIXED_ADAM = ParameterBytes(weight=2, gradient=2, optimizer=12)
"""Weights and gradients in 16 bits; weight, momentum and variance in 32: 16 bytes.

Source: Rajbhandari et al. 2020 (ZeRO), section 3.1. DeepSpeed's estimators count 18: a gradient in 32 bits as well.
"""

AUTOCAST_ADAM = ParameterBytes(weight=4, gradient=4, optimizer=8)
"""Everything in 32 bits under torch's autocast: 16 bytes, too, and no less than without autocast.

Limits: the 16-bit copies of weights that autocast keeps from forward to backward (2 bytes per parameter of matrix
products and convolutions), and a foreach update's square roots (4 bytes per parameter, for a moment) come on top.
"""

PLAIN_SGD = ParameterBytes(weight=4, gradient=4, optimizer=0)
"""SGD without momentum in 32 bits: 8 bytes."""


def state_bytes(num_parameters: int, each: ParameterBytes, stage: Stage = 0, world_size: int = 1) -> float:
    """Return the bytes one rank holds for parameters, gradients and optimizer state.

    Stage 0 holds all of it; stage 1 deals the optimizer's state to N ranks, stage 2 gradients too, stage 3 weights too:
    of 16 bytes (2 + 2 + 12), a rank holds 4 + 12/N, 2 + 14/N and 16/N.

    Source: Rajbhandari et al. 2020, figure 1. Limits: even shards; stage 3 also holds, for a while, the gathered
    weights of the layers at work, of which the largest are often the embedding and the head.
    """
    dealt = (0, each.optimizer, each.optimizer + each.gradient, each.total)[stage]
    return num_parameters * (each.total - dealt + dealt / world_size)


def smallest_world_size(num_parameters: int, each: ParameterBytes, budget_bytes: float, *, stage: Stage = 3) -> int:
    """Return the least number of ranks at which the state alone takes at most `budget_bytes` on each.

    Raises:
        PlanError: the unsharded part exceeds the budget on any number of ranks.
    """
    # On so many ranks only what is not dealt is left.
    fixed = state_bytes(num_parameters, each, stage, 1 << 62)
    if budget_bytes <= fixed:
        message = (
            f"stage {stage} leaves {fixed:,.0f} bytes on every rank, however many there are; the budget is "
            f"{budget_bytes:,.0f}. Deal more to the ranks (a higher stage), or use fewer bytes per parameter."
        )
        raise PlanError(message)
    dealt = state_bytes(num_parameters, each, stage, 1) - fixed
    return max(1, -int(-dealt // (budget_bytes - fixed)))


def transformer_layer_activation_bytes(
    *,
    sequence_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_heads: int,
    tensor_parallel_size: int = 1,
    keeps: Literal["scores", "flash", "input"] = "scores",
) -> float:
    """Return the activation bytes of one layer, in 16 bits with dropout: `s b h (34 + 5 a s / h)` bytes.

    `keeps` says what of it: "scores", everything, the `a s` attention scores per token too; "flash", everything but
    those; "input", the layer's input alone, `2 s b h`, everything else being computed again.
    With `t` ranks in tensor parallel it is `s b h (10 + 24 / t + 5 a s / (h t))`.

    Source: Korthikanti et al. 2022, equations 1 and 2 and table 2. Limits: GPT-2's layer (four times the width inside,
    GELU, biases, dropout); under autocast with weights in 32 bits a layer's input takes 4 bytes, not 2.
    """
    tokens = sequence_length * micro_batch_size
    if keeps == "input":
        return 2.0 * tokens * hidden_size
    scores = 5.0 * num_heads * sequence_length / hidden_size if keeps == "scores" else 0.0
    return tokens * hidden_size * (10 + (24 + scores) / tensor_parallel_size)


def logits_bytes(num_tokens: int, vocabulary_size: int, *, copies: float = 3.0, bytes_per_value: int = 4) -> float:
    """Return the peak bytes of the loss of a language model: logits, their log-softmax and its gradient.

    Three copies were measured for `cross_entropy` in 32 bits. Limits: a loss head in chunks holds one chunk's copies.
    """
    return copies * num_tokens * vocabulary_size * bytes_per_value
