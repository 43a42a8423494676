"""`anybatch`: run a command, and turn an error into a message and an exit status."""

import difflib
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import cast

from anybatch.cli.command import json_target, write_json
from anybatch.cli.status import ParserExit, Status, discard_unwritable_output, error_values, explain, status_of
from anybatch.errors import UserError


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: its name, a one-line summary, and the extra that provides it (None: anybatch).

    `anybatch.cli.NAME.run(argv)` runs the command; if an extra provides it, an entry point of `ENTRY_POINTS` does.
    """

    name: str
    summary: str
    extra: str | None = None


VerbFunction = Callable[[Sequence[str]], int]
"""Receives the arguments after the command; returns an exit status."""
ENTRY_POINTS = "anybatch.verbs"
"""The entry-point group of commands of other packages: `name = "module:function"`."""

VERBS = (
    Verb("train", "Train a recipe at the effective batch size you choose"),
    Verb("plan", "Predict what fits on a device, and what would make more fit"),
    Verb("check", "Check that micro-batches give the gradient of the whole batch"),
    Verb("tune", "Find the fastest micro-batch size"),
    Verb("compare", "Compare accumulation, DDP, ZeRO-1 and FSDP on this machine"),
    Verb("scale", "Find out why N ranks are not N times as fast, and whether data loading keeps up"),
    Verb("advise", "Find the effective batch size that pays off"),
    Verb("spikes", "Find loss spikes and divergence in a log"),
    Verb("trace", "Convert a log to a trace that shows what each rank did, and when"),
    Verb("watch", "Follow runs in the browser, live and side by side", extra="guide"),
    Verb("memory", "Show where the memory of a step goes"),
    Verb("demo", "See how accumulation avoids an out-of-memory error, in a minute", extra="guide"),
    Verb("guide", "Explore what happens in a step, in the browser", extra="guide"),
    Verb("init", "Write a starter recipe"),
    Verb("env", "Print versions and hardware for a bug report"),
    Verb("mcp", "Serve plan, check, tune, advise and compare as tools for agents", extra="mcp"),
    Verb("completion", "Print a script that completes commands in bash, zsh or fish", extra="completion"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        status = _run_command(words)
        # Raise a failure to write the output here, not at interpreter exit.
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (every error becomes an exit status)
        return _report(error, words)
    return status


def _run_command(argv: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors propagate."""
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return Status.DONE
    if argv[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"anybatch {version('anybatch')}\n")
        return Status.DONE
    verb = next((verb for verb in VERBS if verb.name == argv[0]), None)
    if verb is None:
        raise UserError(unknown_verb(argv[0]), code="unknown_command")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # from torch; numpy is optional
    return int(function_of(verb)(argv[1:]))


def _report(error: BaseException, words: Sequence[str]) -> int:
    """Print an error and return the exit status; print nothing if the reader closed the pipe."""
    is_printed = isinstance(error, ParserExit)
    status = int(error.code or 0) if isinstance(error, ParserExit) else status_of(error)
    target = json_target(words)
    if target is not None and status not in (Status.DONE, Status.CLOSED_PIPE):
        with suppress(OSError):
            write_json(target, {"verb": words[0], "status": status, "error": error_values(error)})
    if status != Status.CLOSED_PIPE and not is_printed:
        with suppress(OSError):  # print the results so far before the error
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.write(f"{explain(error)}\n")
    discard_unwritable_output()
    return status


def function_of(verb: Verb) -> VerbFunction:
    """Import the function of a command when it is run, because some commands import torch, which takes seconds."""
    if verb.extra is None:
        return cast("VerbFunction", importlib.import_module(f"anybatch.cli.{verb.name}").run)
    for found in entry_points(group=ENTRY_POINTS, name=verb.name):
        return cast("VerbFunction", found.load())
    message = f"`anybatch {verb.name}` needs an extra: pip install 'anybatch[{verb.extra}]'"
    raise UserError(message)


def overview() -> str:
    """Return the list of commands."""
    width = max(len(verb.name) for verb in VERBS)
    lines = [f"  anybatch {verb.name:<{width}}  {verb.summary}\n" for verb in VERBS]
    return (
        "anybatch: train at the batch size you choose, on any hardware, with the exact gradient.\n\n"
        f"{''.join(lines)}\n"
        "A recipe is a Python function that returns model, loss, optimizer and data; `digits` is built in.\n"
        "`anybatch COMMAND --help` lists the options of a command. Start with: anybatch init train.py\n"
    )


def unknown_verb(word: str) -> str:
    """Return the error for an unknown command, with the most similar one."""
    names = [verb.name for verb in VERBS]
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"Did you mean `anybatch {near[0]}`?" if near else f"Commands: {', '.join(names)}."
    return f"unknown command {word!r}. {hint}"
