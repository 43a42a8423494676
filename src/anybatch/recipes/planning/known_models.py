"""The sizes of published language models: what `anybatch plan llama-3.1-8b` stands for. No weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a decoder-only transformer.

    Attributes:
        num_layers: blocks.
        width: numbers that stand for a token.
        num_heads: attention heads.
        num_key_heads: heads of keys and values, each shared by `num_heads / num_key_heads` others.
        hidden: width inside a block's second half.
        vocabulary: tokens there are.
        context: most tokens of a sequence.
        tied: what reads a token also writes it.
        rotary: Llama's form (rotated queries and keys, RMS norms, a gated second half, no biases) and not GPT-2's.
        query_bias: queries, keys and values have a bias all the same, as Qwen's have.
    """

    num_layers: int
    width: int
    num_heads: int
    num_key_heads: int
    hidden: int
    vocabulary: int
    context: int
    tied: bool
    rotary: bool = True
    query_bias: bool = False


def _gpt2(num_layers: int, width: int, num_heads: int) -> Shape:
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_key_heads=num_heads,
        hidden=4 * width,
        vocabulary=50_257,
        context=1_024,
        tied=True,
        rotary=False,
    )


def _llama(num_layers: int, width: int, num_heads: int, hidden: int, *, tied: bool = False) -> Shape:
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_key_heads=8,
        hidden=hidden,
        vocabulary=128_256,
        context=8_192,
        tied=tied,
    )


KNOWN_MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1_024, 16),
        "gpt2-large": _gpt2(36, 1_280, 20),
        "gpt2-xl": _gpt2(48, 1_600, 25),
        "llama-3.2-1b": _llama(16, 2_048, 32, 8_192, tied=True),
        "llama-3.2-3b": _llama(28, 3_072, 24, 8_192, tied=True),
        "llama-3.1-8b": _llama(32, 4_096, 32, 14_336),
        "llama-3.1-70b": _llama(80, 8_192, 64, 28_672),
        "llama-3.1-405b": _llama(126, 16_384, 128, 53_248),
        "mistral-7b": Shape(
            num_layers=32,
            width=4_096,
            num_heads=32,
            num_key_heads=8,
            hidden=14_336,
            vocabulary=32_000,
            context=8_192,
            tied=False,
        ),
        "qwen2.5-7b": Shape(
            num_layers=28,
            width=3_584,
            num_heads=28,
            num_key_heads=4,
            hidden=18_944,
            vocabulary=152_064,
            context=8_192,
            tied=False,
            query_bias=True,
        ),
    }
)
"""Sizes as in the models' published configurations. `context` is the length of a sequence unless another one is given.

Source: Radford et al. 2019 (GPT-2); Grattafiori et al. 2024, table 3, and the model cards of Llama 3.1 and 3.2; Jiang
et al. 2023, table 1 (Mistral 7B, with the vocabulary of its first version); the Qwen2.5 report, table 1.
"""
