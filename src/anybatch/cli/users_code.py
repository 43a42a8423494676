"""Tells the user's own frames in a traceback from frames of anybatch, torch and Python."""

import sys
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def users_traceback(error: BaseException) -> str | None:
    """Return the traceback from the first frame of the user's code on; None if there is no such frame."""
    shown = traceback.TracebackException.from_exception(error)
    foreign = [number for number, frame in enumerate(shown.stack) if not _is_ours(frame.filename)]
    if not foreign:
        return None
    # A package between us and the recipe, such as one that decorates functions, is not where to look first.
    first = next((number for number in foreign if not _is_installed(shown.stack[number].filename)), foreign[0])
    # Frames of anybatch and torch above the recipe are of no use to its author.
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[first:])
    return "".join(shown.format(chain=False)).rstrip()


def _is_ours(filename: str) -> bool:
    """Return whether a frame is anybatch's, its command's, its guide's, torch's or Python's own."""
    # Code without a file, such as Python's frozen modules.
    if filename.startswith("<"):
        return True
    # Modules that were not loaded have no frames, and importing torch here would take seconds.
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
