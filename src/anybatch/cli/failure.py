"""The text of an error: a message where it was foreseen, the user's own frames where their code failed."""

import errno
import sys
import sysconfig
import traceback
from pathlib import Path

from anybatch.cli.status import Status, status_of
from anybatch.errors import AnyBatchError

_PACKAGE = Path(__file__).parents[1]


def explain(error: BaseException, *, in_full: bool | None = None) -> str:
    """Return the text to print about an error.

    Args:
        error: what was raised.
        in_full: with the whole traceback, whatever it is; None does so under `python -X dev`.
    """
    if sys.flags.dev_mode if in_full is None else in_full:
        return "".join(traceback.format_exception(error)).rstrip()
    message = _foreseen(error)
    if message is not None:
        return f"anybatch: {message}"
    own = _from_users_code_on(error)
    if own is not None:
        return f"anybatch: the recipe's own code failed:\n\n{own}"
    full = "".join(traceback.format_exception(error)).rstrip()
    return f"anybatch: an error that should not be. Please report it with what `anybatch env` prints.\n\n{full}"


def _foreseen(error: BaseException) -> str | None:
    """Return the message for an error that needs no traceback; None for any other."""
    if isinstance(error, AnyBatchError):
        return str(error)
    status = status_of(error)
    if status is Status.INTERRUPTED:
        return "ended at once, by Ctrl-C. What was saved before is whole; --resume goes on from there."
    if status is Status.OUT_OF_MEMORY:
        return (
            f"out of memory: {error}. Name a smaller --micro-batch-size: the result stays the same. "
            "Or use --precision bf16."
        )
    if isinstance(error, OSError) and status is Status.FILES:
        return f"no room on the disk for {error.filename} ({error.strerror}). Make room, or name another --out."
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.EROFS):
        return f"{error.filename} cannot be used: {error.strerror}. Name another file or folder, or change its rights."
    return None


def _from_users_code_on(error: BaseException) -> str | None:
    """Return the traceback from the first frame on that is the user's; None if there is no such frame."""
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
    """Return whether a frame is anybatch's, torch's or Python's own."""
    # Code without a file, such as Python's frozen modules.
    if filename.startswith("<"):
        return True
    # Not imported for this: where torch was not loaded, no frame can be its own.
    torch = sys.modules.get("torch")
    packages = [_PACKAGE] if torch is None or torch.__file__ is None else [_PACKAGE, Path(torch.__file__).parent]
    if any(_lies_in(filename, package) for package in packages):
        return True
    return not _is_installed(filename) and _lies_in(filename, sysconfig.get_paths()["stdlib"])


def _is_installed(filename: str) -> bool:
    return any(_lies_in(filename, sysconfig.get_paths()[place]) for place in ("purelib", "platlib"))


def _lies_in(filename: str, folder: str | Path) -> bool:
    return Path(filename).resolve().is_relative_to(Path(folder).resolve())
