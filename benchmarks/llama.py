"""A Llama-like transformer for planning: root-mean-square norms, rotary positions, grouped queries, SwiGLU.

It has the operations of an eager implementation, since its memory is planned.
Weights are initialized like torch's layers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from anybatch.core.loss import mean_over_samples
from anybatch.engine.arguments import TrainSpec
from anybatch.planner.step_spec import StepSpec

Tokens = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both (samples, tokens)."""

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 (operations have no other names)
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model of the family.

    Args:
        checkpointing: "none"; "full": only the inputs of blocks are saved; "selective": the outputs of attention
            and of every other matrix product are saved as well.
    """

    num_layers: int
    width: int
    num_heads: int
    num_key_heads: int
    hidden: int
    vocabulary: int
    num_tokens: int
    checkpointing: str = "none"


SMALL = Shape(num_layers=12, width=768, num_heads=12, num_key_heads=12, hidden=2048, vocabulary=32000, num_tokens=1024)
ONE = Shape(num_layers=24, width=2048, num_heads=16, num_key_heads=16, hidden=5504, vocabulary=32000, num_tokens=2048)
EIGHT = Shape(
    num_layers=32, width=4096, num_heads=32, num_key_heads=8, hidden=14336, vocabulary=128256, num_tokens=8192
)
SEVENTY = replace(EIGHT, num_layers=80, width=8192, num_heads=64, hidden=28672)


class Norm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (samples, tokens, width)."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention whose keys and values are shared by groups of heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.num_shared = shape.num_heads // shape.num_key_heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.num_key_heads * self.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.num_key_heads * self.head_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return (samples, tokens, width)."""
        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)
        )
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        keys, values = (shared(part, self.num_shared) for part in (keys, values))
        heads = (part.transpose(1, 2) for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().flatten(2))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of values by an angle that grows with the position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[: x.shape[1], None]).flatten(-2).type_as(x)


def shared(x: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Repeat each key or value head for the queries that share it."""
    return x if num_shared == 1 else x[:, :, :, None].expand(-1, -1, -1, num_shared, -1).flatten(2, 3)


class Gated(nn.Module):
    """A gated perceptron (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (samples, tokens, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.before_gated = Norm(shape.width), Norm(shape.width)
        self.attention, self.gated = Attention(shape), Gated(shape)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return (samples, tokens, width)."""
        x = x + self.attention(self.before_attention(x), angles)
        return x + self.gated(self.before_gated(x))


class Llama(nn.Module):
    """The model: embedding, blocks, norm and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        blocks = (Block(shape) for _ in range(shape.num_layers))
        if shape.checkpointing != "none":
            contexts = {"context_fn": selective_contexts} if shape.checkpointing == "selective" else {}
            blocks = (checkpoint_wrapper(block, preserve_rng_state=False, **contexts) for block in blocks)
        self.blocks = nn.ModuleList(blocks)
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        width = shape.width // shape.num_heads
        rates = 500_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(shape.num_tokens, dtype=torch.float32), rates)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


class EveryOtherProduct:
    """Saves attention outputs and every other matrix product; the rest is recomputed in the backward."""

    def __init__(self) -> None:
        self.num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:  # noqa: ANN401
        """Return the policy for the result of an operation."""
        keep = operation in ATTENTION
        if operation is torch.ops.aten.mm.default:
            self.num_products[context.is_recompute] += 1
            keep = self.num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:  # noqa: ANN401 (two contexts of torch's own types)
    """Return the contexts for one block's forward and its recomputation."""
    return create_selective_checkpoint_contexts(EveryOtherProduct())


def loss(model: nn.Module, batch: Tokens) -> torch.Tensor:
    """Return the mean cross-entropy, which is computed in float32."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def spec(shape: Shape, **how: Any) -> StepSpec:  # noqa: ANN401 (fields of a spec, `model` and `precision`)
    """Return the training of a model of that shape."""
    sample = torch.zeros(1, shape.num_tokens, dtype=torch.long, device="meta")
    make = how.pop("model", partial(Llama, shape))
    precision = how.pop("precision", "fp32")
    optimizer, mean = partial(AdamW, foreach=True), mean_over_samples(loss)

    def train() -> TrainSpec:
        return TrainSpec(model=make(), optimizer=optimizer, loss=mean, precision=precision)

    return StepSpec(train=train, sample=(sample, sample), **how)
