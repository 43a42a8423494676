"""A small residual network with BatchNorm, its data, and its gradient and buffers in plain torch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.cases import Batch

NUM_CLASSES = 4


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut that also has one."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wider)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, wider, 1, bias=False), nn.BatchNorm2d(wider))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inside = F.gelu(self.norm1(self.first(images)))
        return F.gelu(self.norm2(self.second(inside)) + self.shortcut(images))


class ResidualNetwork(nn.Module):
    """A stem and residual blocks, smooth everywhere, with 1 + 3 x depth BatchNorm layers."""

    def __init__(self, *, width: int = 4, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*[Block(width, width) for _ in range(depth)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inside = self.blocks(F.gelu(self.norm(self.stem(images))))
        logits: torch.Tensor = self.head(self.dropout(inside).mean((2, 3)))
        return logits


def network(**options: Any) -> nn.Module:
    """Return the same network each time; BatchNorm weights and biases differ from 1 and 0."""
    torch.manual_seed(3)
    made = ResidualNetwork(**options).double()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return made


def images(number: int = 13, *, side: int = 5) -> Batch:
    """Return labelled images whose brightness and contrast differ from sample to sample."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, NUM_CLASSES, (number,), generator=generator)
    contrast = torch.rand(number, 1, 1, 1, generator=generator, dtype=torch.float64) + 0.5
    noise = torch.randn(number, 3, side, side, generator=generator, dtype=torch.float64)
    return {"x": noise * contrast + labels[:, None, None, None] * 0.5, "y": labels}


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def native(
    model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], torch.Tensor] = classify
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Return gradients and buffers after one forward and backward over the whole batch in plain torch."""
    model.zero_grad()
    loss(model, batch).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, buffers_of(model)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def largest_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest absolute difference in any buffer; values are of the order of 1."""
    assert set(found) == set(expected)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())
