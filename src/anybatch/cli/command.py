"""Building blocks of commands: parser, option types, torch's settings, and the output of a report."""

import argparse
import dataclasses
import enum
import gc
import inspect
import json
import math
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
STDOUT: Final = Path("-")
"""The file of --json without a file name."""

Explain = Callable[[Sequence[str]], str]
ValueT = TypeVar("ValueT")


class Parser(argparse.ArgumentParser):
    """The parser of one command.

    `explain_unknown` returns the error message for unknown arguments. A command that `ends` has --json and --quiet.
    """

    def __init__(
        self,
        verb: str,
        description: str,
        *,
        epilog: str | None = None,
        explain_unknown: Explain | None = None,
        ends: bool = True,
    ) -> None:
        # Abbreviated options would break scripts when an option is added.
        super().__init__(prog=f"anybatch {verb}", description=description, epilog=epilog, allow_abbrev=False)
        self._explain_unknown = explain_unknown
        if ends:
            self.set_defaults(verb=verb)
            add = self.add_argument_group("output").add_argument
            text = "print the result as one JSON object instead of text, or also write it to a file *.json"
            add("--json", nargs="?", type=json_file, const=STDOUT, metavar="FILE", help=text)
            add("--quiet", action="store_true", help="print no progress and no notes, only the result and errors")

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

    @property
    def options(self) -> list[argparse.Action]:
        """All options and arguments."""
        return self._actions

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print the message and end the command."""
        sys.stderr.write(message or "")
        end = ParserExit(status)
        end.message = (message or "").partition("\n")[0]
        raise end

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


def json_file(text: str) -> Path:
    """Return the path of a JSON file (see `output_file`), which must end in .json, as --json may precede a recipe."""
    if not text.endswith(".json"):
        message = f"{text!r} does not end in .json; for JSON on standard output, put --json last"
        raise argparse.ArgumentTypeError(message)
    return output_file(text)


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
def progress_line(*, quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """Yield a picklable function that overwrites the last line of the terminal; None if `quiet` or not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        yield _write
    finally:
        _write("")


def add_figure(add: Callable[..., object], drawn: str) -> None:
    """Add --figure; `drawn` is the subject of the figure, for the help."""
    add("--figure", type=picture_file, metavar="FILE", help=f"draw {drawn}: .png, .svg or .pdf")


OutputOptions = Any
"""A value with the fields `verb`, `json` and `quiet`, and perhaps `figure`: the options of a command."""


def print_report(
    text: str,
    report: object,
    args: OutputOptions,
    *,
    status: Status = Status.DONE,
    draw: Callable[[Any, Path], object] | None = None,
) -> Status:
    """Print the text of a report, or write the report as JSON; draw its figure; return the exit status."""
    if text and args.json != STDOUT:
        sys.stdout.write(f"{text}\n")
    if args.json is not None:
        write_json(args.json, {"verb": args.verb, "status": status, **plain(report)})
    files = [] if args.json in (None, STDOUT) else [args.json]
    figure = getattr(args, "figure", None)
    if draw is not None and figure is not None:
        draw(report, figure)
        files.append(figure)
    for file in files:
        print_note(f"wrote {file}", args)
    return status


def print_note(text: str, args: OutputOptions) -> None:
    """Print a line that is not part of the result, unless --quiet; JSON on standard output stays alone."""
    if not args.quiet:
        (sys.stderr if args.json == STDOUT else sys.stdout).write(f"{text}\n")


def write_json(file: Path, values: Mapping[str, object]) -> None:
    """Write a JSON object to a file, or to standard output."""
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    if file == STDOUT:
        sys.stdout.write(text)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def plain(value: Any) -> Any:  # noqa: ANN401 (any report)
    """Return a report as JSON data: fields and public properties of dataclasses; NaN and infinities are None.

    Fields with the metadata `{"json": False}` are left out.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value.value if isinstance(value, enum.Enum) else value
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in json_names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]


def json_target(words: Sequence[str]) -> Path | None:
    """Return the file of --json on a command line that may be invalid; None without --json."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] == "--json":
            file = Path(word.partition("=")[2] or following)
            return file if file.suffix == ".json" and not file.is_dir() else STDOUT
    return None


def json_names(kind: type) -> list[str]:
    """Return the names of the fields and public properties of a dataclass that are part of its JSON."""
    fields = [field.name for field in dataclasses.fields(kind) if field.metadata.get("json", True)]
    properties = [name for name, value in vars(kind).items() if isinstance(value, property) and name[0] != "_"]
    return fields + properties


def _write(text: str) -> None:
    # Standard output is for the report.
    sys.stderr.write(f"\r{text[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
