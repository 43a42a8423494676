"""A state that cannot be restored exactly raises before anything is written, with its place and the fix."""

import enum
import re
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.checkpoints import save
from anybatch.core.batch import Position
from anybatch.errors import UserError


class Colour(enum.IntEnum):
    """An enum member, which is more than its value."""

    RED = 1


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 (what users have)
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.float64(0.5),
        lambda: Colour.RED,
        lambda: Pair(1, 2),
        lambda: defaultdict(int, a=1),
        Position,
        lambda: {1.5: 2},
        lambda: {True: 2},
        lambda: {1, 2},
        lambda: CYCLE,
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: nn.UninitializedParameter(),  # noqa: PLW0108
    ],
)
def test_refused_values_are_named(make: Any, tmp_path: Path) -> None:
    """A value that would not be restored as itself raises with its place."""
    state = {"model": {3: [None, make()]}}

    with pytest.raises(UserError) as caught:
        save(tmp_path / "checkpoints", 0, state)

    assert re.match(r"state\['model'\]\[3\]\[1\]", str(caught.value))
    assert not (tmp_path / "checkpoints").exists()
