"""Published language models, for `anybatch plan llama-3.1-8b` and similar commands: their sizes and their module."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
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


_SOURCES = json.loads(files("anybatch.recipes.planning").joinpath("models.json").read_text(encoding="utf-8"))
KNOWN_MODELS: Mapping[str, DecoderConfig] = MappingProxyType(
    {row.pop("name"): DecoderConfig(**row) for rows in _SOURCES.values() for row in rows}
)
"""Sizes in the models' published configurations, by source.

Mistral is planned with full attention instead of its window: full attention needs the same memory and, above 4,096
tokens, more time.
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
