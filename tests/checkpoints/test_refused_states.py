"""A state that cannot be restored exactly raises before anything is written, with its place and the fix."""

import enum
import re
from collections import defaultdict, namedtuple
from pathlib import Path
from types import MappingProxyType
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
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.float64(0.5), "is type numpy.float64, .* Pass it through float"),
        (lambda: np.int64(5), "is type numpy.int64, .* Pass it through int"),
        (lambda: np.zeros(3), r"is type numpy.ndarray, .* A state holds .* \(torch\.from_numpy"),
        (lambda: Colour.RED, "Colour, .* Pass it through int"),
        (lambda: Pair(1, 2), "Pair, .* Pass it through tuple"),
        (lambda: torch.Size([2]), "is type torch.Size, .* Pass it through tuple"),
        (lambda: defaultdict(int, a=1), "is type collections.defaultdict, .* Pass it through dict"),
        (lambda: MappingProxyType({}), "is type builtins.mappingproxy, .* Pass it through dict"),
        (Position, r"is type anybatch.core.batch.Position, .* Pass it through dataclasses.asdict"),
        (lambda: {1.5: 2}, "is a dict with the key 1.5 of type builtins.float"),
        (lambda: {True: 2}, "is a dict with the key True of type builtins.bool"),
        (lambda: print, "is type builtins.builtin_function_or_method"),
        (lambda: {1, 2}, "is type builtins.set"),
        (lambda: torch.float32, "is type torch.dtype"),
        (lambda: CYCLE, r"\.\.\. is nested more than 100 levels deep, or contains itself"),
        (lambda: torch.zeros(2, device="meta"), "is a tensor without data"),
        (lambda: torch.eye(2).to_sparse(), r"is a tensor of layout torch.sparse_coo, .* to_dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "is a tensor of layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is a tensor of layout"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is a tensor of torch.qint8"),
        (lambda: nn.UninitializedParameter(), "is type torch.nn.parameter.UninitializedParameter"),  # noqa: PLW0108
    ],
)
def test_it_is_refused_with_its_place(make: Any, message: str, tmp_path: Path) -> None:
    """A value that would not be restored as itself raises with its place, its type and the fix."""
    state = {"model": {3: [None, make()]}}

    with pytest.raises(UserError, match=message) as caught:
        save(tmp_path / "checkpoints", 0, state)

    assert re.match(r"state\['model'\]\[3\]\[1\]", str(caught.value))
    assert not (tmp_path / "checkpoints").exists()


def test_the_state_itself_is_looked_at(tmp_path: Path) -> None:
    """A state of an unknown type raises, like any value in it."""
    with pytest.raises(UserError, match=r"^state is type collections.defaultdict, which .* dict\(\.\.\.\)"):
        save(tmp_path, 0, defaultdict(int))
