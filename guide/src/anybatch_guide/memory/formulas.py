"""Memory formulas for transformers from the literature, to explain and to verify a plan.

A formula describes one architecture; the trace of `memory_model` describes the program. If they differ, trust the
trace, unless it differs by a large factor.
"""

from dataclasses import dataclass
from typing import Literal

from anybatch.errors import PlanError

Stage = Literal[0, 1, 2, 3]
"""ZeRO stages: they shard nothing; optimizer states; also gradients; also weights (like FSDP)."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes allocated for one parameter throughout a step."""

    weight: int  # the weight that forward and backward use
    gradient: int  # its gradient
    optimizer: int  # its optimizer state, including the weight in full precision if there is one

    @property
    def total(self) -> int:
        """Return the total."""
        return self.weight + self.gradient + self.optimizer


MIXED_ADAM = ParameterBytes(weight=2, gradient=2, optimizer=12)
"""Weights and gradients in 16 bits; weight, momentum and variance in 32: 16 bytes.

Source: Rajbhandari et al. 2020 (ZeRO), section 3.1. DeepSpeed's estimators count 18: a gradient in 32 bits as well.
"""

AUTOCAST_ADAM = ParameterBytes(weight=4, gradient=4, optimizer=8)
"""Everything in 32 bits, with torch's autocast: also 16 bytes, as without autocast.

Not included: the 16-bit copies of weights that autocast keeps from forward to backward (2 bytes per parameter of
matrix products and convolutions), and the square roots in a foreach update (temporarily 4 bytes per parameter).
"""

PLAIN_SGD = ParameterBytes(weight=4, gradient=4, optimizer=0)
"""SGD without momentum in 32 bits: 8 bytes."""


def state_bytes(num_parameters: int, each: ParameterBytes, stage: Stage = 0, world_size: int = 1) -> float:
    """Return the bytes one rank holds for parameters, gradients and optimizer state.

    Stage 0 shards nothing; stage 1 shards optimizer states over N ranks, stage 2 also gradients, stage 3 also weights.
    Of 16 bytes (2 + 2 + 12), a rank holds 4 + 12/N, 2 + 14/N and 16/N.

    Source: Rajbhandari et al. 2020, figure 1. Limits: shards are even; stage 3 temporarily also holds the gathered
    weights of the running layer, and the embedding and the head are often the largest layers.
    """
    dealt = (0, each.optimizer, each.optimizer + each.gradient, each.total)[stage]
    return num_parameters * (each.total - dealt + dealt / world_size)


def smallest_world_size(num_parameters: int, each: ParameterBytes, budget_bytes: float, *, stage: Stage = 3) -> int:
    """Return the smallest number of ranks at which this state fits into `budget_bytes` on each rank."""
    # With this many ranks, only the unsharded bytes remain.
    fixed = state_bytes(num_parameters, each, stage, 1 << 62)
    if budget_bytes <= fixed:
        message = (
            f"stage {stage} needs {fixed:,.0f} bytes on every rank, for any number of ranks; the budget is "
            f"{budget_bytes:,.0f}. Shard more (a higher stage), or use fewer bytes per parameter."
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

    `keeps` selects the kept tensors: "scores", all of them, with the `a s` attention scores per token; "flash", all
    except the scores; "input", only the layer's input (`2 s b h`), because the rest is recomputed.
    With tensor parallelism over `t` ranks it is `s b h (10 + 24 / t + 5 a s / (h t))`.

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

    Measurements show three copies for `cross_entropy` in 32 bits. Limits: a chunked loss head needs them for one chunk.
    """
    return copies * num_tokens * vocabulary_size * bytes_per_value
