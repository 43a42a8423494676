"""The formula of Adam's state against a model."""

import torch
from torch import nn

from anybatch_guide.memory.formulas import ADAM_STATE_BYTES


def test_adams_bytes_match_a_model() -> None:
    """A model updated by AdamW holds 16 bytes per parameter (and a step counter per tensor)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *states]

    assert sum(tensor.nbytes for tensor in held) == ADAM_STATE_BYTES * sum(p.numel() for p in model.parameters())
