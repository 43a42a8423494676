"""argparse as every command uses it: no abbreviations, one-line errors, typed values."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from anybatch.cli.status import Status
from anybatch.core.batch_ramp import BatchRamp
from anybatch.core.units import parse_bytes
from anybatch.errors import UserError
from anybatch.events.matplotlib_files import FORMATS

Explain = Callable[[Sequence[str]], str]


class Parser(argparse.ArgumentParser):
    """The parser of one command; `explain_unknown` returns the error for unknown words."""

    def __init__(
        self, verb: str, description: str, *, epilog: str | None = None, explain_unknown: Explain | None = None
    ) -> None:
        # Abbreviated options would break scripts when an option is added.
        super().__init__(prog=f"anybatch {verb}", description=description, epilog=epilog, allow_abbrev=False)
        self._explain_unknown = explain_unknown

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the values of a command line, or exit with the first error in it."""
        # argparse would print its own message for unknown words.
        values, unknown = self.parse_known_args(words)
        if unknown and self._explain_unknown is not None:
            self.error(self._explain_unknown(unknown))
        if unknown:
            kind = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {unknown[0]!r}")
        return values

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program."""
        self.exit(Status.USAGE, f"{self.prog}: {message}\n(`{self.prog} --help` lists the options)\n")


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    value = integer(text)
    if value < 1:
        message = f"{text} must be at least 1"
        raise argparse.ArgumentTypeError(message)
    return value


def effective_batch_size(text: str) -> int | BatchRamp:
    """Return a whole number of at least 1, or a ramp of them."""
    if not {",", "@"} & set(text):
        return count(text)
    try:
        return BatchRamp.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_or_auto(text: str) -> int | Literal["auto"]:
    """Return a whole number of at least 1, or "auto"."""
    return "auto" if text == "auto" else count(text)


def micro_batch_size(text: str) -> int | Literal["auto", "remeasure"]:
    """Return a whole number of at least 1, "auto" or "remeasure"."""
    return "remeasure" if text == "remeasure" else count_or_auto(text)


def number(text: str) -> float:
    """Return a number."""
    try:
        return float(text)
    except ValueError:
        message = f"{text!r} is not a number"
        raise argparse.ArgumentTypeError(message) from None


def memory_size(text: str) -> int:
    """Return a number of bytes, written with its unit: 24GiB, 80GB, 512MiB."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(text: str) -> Path:
    """Return the path of an output file, checked to be writable before its content is computed."""
    path = Path(text)
    parent = next(folder for folder in (path.absolute(), *path.absolute().parents)[1:] if os.path.lexists(folder))
    if not text or path.is_dir():
        message = f"{text!r} is a folder; choose a file in it"
    elif not parent.is_dir():
        message = f"{text!r} cannot be written: {str(parent)!r} is not a folder"
    elif not os.access(path if path.exists() else parent, os.W_OK):
        message = f"{text!r} cannot be written: no permission"
    else:
        return path
    raise argparse.ArgumentTypeError(message)


def picture_file(text: str) -> Path:
    """Return the path of a picture, checked as by `output_file`."""
    path = output_file(text)
    if path.suffix.lower() not in FORMATS:
        message = f"{text!r} must end in one of {', '.join(FORMATS)}"
        raise argparse.ArgumentTypeError(message)
    return path


def integer(text: str) -> int:
    """Return a whole number."""
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is not a whole number"
        raise argparse.ArgumentTypeError(message) from None


def add_recipe(parser: argparse.ArgumentParser, default: str | None, shown: str) -> None:
    """Add the argument RECIPE; `shown` is the default that the help names."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=default,
        metavar="RECIPE",
        help=f"digits, text, contrastive, finetune, file.py:function or package.module:function (default: {shown})",
    )
