"""How long code may get, and how much of it must be annotated."""

import ast
import inspect
import math

import pytest

from tests.architecture.source_tree import PACKAGES, Found, FunctionNode, functions, parse, python_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 45
SHARE_WITHIN_BUDGET = 0.95


def num_lines(function: FunctionNode) -> int:
    """Return the lines a reader has to read, from `def` to the end, the docstring among them."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def missing_annotations(function: FunctionNode) -> list[str]:
    """Return the names of a function's parameters without annotation, and "return" where that is missing."""
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    parameters += [extra for extra in (given.vararg, given.kwarg) if extra is not None]
    bare = [one.arg for one in parameters if one.annotation is None and one.arg not in ("self", "cls")]
    return [*bare, "return"] if function.returns is None else bare


def only_function(source: str) -> FunctionNode:
    """Return the one function of a text."""
    (function,) = functions(ast.parse(inspect.cleandoc(source)))
    return function


@pytest.mark.slow
def test_functions_are_short() -> None:
    """95% of the functions have at most 45 lines."""
    lengths = [
        (num_lines(function), Found(path, function.lineno, function.name))
        for path in python_files(*PACKAGES)
        for function in functions(parse(path))
    ]
    too_long = [f"{found} has {lines} lines" for lines, found in lengths if lines > MAX_FUNCTION_LINES]
    allowed = math.floor(len(lengths) * (1 - SHARE_WITHIN_BUDGET))

    assert len(too_long) <= allowed, f"{len(too_long)} of {len(lengths)}, allowed {allowed}:\n" + "\n".join(too_long)


def test_files_are_short() -> None:
    """No file has more than 500 lines."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*PACKAGES)}
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}

    assert not too_long


@pytest.mark.slow
def test_functions_are_annotated() -> None:
    """Every parameter and every result has a type."""
    found = [
        Found(path, function.lineno, f"{function.name} lacks {', '.join(bare)}")
        for path in python_files(*PACKAGES)
        for function in functions(parse(path))
        if (bare := missing_annotations(function))
    ]

    assert not found, "\n".join(map(str, found))


def test_missing_annotations_are_seen() -> None:
    """Every kind of parameter counts, and so does the result; self and cls do not."""
    assert missing_annotations(only_function("def f(a, /, b, *c, d, **e): ...")) == ["a", "b", "d", "c", "e", "return"]
    assert missing_annotations(only_function("def f(self, a: int, *c: int, **e: int) -> None: ...")) == []


def test_lines_are_counted() -> None:
    """The length of a function holds its signature, docstring and body, and no decorator."""
    function = only_function('''
        @decorated
        def f(
            a: int,
        ) -> int:
            """Doc."""
            return a
    ''')
    expected = 5

    assert num_lines(function) == expected


def test_tree_is_there() -> None:
    """The budgets are held against real files."""
    assert {"errors.py", "command.py"} <= {path.name for path in python_files(*PACKAGES)}
