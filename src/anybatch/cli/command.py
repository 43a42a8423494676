"""Building blocks of commands: parser, option types, torch's settings, and the output of a report."""

import argparse
import dataclasses
import gc
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar, get_args

from anybatch.cli.status import ParserExit, Status
from anybatch.core.collectives import parse_link
from anybatch.core.run_config import CHOICES, STANDARD, RunConfig
from anybatch.core.schedules import BatchRamp
from anybatch.core.units import parse_bytes
from anybatch.errors import UserError
from anybatch.events.matplotlib_files import FORMATS


def let_threads_sleep() -> None:
    """Let torch's threads sleep while they wait for each other, unless the user has set how they wait.

    By default they spin, which slows down every operator when another program uses one of the cores (measured in
    docs/decisions/0008-command-line.md). No-op once torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def hide_logs_of_torch() -> None:
    """Make torch's C++ code print errors only, in this process and its children.

    `anybatch compare` triggers warnings of DDP's reducer on purpose. No-op once torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Exempt the objects created inside from garbage collection.

    Torch's modules have a million objects that live until the program exits; visiting them takes up to a second.
    No-op if torch is already imported, because freezing would then also exempt the objects of other code.
    """
    if "torch" in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


DEFAULT_RECIPE = "digits"
RUNS = Path("runs")

Explain = Callable[[Sequence[str]], str]
ValueT = TypeVar("ValueT")


class Parser(argparse.ArgumentParser):
    """The parser of one command; `explain_unknown` returns the error message for unknown arguments."""

    def __init__(
        self, verb: str, description: str, *, epilog: str | None = None, explain_unknown: Explain | None = None
    ) -> None:
        # Abbreviated options would break scripts when an option is added.
        super().__init__(prog=f"anybatch {verb}", description=description, epilog=epilog, allow_abbrev=False)
        self._explain_unknown = explain_unknown

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the values of a command line, or exit with the first error in it."""
        # `parse_args` would print argparse's own message for unknown arguments.
        values, unknown = self.parse_known_args(argv)
        if unknown and self._explain_unknown is not None:
            self.error(self._explain_unknown(unknown))
        if unknown:
            kind = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {unknown[0]!r}")
        return values

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print the message and end the command."""
        sys.stderr.write(message or "")
        raise ParserExit(status)

    def error(self, message: str) -> NoReturn:
        """Print the error and end the program."""
        self.exit(Status.USAGE, f"{self.prog}: {message}\n(`{self.prog} --help` lists the options)\n")


def _reader(convert: Callable[[str], ValueT], kind: str) -> Callable[[str], ValueT]:
    def read(text: str) -> ValueT:
        try:
            return convert(text)
        except ValueError:
            message = f"{text!r} is not a {kind}"
            raise argparse.ArgumentTypeError(message) from None

    return read


integer = _reader(int, "whole number")
number = _reader(float, "number")


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    value = integer(text)
    if value < 1:
        message = f"{text} must be at least 1"
        raise argparse.ArgumentTypeError(message)
    return value


def typed(parse: Callable[[str], ValueT]) -> Callable[[str], ValueT]:
    """Wrap `parse` for an option's `type=`, so that argparse reports its `UserError` with the option's name."""

    def read(text: str) -> ValueT:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def effective_batch_size(text: str) -> int | BatchRamp:
    """Return a batch size of at least 1, or a ramp: sizes that grow during the run, such as `32,128@20000`."""
    return typed(BatchRamp.parse)(text) if {",", "@"} & set(text) else positive_int(text)


def positive_int_or_auto(text: str) -> int | Literal["auto"]:
    """Return a whole number of at least 1, or "auto"."""
    return "auto" if text == "auto" else positive_int(text)


memory_size = typed(parse_bytes)
"""A number of bytes, written with its unit: 24GiB, 80GB, 512MiB."""
link = typed(parse_link)
"""A network link, written as bandwidth and latency."""


def output_file(text: str) -> Path:
    """Return the path of an output file, or raise if it is not writable, before a command computes its content."""
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
    """Return the path of a picture: a writable file (see `output_file`) with the suffix of a picture format."""
    path = output_file(text)
    if path.suffix.lower() not in FORMATS:
        message = f"{text!r} must end in one of {', '.join(FORMATS)}"
        raise argparse.ArgumentTypeError(message)
    return path


def add_recipe(parser: argparse.ArgumentParser, default: str | None, shown: str) -> None:
    """Add the argument RECIPE; its help shows `shown` as the default."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=default,
        metavar="RECIPE",
        help="a built-in recipe (digits, text, contrastive or finetune), or your own function that returns an ab.Job, "
        f"written as file.py:function or package.module:function (default: {shown})",
    )


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "effective_batch_size": effective_batch_size,
    "micro_batch_size": positive_int_or_auto,
    "seed": integer,
}
"""Parsers of the settings whose type does not determine the parser."""
_BY_TYPE: Mapping[object, tuple[Callable[[str], object], str]] = {
    int: (positive_int, "N"),
    float: (number, "X"),
}


def add_settings(add: Callable[..., object], *names: str, **defaults: object) -> None:
    """Call `add`, a parser's `add_argument`, for each of these fields of `RunConfig`; omitted options are None.

    The help is the field's text in the docstring of `RunConfig`. `defaults` replace the defaults in the help, for
    fields whose default is different in this command.
    """
    # Without docstrings (python -OO) options have no help text, but still work.
    described = inspect.cleandoc(RunConfig.__doc__ or "")
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", described, re.MULTILINE))
    for field in dataclasses.fields(RunConfig):
        if field.name not in names:
            continue
        text = " ".join(texts.get(field.name, "").split()).partition(" (in Python")[0]
        default = defaults.get(field.name, getattr(STANDARD, field.name))
        shown = text if default is None else f"{text.partition(' (default')[0]} (default: {default})"
        add(f"--{field.name.replace('_', '-')}", help=shown, **_parsing(field))


def _parsing(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Return the arguments of `add_argument` that parse a value of the field's type."""
    if field.name in CHOICES:
        return {"choices": CHOICES[field.name]}
    # The other members of the union are literals, None, or classes such as BatchRamp.
    read, placeholder = _BY_TYPE[get_args(field.type)[0]]
    return {"type": _PARSERS.get(field.name, read), "metavar": placeholder}


def settings_of(args: argparse.Namespace) -> RunConfig:
    """Return the settings among the values of a command line.

    Raises:
        UserError: a value is invalid, or two contradict each other.
    """
    names = {field.name for field in dataclasses.fields(RunConfig)}
    return RunConfig(**{name: value for name, value in vars(args).items() if name in names})


_WIDTH: Final = 79


@contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a picklable function that overwrites the last line of the terminal; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _write
    finally:
        _write("")


def add_report_files(add: Callable[..., object], drawn: str = "", *, with_json: bool = False) -> None:
    """Add --figure, unless `drawn` (the subject of the figure, for the help) is empty, and --json if `with_json`."""
    if drawn:
        add("--figure", type=picture_file, metavar="FILE", help=f"draw {drawn}: .png, .svg or .pdf")
    if with_json:
        add("--json", type=output_file, metavar="FILE", help="write the results as JSON")


def print_report(
    heading: str,
    report: Any,  # noqa: ANN401 (each command has its own report class)
    draw: Callable[[Any, Path], object] | None,
    args: argparse.Namespace,
) -> None:
    """Print a report below a heading, write the files of `add_report_files`, and print their names."""
    sys.stdout.write(f"{heading}\n{report}\n" if heading else f"{report}\n")
    if (file := getattr(args, "json", None)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"wrote {file}\n")
    if draw is not None and args.figure is not None:
        draw(report, args.figure)
        sys.stdout.write(f"wrote {args.figure}\n")


def _write(text: str) -> None:
    # Standard output is for the report.
    sys.stderr.write(f"\r{text[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
