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


def test_right_shapes_pass(shaped: ModuleType) -> None:
    """Tensors of the annotated shapes pass, and None where allowed."""
    rows, weights = torch.ones(2, 3), torch.ones(3)

    assert shaped.sums(rows, weights).shape == (2,)
    assert shaped.sums(rows, weights, mask=torch.ones(2, dtype=torch.int64)).shape == (2,)
    assert shaped.Batch([rows], 2).num_rows == 2


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


def test_other_types_are_left_alone(shaped: ModuleType) -> None:
    """An argument of another wrong type reaches the function, which can raise its own error."""
    assert shaped.sums(torch.ones(2, 3), torch.ones(3), name=7).shape == (2,)
    assert shaped.Batch([], num_rows="two").num_rows == "two"


def test_functions_without_shapes_are_as_they_were_written(shaped: ModuleType) -> None:
    """A function without shapes in its annotations is not wrapped, so it costs nothing; others are."""
    assert not hasattr(shaped.rows_of, "__wrapped__")
    assert hasattr(shaped.sums, "__wrapped__")


def test_shapes_of_the_package_are_checked() -> None:
    """Every module of anybatch and its guide with shapes was imported with the checks active."""
    modules = [importlib.import_module(name) for package in PACKAGES for name in shaped_modules(package.parent)]

    unchecked = [module.__name__ for module in modules if not hasattr(module, "jaxtyping")]
    assert not unchecked
