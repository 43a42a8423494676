"""A log as a picture: loss, evaluations and learning rate by step, with marks for events."""

import os
from collections.abc import Iterable
from pathlib import Path

from anybatch.errors import UserError
from anybatch.events.curves import read_curves
from anybatch.events.matplotlib_files import import_drawing


def plot_losses(jsonl_path: str | os.PathLike[str], out_paths: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Draw a run from its log.

    The loss of each step is a thin line and its smoothed course a thick one; evaluations are points, and learning rates
    have a panel below. Marks show skipped updates, resumes and out of memory. Steps undone by a resume are not drawn.
    The same log and matplotlib give the same SVG, byte for byte.

    Args:
        jsonl_path: the log, see `JsonlLog`; it may still be written.
        out_paths: the pictures, which end in .png, .svg or .pdf; missing folders are created.

    Returns:
        The paths of the pictures.

    Raises:
        UserError: matplotlib is not installed, a picture has another ending, or the log has no steps.
        OSError: the log cannot be read, or a picture cannot be written.
    """
    paths = tuple(map(Path, out_paths))
    drawing = import_drawing("anybatch.events.drawing", paths)
    curves = read_curves(jsonl_path)
    if not curves.steps:
        message = f"{os.fspath(jsonl_path)} has no steps yet, so there is nothing to draw. Is it the log of rank 0?"
        raise UserError(message)
    for path in paths:
        # Created late, so that a log without steps leaves no empty folders.
        path.parent.mkdir(parents=True, exist_ok=True)
    drawing.draw(curves, paths)
    return paths
