"""The one place that asks whether matplotlib is there, and whether it writes such a file."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anybatch.errors import UserError

FORMATS = (".png", ".svg", ".pdf")


def import_drawing(module: str, paths: Iterable[Path]) -> Any:  # noqa: ANN401 (a module)
    """Import a module that draws by matplotlib, which is no dependency of anybatch but an extra.

    Args:
        module: its full name; it imports matplotlib at its top, or is a part of matplotlib.
        paths: the files to be drawn.

    Raises:
        UserError: matplotlib is not installed, or a picture has another ending than .png, .svg or .pdf.
    """
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            message = f"{path} ends in {path.suffix!r}; a picture ends in {', '.join(FORMATS)}."
            raise UserError(message)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = (
            f"a picture is drawn by matplotlib, and there is no module {error.name!r}. "
            "Install it: pip install 'anybatch[plot]'"
        )
        raise UserError(message) from None
