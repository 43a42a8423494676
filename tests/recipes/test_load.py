"""Loading recipes by name, and the messages for unknown names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import anybatch as ab
from anybatch.errors import DataError, UserError
from anybatch.recipes.load import SMALLEST_RECIPE, load_recipe
from anybatch.recipes.start import start
from tests.raising import raises

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


def test_the_smallest_recipe_is_one(tmp_path: Path) -> None:
    """The recipe that the errors show runs and learns."""
    run = start(load_recipe(written(tmp_path, SMALLEST_RECIPE)))
    losses = [run.engine.step(batch).loss for batch in run.batches]
    assert len(losses) == 40
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("name", ["file.py", "file:job"])
def test_files_and_modules_from_the_working_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file by path and a module by name load the same recipe, with or without the function."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, SMALLEST_RECIPE, "file.py")
    assert load_recipe(name).defaults.effective_batch_size == 16


def test_a_module_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """package.module:function is imported like in Python."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    written(tmp_path, SMALLEST_RECIPE, "package/inside.py")
    assert load_recipe("package.inside:job").defaults.effective_batch_size == 16
    with raises(UserError, "unknown_recipe"):
        load_recipe("package.outside:job")


def test_a_file_finds_what_lies_beside_it(tmp_path: Path) -> None:
    """A recipe can import files in its folder, also later and in workers."""
    written(tmp_path, SMALLEST_RECIPE, "beside.py")
    text = "from beside import job as other\n\ndef job():\n    from beside import loss\n    return other()\n"
    name = written(tmp_path, text)
    assert load_recipe(name) is not None
    assert sys.modules["mine"].__file__ == str(tmp_path / "mine.py")
    assert load_recipe(name) is not None


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}def recipe():\n{JOB}",
        f"{HEAD}def any_name() -> ab.Job:\n{JOB}",
        f"{HEAD}def any_name() -> 'ab.Job':\n{JOB}",
        f"from __future__ import annotations\n{HEAD}def any_name() -> ab.Job:\n{JOB}",
        f"{HEAD}def wide(width) -> ab.Job:\n{JOB}\ndef any_name() -> ab.Job:\n    return wide(3)\n",
        f"from anybatch.recipes.digits import digits as recipe\n{HEAD}def job():\n{JOB}",
    ],
)
def test_the_one_function_that_must_be_meant(text: str, tmp_path: Path) -> None:
    """The recipe is the function called job or recipe, or the one without arguments that returns a Job."""
    assert load_recipe(written(tmp_path, text)).defaults.effective_batch_size == 16


@pytest.mark.parametrize(
    ("text", "suffix", "code"),
    [
        ("a = 1\n", "", "which_function"),
        ("def job(): ...\ndef recipe(): ...\ndef f(): ...\n", "", "which_function"),
        ("def f(): ...\ndef e(): ...\n", ":g", "no_function"),
        ("from os import getcwd\ng = 3\n", ":g", "not_a_function"),
        ("def job(width, *, depth, a=1, **b): ...\n", "", "needs_arguments"),
        ("def job(): return {}\n", "", "not_a_job"),
        ("def job(): pass\n", ":job", "not_a_job"),
    ],
)
def test_functions(text: str, suffix: str, code: str, tmp_path: Path) -> None:
    """Missing, ambiguous and unsuitable functions are refused."""
    with raises(UserError, code):
        load_recipe(written(tmp_path, text) + suffix)


@pytest.mark.parametrize(
    "name", ["digit", "digits:digits", "no.such:job", "", ":job", "a b:job", "json.tool.x", "C:job"]
)
def test_unknown_names(name: str) -> None:
    """An unknown name raises an error with all valid forms."""
    with raises(UserError, "unknown_recipe"):
        load_recipe(name)


@pytest.mark.parametrize("name", ["missing.py", "missing.py:job", "folder/missing", r"C:\folder\missing.py"])
def test_missing_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file raises with the folder searched; so does a folder instead of a file."""
    monkeypatch.chdir(tmp_path)
    with raises(UserError, "no_file"):
        load_recipe(name)
    with raises(UserError, "no_file"):
        load_recipe(f"{tmp_path}/")


def test_files_that_are_no_source(tmp_path: Path) -> None:
    """A file must end in .py and must not have the name of a loaded module."""
    with raises(UserError, "not_python"):
        load_recipe(written(tmp_path, SMALLEST_RECIPE, "mine.txt"))
    with raises(UserError, "name_is_taken"):
        load_recipe(written(tmp_path, SMALLEST_RECIPE, "json.py"))


@pytest.mark.parametrize(
    ("text", "doing", "last"),
    [
        ("def f():\n    return 1 / 0\n\nf()\n", "importing", "ZeroDivisionError: division by zero"),
        ("import no_such_module\n", "importing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)\n", "importing", "SystemExit: 3"),
        ("def job():\n    return {}['key']\n", "calling job of", "KeyError: 'key'"),
    ],
)
def test_errors_of_the_user(text: str, doing: str, last: str, tmp_path: Path) -> None:
    """An error in the user's code shows its traceback once, starting at the user's file."""
    name = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_recipe(name)
    first, empty, *shown = str(caught.value).splitlines()
    assert first.startswith(doing)
    assert first.endswith("failed:")
    assert not empty
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1].startswith(f'  File "{name}", line ')
    assert shown[-1] == last
    assert "load.py" not in str(caught.value)
    assert "importlib" not in str(caught.value)
    assert ("mine" in sys.modules) == (doing != "importing")
    assert caught.value.__suppress_context__


def test_errors_below_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an existing module imports a missing one, the error is about the missing one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    written(tmp_path, "import no_such_module\n", "broken/__init__.py")
    written(tmp_path, SMALLEST_RECIPE, "broken/inside.py")
    with raises(UserError, "user_code") as caught:
        load_recipe("broken.inside:job")
    assert "No module named 'no_such_module'" in str(caught.value)


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the recipe "digits" raises with the install command."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with raises(DataError, "needs_scikit_learn"):
        load_recipe("digits")


def test_the_built_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in recipes are jobs, and creating them reads no data."""
    monkeypatch.setattr(np, "loadtxt", None)
    for name in ("digits", "text", "contrastive"):
        assert isinstance(load_recipe(name), ab.Job)
