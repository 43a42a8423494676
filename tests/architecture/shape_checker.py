"""Holds tensors to the shapes and dtypes in annotations while tests run, and leaves every other type alone.

Other types are mypy's affair. At run time they have to be left alone: many tests pass something of a wrong type on
purpose, to see anybatch's own error.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from beartype import beartype
from jaxtyping import AbstractArray

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
CHECKER = f"{__name__}.check_shapes"
"""What the import hook of jaxtyping is told to decorate functions with."""


def check_shapes(function: FunctionT) -> FunctionT:
    """Return the function with a check of each parameter and result whose annotation names a shape."""
    shaped = {name: hint for name, hint in function.__annotations__.items() if names_shape(hint)}
    if not shaped:
        return function
    function.__annotations__ = shaped  # what has no annotation is not checked
    return beartype(function)


def names_shape(hint: object) -> bool:
    """Whether an annotation holds a type of jaxtyping, also inside a union or a container."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(names_shape(part) for part in get_args(hint))


def shaped_modules(source: Path) -> list[str]:
    """Return the dotted names of the modules under `source` that use jaxtyping: all others are left as they are."""
    uses = re.compile(r"^(from|import) jaxtyping\b", flags=re.MULTILINE)
    return [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(source.rglob("*.py"))
        if uses.search(path.read_text(encoding="utf-8"))
    ]
