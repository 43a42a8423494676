"""Checks that matplotlib is installed and can write a file."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anybatch.errors import UserError

FORMATS = (".png", ".svg", ".pdf")


def import_drawing(module: str, paths: Iterable[Path]) -> Any:  # noqa: ANN401 (a module)
    """Import a module that uses matplotlib, an optional dependency; raise if a path has an unknown ending."""
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            message = f"{path} ends in {path.suffix!r}, but a picture must end in {', '.join(FORMATS)}."
            raise UserError(message, code="picture_format")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = (
            f"drawing needs matplotlib, which is not installed (module {error.name!r}). "
            "Install it: pip install 'anybatch[plot]'"
        )
        raise UserError(message, code="needs_matplotlib") from None
