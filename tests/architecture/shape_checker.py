"""Check tensor shapes and dtypes in annotations while tests run, and no other types.

mypy checks those. At run time they are ignored, as tests pass wrong types on purpose to see anybatch's own error.
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
"""The decorator that jaxtyping's import hook applies."""
_DECORATE: Callable[..., Any] = jaxtyping.jaxtyped
_AS_JAXTYPING = BeartypeConf(violation_type=jaxtyping.TypeCheckError)


def check_imported(modules: Sequence[str]) -> AbstractContextManager[object]:
    """Check shapes in modules, given by dotted name, that are imported from now on.

    jaxtyping's hook decorates every function, which costs 20 microseconds per call even without shapes. Its replacement
    skips functions without shapes.
    """
    vars(jaxtyping)["jaxtyped"] = decorate_shaped
    hook: AbstractContextManager[object] = jaxtyping.install_import_hook(list(modules), CHECKER)
    return hook


def decorate_shaped(*, typechecker: Callable[..., Any]) -> Callable[[CheckedT], CheckedT]:
    """Return jaxtyping's decorator, restricted to functions and data classes whose annotations have shapes."""

    def decorate(decorated: CheckedT) -> CheckedT:
        function = decorated.__init__ if inspect.isclass(decorated) else decorated
        hints = getattr(function, "__annotations__", {})
        if not any(map(names_shape, hints.values())):
            return decorated
        if inspect.isclass(decorated):  # fields are checked on construction
            checked: CheckedT = _DECORATE(decorated, typechecker=typechecker)
        else:
            # Axis names are bound per call; jaxtyping itself would also bind each call's arguments to the signature.
            checked = _DECORATE(typechecker(decorated), typechecker=None)
        return checked

    return decorate


def check_shapes(function: CheckedT) -> CheckedT:
    """Return the function with checks of all parameters and results whose annotations have shapes."""
    # Unannotated values are not checked.
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if names_shape(hint)}
    return beartype(conf=_AS_JAXTYPING)(function)


def names_shape(hint: object) -> bool:
    """Return whether an annotation contains a jaxtyping type, also inside a union or container."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(names_shape(part) for part in get_args(hint))


def shaped_modules(source: Path) -> list[str]:
    """Return the dotted names of the modules under `source` that use jaxtyping."""
    uses = re.compile(r"^(from|import) jaxtyping\b", flags=re.MULTILINE)
    return [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(source.rglob("*.py"))
        if uses.search(path.read_text(encoding="utf-8"))
    ]
