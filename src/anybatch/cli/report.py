"""The output of a measuring command: a line of progress, the report, and its files."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from anybatch.cli.parser import output_file, picture_file

_WIDTH: Final = 79


class JsonReport(Protocol):
    """A report that can be written as JSON."""

    def as_json(self) -> Mapping[str, Any]:
        """Return it as `json.dumps` accepts it."""
        ...


ReportT = TypeVar("ReportT")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that overwrites the line, from any process; clear the line at the end.

    Yields None if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _write
    finally:
        _write("")


def add_report_files(add: Callable[..., object], drawn: str, *, with_json: bool = False) -> None:
    """Add the options --figure, whose help names what is drawn, and --json, by `add_argument`."""
    add("--figure", type=picture_file, metavar="FILE", help=f"draw {drawn}: .png, .svg or .pdf")
    if with_json:
        add("--json", type=output_file, metavar="FILE", help="write the results as JSON")


def print_report(
    heading: str, report: ReportT, draw: Callable[[ReportT, Path], object], given: argparse.Namespace
) -> None:
    """Print a report below a heading, write the files of `add_report_files`, and print their names."""
    sys.stdout.write(f"{heading}\n{report}\n" if heading else f"{report}\n")
    if (file := getattr(given, "json", None)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(cast("JsonReport", report).as_json(), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"wrote {file}\n")
    if given.figure is not None:
        draw(report, given.figure)
        sys.stdout.write(f"wrote {given.figure}\n")


def _write(words: str) -> None:
    # Standard output is for the report.
    sys.stderr.write(f"\r{words[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
