"""Tests check the shapes in annotations, and no other types."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jaxtyping import TypeCheckError

from tests.architecture.shape_checker import check_imported, shaped_modules
from tests.architecture.source_tree import PACKAGES

SOURCE = '''
"""A module with shapes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int


def sums(rows: Float[torch.Tensor, "row column"], weights: Float[torch.Tensor, " column"], name: str = "",
         mask: Int[torch.Tensor, " row"] | None = None) -> Float[torch.Tensor, " row"]:
    return rows if name == "wrong result" else rows @ weights


@dataclass(frozen=True, slots=True)
class Batch:
    rows: list[Float[torch.Tensor, "row column"]]
    num_rows: int

    def sum_of(self, index: int) -> Float[torch.Tensor, " column"]:
        return self.rows[index]


def rows_of(batch: Batch) -> int:
    return batch.num_rows
'''


@pytest.fixture
def shaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield SOURCE as a module, imported like anybatch under test."""
    (tmp_path / "shaped_example.py").write_text(SOURCE)
    (tmp_path / "plain_example.py").write_text('"""No shapes; it mentions jaxtyping only here."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    names = shaped_modules(tmp_path)
    assert names == ["shaped_example"]
    with check_imported(names):
        yield importlib.import_module("shaped_example")
    del sys.modules["shaped_example"]


def test_wrong_shapes_are_refused(shaped: ModuleType) -> None:
    """Too many axes, inconsistent axes, a wrong dtype and a wrong result all raise."""
    rows, weights = torch.ones(2, 3), torch.ones(3)
    for arguments in (
        (rows, rows),
        (rows, torch.ones(2)),
        (rows.long(), weights),
        (rows, weights, "", torch.ones(2)),
        (rows, weights, "wrong result"),
    ):
        with pytest.raises(TypeCheckError):
            shaped.sums(*arguments)
    with pytest.raises(TypeCheckError):
        shaped.Batch([weights], 2)
    with pytest.raises(TypeCheckError):
        shaped.Batch([rows], 2).sum_of(0)


@pytest.mark.slow
def test_shapes_of_the_package_are_checked() -> None:
    """Every module of anybatch and its guide with shapes was imported with the checks active."""
    modules = [importlib.import_module(name) for package in PACKAGES for name in shaped_modules(package.parent)]

    unchecked = [module.__name__ for module in modules if not hasattr(module, "jaxtyping")]
    assert not unchecked
