"""A small transformer to shard, and the plain loop over `fully_shard` that a planned one is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import anybatch as ab
from anybatch.memory.ledger import MemoryLedger
from anybatch.planner.trace.fsdp_trace import resizes_booked
from anybatch.planner.trace.step_spec import StepSpec
from tests.planner.step_specs import step_spec

Tokens = tuple[torch.Tensor, torch.Tensor]

WIDTH, VOCABULARY, NUM_BLOCKS, NUM_TOKENS = 40, 500, 3, 32
"""40 rows do not divide among three ranks."""


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
    """Return an optimizer that updates all parameters at once."""
    return torch.optim.AdamW(named, foreach=True)  # type: ignore[arg-type]


def sharded_spec(world_size: int) -> StepSpec:
    """Return the spec of training the network, planned as it allocates on a CPU."""
    sample = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
    mean = ab.mean_over_samples(loss)
    return step_spec(
        Network, optimizer=adamw, loss=mean, sample=(sample, sample.clone()), world_size=world_size, profile="cpu"
    )


@dataclass(frozen=True)
class Held:
    """What a real rank took: every allocation after the start as (operation, bytes), and the most it held."""

    taken: list[tuple[str, int]]
    peak_bytes: int


def hold_for_real(micro_batch_size: int, *, keep: bool, defer: bool) -> Held:
    """Run on every rank: train with `fully_shard` as its documentation has it, and write down what the last step took.

    Of three steps, that is: the first makes the optimizer's state.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Network()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model.named_parameters())
    root = cast("FSDPModule", model)
    step(model, optimizer, micro_batch_size, lambda last: root.set_requires_gradient_sync(last or not defer))
    ledger = MemoryLedger()
    state = [value for values in optimizer.state.values() for value in values.values()]
    for tensor in (*model.parameters(), *state):
        ledger.hold("weights", [tensor.to_local() if hasattr(tensor, "to_local") else tensor])
    start = ledger.num_events
    with resizes_booked(ledger), ledger:
        step(model, optimizer, micro_batch_size, lambda last: root.set_requires_gradient_sync(last or not defer))
    trace = ledger.trace()
    ledger.forget()
    return Held([(one.operation, one.num_bytes) for one in trace.allocations[start:]], trace.peak_bytes)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int, tell: Callable[[bool], None]
) -> None:
    """Accumulate two micro-batches and update."""
    for number in range(2):
        tell(number == 1)
        tokens, targets = (torch.empty(micro_batch_size, NUM_TOKENS, dtype=torch.long) for _ in range(2))
        value = loss(model, (tokens.zero_(), targets.zero_()))
        value.backward()
        del value, tokens, targets
    optimizer.step()
    optimizer.zero_grad()
