"""The sizes of published language models for `anybatch plan llama-3.1-8b` and similar commands, without weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The size and form of a decoder-only transformer, with the names of `transformers`' configurations.

    `model_type` is the form of the blocks. "gpt2": learned positions, LayerNorm, biases, an MLP of two matrices.
    "llama" and "mistral": rotary positions, RMSNorm, no biases, a gated MLP. "qwen2": Llama's with biases
    of queries, keys and values. Each of the `num_key_value_heads` is shared by the same number of query heads.
    """

    model_type: Literal["gpt2", "llama", "mistral", "qwen2"] = "llama"
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def called(self) -> Mapping[str, str]:
        """Map the class and path of `Decoder`'s blocks to their names in transformers' model of this type."""
        names = {
            "gpt2": ("GPT2Block", "transformer.h"),
            "llama": ("LlamaDecoderLayer", "model.layers"),
            "mistral": ("MistralDecoderLayer", "model.layers"),
            "qwen2": ("Qwen2DecoderLayer", "model.layers"),
        }
        return dict(zip(("DecoderBlock", "blocks"), names[self.model_type], strict=True))


def _gpt2(num_hidden_layers: int, hidden_size: int, num_attention_heads: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="gpt2",
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_attention_heads,
        intermediate_size=4 * hidden_size,
        vocab_size=50_257,
        max_position_embeddings=1_024,
        tie_word_embeddings=True,
    )


def _llama3(
    num_hidden_layers: int, hidden_size: int, num_attention_heads: int, intermediate_size: int, *, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        intermediate_size=intermediate_size,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
    )


KNOWN_MODELS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1_024, 16),
        "gpt2-large": _gpt2(36, 1_280, 20),
        "gpt2-xl": _gpt2(48, 1_600, 25),
        "llama-3.2-1b": _llama3(16, 2_048, 32, 8_192, tied=True),
        "llama-3.2-3b": _llama3(28, 3_072, 24, 8_192, tied=True),
        "llama-3.1-8b": _llama3(32, 4_096, 32, 14_336),
        "llama-3.1-70b": _llama3(80, 8_192, 64, 28_672),
        "llama-3.1-405b": _llama3(126, 16_384, 128, 53_248),
        "mistral-7b": DecoderConfig(
            model_type="mistral",
            num_hidden_layers=32,
            hidden_size=4_096,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
            vocab_size=32_000,
            max_position_embeddings=32_768,
            tie_word_embeddings=False,
        ),
        "qwen2.5-7b": DecoderConfig(
            model_type="qwen2",
            num_hidden_layers=28,
            hidden_size=3_584,
            num_attention_heads=28,
            num_key_value_heads=4,
            intermediate_size=18_944,
            vocab_size=152_064,
            max_position_embeddings=131_072,
            tie_word_embeddings=False,
        ),
    }
)
"""Sizes in the models' published configurations.

Source: Radford et al. 2019 (GPT-2); Grattafiori et al. 2024, table 3, and the model cards of Llama 3.1 and 3.2; Jiang
et al. 2023, table 1 (Mistral 7B, with the vocabulary of its first version, and without its window: each token sees all
before it, which needs the same memory and, above 4,096 tokens, more time); the Qwen2.5 report, table 1 (the base model,
with a context of 131,072).
"""
