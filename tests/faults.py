"""Faults on purpose, each written down beside the test that has to see it.

```python
@sees("sums are means", "src/anybatch/core/loss.py", "return total", "return total / count")
def test_losses_are_summed() -> None: ...
```

The decorator changes nothing. `python -m tests.planted_faults` reads it from the source, plants the fault into a copy
of the project, and sees the test fail there.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

FOLDERS = ("tests", "guide/tests")

TestT = TypeVar("TestT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: in `file`, `old` (which stands there exactly once) becomes `new`, and every one of `tests` must fail.

    A test without parameters in its name fails if it does with any of them.

    Attributes:
        name: what is wrong, in words that no other fault has.
        file: where it is planted, from the root of the project.
        old: the text that is right.
        new: the text that is wrong.
        tests: names as pytest has them.
        place: file and line of the test that it stands at.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    place: str = ""


class StaleFaultError(Exception):
    """The text that a fault replaces does not stand in its file exactly once."""


def sees(
    name: str,  # noqa: ARG001 (all of them are read from the source)
    file: str,  # noqa: ARG001
    old: str,  # noqa: ARG001
    new: str,  # noqa: ARG001
    *,
    cases: Sequence[str] = (),  # noqa: ARG001
    also: Sequence[str] = (),  # noqa: ARG001
) -> Callable[[TestT], TestT]:
    """Say that a test fails when a fault is planted.

    All arguments are literals: the sources are read, not run, to find them.

    Args:
        name: what is wrong, in words that no other fault has.
        file: where it is planted, from the root of the project.
        old: a text that stands there exactly once; one with several lines begins with a line break, which is not meant.
        new: what is written in its place.
        cases: the parameters, as in the test's name, with which it has to fail; none: with any.
        also: other tests that have to fail, as pytest names them.
    """
    return lambda test: test


def read_faults(root: Path) -> tuple[Fault, ...]:
    """Return all faults that stand beside the tests of a project."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("test_*.py"))]
    return tuple(fault for path in paths for fault in _faults_of(path, path.relative_to(root).as_posix()))


def faulty(source: str, fault: Fault) -> str:
    """Return a source with a fault in it.

    Raises:
        StaleFaultError: its text is not there exactly once.
    """
    if (found := source.count(fault.old)) != 1:
        message = (
            f"{fault.place}: {fault.name!r} replaces a text that stands {found} times in {fault.file}; "
            "bring it up to date."
        )
        raise StaleFaultError(message)
    return source.replace(fault.old, fault.new)


def _faults_of(path: Path, name: str) -> Iterator[Fault]:
    source = path.read_text(encoding="utf-8")
    if "@sees(" not in source:  # to parse all tests takes seconds
        return
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "sees":
                yield _fault(decorator, f"{name}::{function.name}", f"{name}:{decorator.lineno}")


def _fault(decorator: ast.Call, test: str, place: str) -> Fault:
    fault, file, old, new = (ast.literal_eval(argument) for argument in decorator.args)
    more = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
    own = [f"{test}[{case}]" for case in more.get("cases", ())] or [test]
    return Fault(
        name=fault,
        file=file,
        old=old.removeprefix("\n"),
        new=new.removeprefix("\n"),
        tests=(*own, *more.get("also", ())),
        place=place,
    )
