"""Formulas of the literature, at the numbers their papers print, and against a trace."""

import pytest
import torch
from torch import nn

from anybatch_guide.memory.formulas import (
    AUTOCAST_ADAM,
    MIXED_ADAM,
    Stage,
    state_bytes,
    transformer_layer_activation_bytes,
)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_as_its_paper_prints_it(stage: Stage, gigabytes: float) -> None:
    """The 7.5 billion parameters on 64 ranks of the paper's first figure: 120, 31.4, 16.6 and 1.9 GB."""
    assert state_bytes(7_500_000_000, MIXED_ADAM, stage, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_adams_bytes_are_those_of_a_model() -> None:
    """A model updated by AdamW holds 16 bytes per parameter (and a step counter per tensor)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *states]
    num_parameters = sum(p.numel() for p in model.parameters())

    assert sum(tensor.nbytes for tensor in held) == AUTOCAST_ADAM.total * num_parameters
    assert sum(tensor.nbytes for tensor in held) == state_bytes(num_parameters, AUTOCAST_ADAM)


def test_a_layer_as_its_paper_prints_it() -> None:
    """22 billion parameters (h 6144, a 64, s 2048): 5as/h is 107; 34 more with flash; 8 ranks take 21.

    The paper's table 3 rounds up.
    """
    tokens_hidden = 2048 * 4 * 6144

    def ratio(tensor_parallel_size: int, *, flash: bool) -> float:
        return (
            transformer_layer_activation_bytes(
                sequence_length=2048,
                micro_batch_size=4,
                hidden_size=6144,
                num_heads=64,
                tensor_parallel_size=tensor_parallel_size,
                keeps="flash" if flash else "scores",
            )
            / tokens_hidden
        )

    assert ratio(1, flash=True) == 34
    assert ratio(1, flash=False) == pytest.approx(34 + 5 * 64 * 2048 / 6144)
    assert ratio(8, flash=True) == 13
    assert ratio(8, flash=False) == pytest.approx(10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8)
    assert transformer_layer_activation_bytes(
        sequence_length=2048, micro_batch_size=4, hidden_size=6144, num_heads=64, keeps="input"
    ) == (2 * tokens_hidden)
