"""The repeated blocks of a model are found in any container."""

import torch
from torch import nn

from anybatch.core.tensors import repeated_blocks


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Tower(nn.Module):
    """Blocks, the last of which holds blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_are_found() -> None:
    """Rows of composite modules are blocks; single layers and nested blocks are not."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(Block(), Block(), nn.Tanh()), nn.ModuleList([Tower()])
    )

    assert [str(blocks) for blocks in repeated_blocks(model)] == ["2.* (2 x Block)", "3.0.blocks.* (3 x Block)"]
    (row,) = repeated_blocks(nn.ModuleList([Tower(), Tower()]))
    assert (row.kind, row.names, len(row.modules)) == (Tower, ("0", "1"), 2)
