"""Memory formulas for transformers from the literature, to compare with a plan.

A formula describes an architecture, and a plan describes the traced program. If they differ, trust the plan, unless
they differ by a large factor.
"""

ADAM_STATE_BYTES = 16
"""Bytes per parameter of weight, gradient, momentum and variance in 32 bits, with torch's autocast or without.

Source: Rajbhandari et al. 2020 (ZeRO), section 3.1, which counts the same 16 bytes in mixed precision.

Not included: the 16-bit copies of weights that autocast keeps from forward to backward (2 bytes per parameter of
matrix products and convolutions), and the square roots in a foreach update (temporarily 4 bytes per parameter).
"""


def layer_activation_bytes(num_tokens: int, hidden_size: int) -> int:
    """Return the activation bytes of one transformer layer, in 16 bits with dropout: 34 per token and hidden unit.

    Source: Korthikanti et al. 2022, equation 1 without the attention scores, which fused attention does not keep.
    Limits: only layers like GPT-2's (inner width 4 x hidden size, GELU, biases, dropout); under autocast with weights
    in 32 bits, a layer's input takes 4 bytes, not 2.
    """
    return 34 * num_tokens * hidden_size


def logits_bytes(num_tokens: int, vocabulary_size: int) -> int:
    """Return the peak bytes of the loss of a language model: logits, their log-softmax, and its gradient, in 32 bits.

    Measurements show these three copies for `cross_entropy`. Limits: a chunked loss needs them for one chunk only.
    """
    return 3 * 4 * num_tokens * vocabulary_size
