"""Warnings that point at the line of the user's program, however deep in here the reason was found."""

import sys
import warnings

from anybatch.errors import AnyBatchWarning


def warn_user(message: str) -> None:
    """Give an `AnyBatchWarning` at the innermost line that is neither anybatch's nor torch's.

    Python shows a warning once per line and text, so a warning of every step is shown once.

    Args:
        message: what might not be meant, both values, and what to do.
    """
    level, frame = 1, sys._getframe()  # noqa: SLF001 (documented; what `inspect` gives reads every source file)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AnyBatchWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("anybatch", "torch", "contextlib")
