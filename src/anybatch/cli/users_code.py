"""Separates the user's frames in a traceback from frames of anybatch, torch and Python."""

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def users_traceback(error: BaseException) -> str | None:
    """Return the traceback from the first frame of the user's code; None without such a frame."""
    shown = traceback.TracebackException.from_exception(error)
    foreign = [number for number, frame in enumerate(shown.stack) if not _is_ours(frame.filename)]
    if not foreign:
        return None
    # Frames of installed packages between us and the recipe, such as decorators, are skipped.
    first = next((number for number in foreign if not _is_installed(shown.stack[number].filename)), foreign[0])
    # Frames of anybatch and torch above the recipe do not help its author.
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[first:])
    return "".join(shown.format(chain=False)).rstrip()


def _is_ours(filename: str) -> bool:
    """Return whether a frame belongs to anybatch, its guide, torch or Python."""
    # Code without a file, such as Python's frozen modules.
    if filename.startswith("<"):
        return True
    # A module that is not loaded has no frames, and importing torch would take seconds.
    modules = [sys.modules.get(name) for name in ("torch", "anybatch_guide")]
    packages = [_PACKAGE, *(Path(module.__file__).parent for module in modules if module and module.__file__)]
    if any(_is_in(filename, package) for package in packages):
        return True
    if filename == sys.argv[0] and _is_in(filename, sysconfig.get_path("scripts")):
        return True
    return not _is_installed(filename) and _is_in(filename, sysconfig.get_path("stdlib"))


def _is_installed(filename: str) -> bool:
    return any(_is_in(filename, sysconfig.get_path(place)) for place in ("purelib", "platlib"))


def _is_in(filename: str, folder: str | Path) -> bool:
    return Path(filename).resolve().is_relative_to(Path(folder).resolve())
