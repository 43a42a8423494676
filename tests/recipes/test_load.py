"""Loading recipes by name, and the messages for unknown names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import anybatch as ab
from anybatch import recipes
from anybatch.cli.status import explain
from anybatch.errors import DataError, UserError
from anybatch.recipes import digits
from anybatch.recipes.load import load_recipe
from tests.raising import raises

SMALLEST_RECIPE = """
import torch
import anybatch as ab


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch), 2 * batch)


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""
HEAD, JOB = SMALLEST_RECIPE.split("def job():\n")


@pytest.fixture(autouse=True)
def imports_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the loaded modules and the import path after a test."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("anybatch", "sklearn", "scipy", "numpy", "torch")):
            del sys.modules[name]


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    """Write a file and return its path as a user would type it."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize("name", ["file.py", "file:job"])
def test_files_and_modules_from_the_working_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file by path and a module by name load the same recipe, with or without the function."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, SMALLEST_RECIPE, "file.py")
    assert load_recipe(name).defaults.effective_batch_size == 16


def test_a_recipe_can_import_files_in_its_folder(tmp_path: Path) -> None:
    """A recipe can import files in its folder, also later and in workers."""
    written(tmp_path, SMALLEST_RECIPE, "neighbour.py")
    text = "from neighbour import job as other\n\ndef job():\n    from neighbour import loss\n    return other()\n"
    name = written(tmp_path, text)
    assert load_recipe(name) is not None
    assert sys.modules["mine"].__file__ == str(tmp_path / "mine.py")
    assert load_recipe(name) is not None


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}def recipe():\n{JOB}",
        f"{HEAD}def job():\n{JOB}\ndef dataset(): ...\n",
        f"{HEAD}def wide(width) -> ab.Job:\n{JOB}\ndef any_name() -> ab.Job:\n    return wide(3)\n",
        f"from anybatch.recipes.digits import digits as recipe\n{HEAD}def job():\n{JOB}",
    ],
)
def test_the_only_possible_function_is_used(text: str, tmp_path: Path) -> None:
    """The recipe is the function called job, or the only one without arguments."""
    assert load_recipe(written(tmp_path, text)).defaults.effective_batch_size == 16


@pytest.mark.parametrize(
    ("text", "suffix", "code"),
    [
        ("a = 1\n", "", "which_function"),
        ("def f(): ...\ndef recipe(): ...\n", "", "which_function"),
        ("def f(): ...\ndef e(): ...\n", ":g", "no_function"),
        ("from os import getcwd\ng = 3\n", ":g", "no_function"),
        ("def job(width, *, depth, a=1, **b): ...\n", "", "needs_arguments"),
        ("def job(): return {}\n", "", "not_a_job"),
        ("def job(): pass\n", ":job", "not_a_job"),
    ],
)
def test_functions(text: str, suffix: str, code: str, tmp_path: Path) -> None:
    """Missing, ambiguous and unsuitable functions are refused."""
    with raises(UserError, code):
        load_recipe(written(tmp_path, text) + suffix)


UNKNOWN = ("digit", "digits:digits", "no.such:job", "", ":job", "a b:job", "C:job")
MISSING = ("missing.py", "missing.py:job", "folder/missing", r"C:\folder\missing.py", "./")


@pytest.mark.parametrize(
    ("name", "code"), [*((name, "unknown_recipe") for name in UNKNOWN), *((name, "no_file") for name in MISSING)]
)
def test_unknown_names(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name, a missing file and a folder instead of a file are refused."""
    monkeypatch.chdir(tmp_path)
    with raises(UserError, code):
        load_recipe(name)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def job():\n    return {}['key']\n", "KeyError: 'key'"),
        ("def job(:\n", "SyntaxError: invalid syntax"),
    ],
)
def test_errors_of_the_user(text: str, last: str, tmp_path: Path) -> None:
    """An error in the user's code is raised unchanged, and its text has the user's file and line."""
    name = written(tmp_path, text)
    with pytest.raises((Exception, SystemExit)) as caught:
        load_recipe(name)
    error = caught.value
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next  # this test is a user's file too
    said = explain(error, in_full=False).splitlines()
    assert said[0] == "anybatch: the recipe's own code failed:"
    assert any(line.startswith(f'  File "{name}", line ') for line in said)
    assert said[-1] == last
    assert "load.py" not in "".join(said)
    with pytest.raises((Exception, SystemExit)):  # a file that failed is not loaded
        load_recipe(name)


def test_errors_below_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an existing module imports a missing one, the error is about the missing one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    written(tmp_path, "import no_such_module\n", "broken/__init__.py")
    written(tmp_path, SMALLEST_RECIPE, "broken/inside.py")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_recipe("broken.inside:job")


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn and numpy the recipe "digits" raises with the install command."""
    monkeypatch.setattr(recipes, "digits", digits)  # restores the module that is imported again here
    monkeypatch.delitem(sys.modules, digits.__name__)
    for package in ("sklearn", "numpy"):
        monkeypatch.setitem(sys.modules, package, None)
    with raises(DataError, "needs_scikit_learn"):
        load_recipe("digits")


def test_the_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in recipes are jobs, and creating them reads no data."""
    monkeypatch.setattr(digits, "_load", None)
    for name in ("digits", "text", "contrastive"):
        assert isinstance(load_recipe(name), ab.Job)
