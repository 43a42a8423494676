"""Figures of matplotlib, an optional dependency, with fixed settings."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anybatch.errors import UserError

FORMATS = (".png", ".svg", ".pdf")
INK, FAINT = "#262626", "#8C8C8C"
_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "text.parse_math": False,  # a dollar sign in a name does not begin a formula
        "svg.fonttype": "none",  # keep text as text, so that it can be searched
        "svg.hashsalt": "anybatch",  # without it, ids in the file would be random
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#E6E6E6",
        "legend.frameon": False,
    }
)
_WITHOUT_DATE: Mapping[str, Any] = MappingProxyType({".svg": {"Date": None}, ".pdf": {"CreationDate": None}})


@contextmanager
def new_figure(paths: Sequence[Path], width: float = 10.0, height: float = 5.6) -> Iterator[Any]:
    """Yield an empty figure of this size in inches, and save it to the paths; the same figure gives the same file.

    Raises:
        UserError: matplotlib is not installed, or a path does not end in .png, .svg or .pdf.
        OSError: a file cannot be written.
    """
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            message = f"{path} ends in {path.suffix!r}, but a picture must end in {', '.join(FORMATS)}."
            raise UserError(message, code="picture_format")
    try:
        mpl, drawing = map(importlib.import_module, ("matplotlib", "matplotlib.figure"))
    except ModuleNotFoundError as error:
        message = (
            f"drawing needs matplotlib, which is not installed (module {error.name!r}). "
            "Install it: pip install 'anybatch[plot]'"
        )
        raise UserError(message, code="needs_matplotlib") from None
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's settings have no effect
        mpl.rcParams.update(_SETTINGS)
        # Without pyplot, which would keep the figure alive and may open a window.
        figure = drawing.Figure(figsize=(width, height), layout="constrained")
        yield figure
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=160, metadata=_WITHOUT_DATE.get(path.suffix.lower()))
