"""Holds tensors to the shapes and dtypes in annotations while tests run, and leaves every other type alone.

Other types are mypy's affair. At run time they have to be left alone: many tests pass something of a wrong type on
purpose, to see anybatch's own error.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

CheckedT = TypeVar("CheckedT", bound=Callable[..., Any])
CHECKER = f"{__name__}.check_shapes"
"""What the import hook of jaxtyping is told to decorate functions with."""
_DECORATE: Callable[..., Any] = jaxtyping.jaxtyped
_AS_JAXTYPING = BeartypeConf(violation_type=jaxtyping.TypeCheckError)


def check_imported(modules: Sequence[str]) -> AbstractContextManager[object]:
    """Check shapes in modules, by their dotted names, that are imported from now on.

    The hook of jaxtyping decorates every function of a module, and so takes 20 microseconds of each call, shapes or
    none: what it decorates with is replaced by a decorator that leaves those without shapes as they are.
    """
    vars(jaxtyping)["jaxtyped"] = decorate_shaped
    hook: AbstractContextManager[object] = jaxtyping.install_import_hook(list(modules), CHECKER)
    return hook


def decorate_shaped(*, typechecker: Callable[..., Any]) -> Callable[[CheckedT], CheckedT]:
    """Return the decorator of jaxtyping for functions and data classes whose annotations name shapes."""

    def decorate(decorated: CheckedT) -> CheckedT:
        function = decorated.__init__ if inspect.isclass(decorated) else decorated
        hints = getattr(function, "__annotations__", {})
        if not any(map(names_shape, hints.values())):
            return decorated
        if inspect.isclass(decorated):  # its fields are checked where it is made
            checked: CheckedT = _DECORATE(decorated, typechecker=typechecker)
        else:
            # Names of axes hold within a call; jaxtyping itself would bind each call's arguments to the signature.
            checked = _DECORATE(typechecker(decorated), typechecker=None)
        return checked

    return decorate


def check_shapes(function: CheckedT) -> CheckedT:
    """Return the function with a check of each parameter and result whose annotation names a shape."""
    # What has no annotation is not checked.
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if names_shape(hint)}
    return beartype(conf=_AS_JAXTYPING)(function)


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
