"""A small transformer to shard, both planned and on real ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.memory.ledger import MemoryLedger
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.sharding import Sharding
from anybatch.parallel.strategy import Strategy
from anybatch.planner.fake_ranks import recorded_resizes
from anybatch.planner.step_spec import StepSpec
from tests.planner.step_specs import step_spec

Tokens = tuple[torch.Tensor, torch.Tensor]

WIDTH, VOCABULARY, NUM_BLOCKS, NUM_TOKENS = 40, 500, 3, 32
"""40 rows do not divide evenly among three ranks."""


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.mix(self.norm(x)).chunk(3, -1)
        changed: torch.Tensor = self.layers(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))
        return x + changed


class Network(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss(model: nn.Module, batch: Tokens) -> torch.Tensor:
    """Return the mean cross-entropy."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def adamw(named: object) -> torch.optim.Optimizer:
    """Return a foreach optimizer, which updates all parameters together."""
    return torch.optim.AdamW(named, foreach=True)  # type: ignore[arg-type]


def sharded_spec(world_size: int) -> StepSpec:
    """Return the spec of training the network, planned with the CPU's allocation rules."""
    sample = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    mean = ab.mean_over_samples(loss)
    return step_spec(
        Network, optimizer=adamw, loss=mean, sample=(sample, sample.clone()), world_size=world_size, profile="cpu"
    )


STRATEGIES: dict[str, str | Callable[[], Strategy]] = {
    "zero1": "zero1",
    "once": lambda: FSDP(reduction="last_micro_batch"),
    "each time": lambda: FSDP(reduction="every_micro_batch"),
    "kept, bf16": lambda: FSDP(Sharding(reshard_after_forward=False, param_dtype=torch.bfloat16)),
    "each time, bf16": lambda: FSDP(Sharding(param_dtype=torch.bfloat16), reduction="every_micro_batch"),
}
"""Strategies to plan and to run on real ranks."""


@dataclass(frozen=True)
class Held:
    """Measured memory of a real rank: every allocation of a step as (operation, bytes), and the peak."""

    taken: list[tuple[str, int]]
    peak_bytes: int


def hold_for_real(micro_batch_size: int, name: str) -> Held:
    """Run on every rank: train with the engine, and record the allocations of the last of three steps."""
    how = STRATEGIES[name]
    torch.manual_seed(0)
    world = ab.World.from_environment()
    tokens = torch.full((2 * micro_batch_size, NUM_TOKENS), world.rank)
    batch = (tokens, tokens.clone())
    with ab.Engine(
        Network(),
        adamw,
        ab.mean_over_samples(loss),
        micro_batch_size=micro_batch_size,
        strategy=how if isinstance(how, str) else how(),
        check_loss=False,
        world=world,
    ) as engine:
        for _ in range(2):
            engine.step(batch)
        ledger = MemoryLedger()
        for category, tensors in engine.resident_tensors().items():
            ledger.categorize(category, tensors)
        ledger.categorize("inputs", batch)
        start = ledger.num_events
        with recorded_resizes(ledger), ledger:
            engine.step(batch)
        trace = ledger.trace()
        ledger.forget()
    return Held([(one.operation, one.num_bytes) for one in trace.allocations[start:]], trace.peak_bytes)
