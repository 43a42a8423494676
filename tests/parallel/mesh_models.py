"""Models that are parallelised over a mesh, for tests with several processes per rank."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import anybatch as ab
from anybatch.parallel.dtensors import gather

WIDTH, LENGTH, KINDS = 8, 4, 3
Batch = dict[str, torch.Tensor]
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    """A norm and a two-layer MLP with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return one hidden vector per position."""
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + added


class Tower(nn.Module):
    """Blocks between two layers that no plan cuts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(WIDTH, KINDS)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Return logits for each position: (samples, positions, features) -> (samples, positions, classes)."""
        hidden = self.first(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(self.dropout(hidden))
        return logits


def tower(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Tower:
    """Return the same tower each time."""
    torch.default_generator.manual_seed(3)
    return Tower(dropout).to(dtype)


def grid(rows: int = 2, columns: int = 2) -> DeviceMesh:
    """Return a mesh with several processes per rank."""
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))


def by_tensors(model: Tower, mesh: DeviceMesh) -> Tower:
    """Apply tensor parallelism to the linear layers of blocks; norms and all other layers stay plain."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def by_sequence(model: Tower, mesh: DeviceMesh) -> Tower:
    """Apply tensor and sequence parallelism: norms run on a part of the positions."""
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh["tp"], plan)
    into = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False)
    out_of = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)
    parallelize_module(model, mesh["tp"], {"blocks.0": into, "dropout": out_of})
    return model


def by_both(model: Tower, mesh: DeviceMesh) -> Tower:
    """Apply tensor parallelism, then shard everything over data-parallel ranks with `fully_shard`."""
    by_tensors(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


FORMS: Mapping[str, Callable[[Tower, DeviceMesh], Tower]] = {
    "tensors": by_tensors,
    "sequence": by_sequence,
    "both": by_both,
}


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean loss over labelled positions."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)


LOSS = ab.mean_over_tokens(loss_of, labels="y", shift=False)


def batches(num_steps: int, size: int = 7) -> list[Batch]:
    """Return effective batches whose samples have different numbers of labels."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(num_steps):
        labels = torch.randint(KINDS, (size, LENGTH), generator=generator)
        labels[torch.rand(size, LENGTH, generator=generator) < 0.4] = -100
        labels[0, 0] = 1
        found.append({"x": torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64), "y": labels})
    return found


def whole(model: nn.Module) -> Values:
    """Return the full parameters."""
    return {name: gather(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Build an optimizer with two states per parameter."""
    return torch.optim.AdamW(named, lr=0.01)


def plain_run(num_steps: int, clip: float) -> tuple[Values, list[tuple[float, float]], Values]:
    """Train on one device with full batches in plain PyTorch.

    Returns:
        Final parameters, norm and loss of each step, and the gradient of the first step.
    """
    model, numbers = tower(), []
    first: Values = {}
    optimizer = adamw(model.parameters())
    for batch in batches(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        numbers.append((float(norm), float(loss.detach())))
        optimizer.step()
    return whole(model), numbers, first
