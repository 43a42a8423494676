"""Published language models, for `anybatch plan llama-3.1-8b` and similar commands: their sizes and their module."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.recipes.text import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The sizes and architecture of a decoder-only transformer, named as in `transformers`' configurations.

    `model_type` selects the kind of block. "gpt2": learned positions, LayerNorm, biases, an MLP of two matrices.
    "llama" and "mistral": rotary positions, RMSNorm, no biases, a gated MLP. "qwen2": Llama's with biases
    of queries, keys and values. Query heads are divided evenly among the `num_key_value_heads`.
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
        """Class and path of `Decoder`'s blocks -> their names in transformers' model of this type."""
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
et al. 2023, table 1 (Mistral 7B, with the vocabulary of its first version, and full attention instead of its window:
full attention needs the same memory and, above 4,096 tokens, more time); the Qwen2.5 report, table 1 (the base model,
with a context of 131,072).
"""


class Decoder(nn.Module):
    """A decoder: tokens to next-token logits; `checkpointed` recomputes each block's forward in the backward."""

    def __init__(self, config: DecoderConfig, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.model_type == "gpt2"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time token"]:
        """Return the logits; position t depends on the tokens up to and including t."""
        x = self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Float[Tensor, "batch time token"] = self.head(self.norm(x))
        return logits


class DecoderBlock(nn.Module):
    """Attention, then an MLP of two or three matrices, each on a normed copy and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.rotary = config.model_type != "gpt2"
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_width = config.hidden_size // config.num_attention_heads
        key_width = self.num_key_value_heads * self.head_width
        biased, query_biased = not self.rotary, config.model_type in {"gpt2", "qwen2"}
        self.attention_norm = _norm(config)
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=query_biased)
        self.key_value = nn.Linear(config.hidden_size, 2 * key_width, bias=query_biased)
        self.merge = nn.Linear(config.hidden_size, config.hidden_size, bias=biased)
        self.hidden_norm = _norm(config)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False) if self.rotary else None
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=biased)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=biased)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """Return x plus the outputs of both layers."""
        normed = self.attention_norm(x)
        query = self.query(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        both = self.key_value(normed).unflatten(-1, (2, self.num_key_value_heads, -1))
        key, value = both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        grouped = self.num_key_value_heads != self.num_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        x = x + self.merge(mixed.transpose(1, 2).flatten(-2))
        return x + self._hidden_layers(self.hidden_norm(x))

    def _hidden_layers(self, normed: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        up = self.up(normed)
        hidden = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(normed)) * up
        added: Float[Tensor, "batch time width"] = self.down(hidden)
        return added


def _norm(config: DecoderConfig) -> nn.Module:
    size = config.hidden_size
    return nn.LayerNorm(size) if config.model_type == "gpt2" else nn.RMSNorm(size, eps=1e-5)
