"""Private torch APIs are only used in `torch_internals.py`, one such file per folder."""

import ast
import importlib
import runpy
import sys
import tomllib
from collections.abc import Iterator
from types import ModuleType

import pytest

from anybatch.core.torch_internals import SEEN
from anybatch.errors import UnsupportedTorchError
from tests.architecture.source_tree import (
    PACKAGE,
    PACKAGES,
    ROOT,
    Found,
    dotted_name,
    imported_modules,
    parse,
    python_files,
)

HOME = "torch_internals.py"
BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "operator.attrgetter"})
OF_PYTHON = frozenset({"_fields", "_replace", "_asdict", "_exit"})
"""Documented Python names with an underscore: those for named tuples, and `os._exit`."""


def is_private(name: str) -> bool:
    """Return whether a name, or a part of a dotted one, starts with a single underscore."""
    return any(part[:1] == "_" and part[:2] != "__" and part.strip("_") != "" for part in name.split("."))


def reaches_into(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield uses of private names of other objects: attributes, imports and names as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_PYTHON:
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                yield node, f".{node.attr}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((node, name) for name in imported_modules(node) if is_private(name))
        elif isinstance(node, ast.Call) and dotted_name(node.func) in BY_NAME:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from ((node, text) for text in texts if is_private(text) and text not in OF_PYTHON)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if dotted_name(node.value.func) == "vars" and isinstance(key, str) and is_private(key):
                yield node, f"vars()[{key!r}]"


@pytest.mark.slow
def test_private_names_have_one_home_per_folder() -> None:
    """Only `torch_internals.py` files use private names, except for attributes of `self` and `cls`.

    A private name that another class of ours needs must become public. The modules of `integrations` may use private
    names of other libraries that their docstrings list.
    """
    found = [
        Found(path, getattr(node, "lineno", 1), f"{what} belongs into a {HOME}")
        for path in python_files(*PACKAGES)
        if path.name != HOME
        for node, what in reaches_into(parse(path))
        if path.parent.name != "integrations" or what.strip(".") not in (ast.get_docstring(parse(path)) or "")
    ]

    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "fault",
    [
        "self.model._buffers",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "getattr(module, '_orig_mod', module)",
        "vars(module)['_parameters']",
        "operator.attrgetter('_fake_device')",
    ],
)
def test_faults_are_detected(fault: str) -> None:
    """A private name is found as an attribute, in an import and as text."""
    assert list(reaches_into(ast.parse(fault)))


@pytest.mark.parametrize(
    ("home", "module", "name"),
    [
        ("core", "torch.nn.modules.batchnorm", "_BatchNorm"),
        ("core", "torch.nn.modules.dropout", "_DropoutNd"),
        ("memory", "torch._subclasses.fake_tensor", "FakeTensorMode"),
    ],
)
def test_missing_classes_are_refused(home: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without a required class raises our error when the file is imported."""
    real = importlib.import_module(module)
    lacking = ModuleType(module)
    vars(lacking).update({other: value for other, value in vars(real).items() if other != name})
    monkeypatch.setitem(sys.modules, module, lacking)

    with pytest.raises(UnsupportedTorchError, match=name):
        runpy.run_path(str(PACKAGE / home / HOME))


def test_versions_match_the_matrix() -> None:
    """Private names were tested on the versions of `make matrix`, which start with the oldest supported torch."""
    matrix = ast.parse((ROOT / "benchmarks" / "version_matrix.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in matrix.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "TORCHES"
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert values == {"TORCHES": SEEN}
    assert f"torch >= {SEEN[0]}" in project["dependencies"]
