"""Planted faults, each declared next to the test that must detect it.

```python
@sees("sums are means", "src/anybatch/core/loss.py", "return total", "return total / count")
def test_losses_are_summed() -> None: ...
```

The decorator is a no-op. `python -m tests.planted_faults` reads it from the source, plants the fault in a copy of the
project, and checks that the test fails there.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

TestT = TypeVar("TestT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: in `file`, `old` (which occurs exactly once) becomes `new`, and every one of `tests` must fail.

    A test without parameters in its name must fail for at least one of them.

    Attributes:
        name: a unique description of the fault.
        file: path of the changed file, relative to the project's root.
        old: the correct text.
        new: the faulty text.
        tests: pytest's test names.
        place: file and line of the declaration.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    place: str = ""


class StaleFaultError(Exception):
    """The text that a fault replaces does not occur exactly once in its file."""


def sees(
    name: str,  # noqa: ARG001 (all arguments are read from the source)
    file: str,  # noqa: ARG001
    old: str,  # noqa: ARG001
    new: str,  # noqa: ARG001
    *,
    cases: Sequence[str] = (),  # noqa: ARG001
    also: Sequence[str] = (),  # noqa: ARG001
) -> Callable[[TestT], TestT]:
    """Declare that a test fails if a fault is planted.

    All arguments must be literals: they are read from the source, which is not run.

    Args:
        name: a unique description of the fault.
        file: path of the file to change, relative to the project's root.
        old: text that occurs there exactly once; a leading line break is removed.
        new: its replacement.
        cases: parameters, as in the test's name, for which it must fail; by default any.
        also: other tests that must fail, as pytest names them.
    """
    return lambda test: test


def read_faults(root: Path) -> tuple[Fault, ...]:
    """Return all faults declared next to the tests of a project."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return tuple(fault for path in paths for fault in _faults_of(path, path.relative_to(root).as_posix()))


def faulty(source: str, fault: Fault) -> str:
    """Return a source with the fault planted.

    Raises:
        StaleFaultError: the text does not occur exactly once.
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
    if "@sees(" not in source:  # parsing all tests takes seconds
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
