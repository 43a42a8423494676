"""`anybatch`: find the verb, run it, and turn an error into a message and an exit status."""

import argparse
import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import cast

from anybatch.cli.status import Status, status_of
from anybatch.errors import UserError


@dataclass(frozen=True, slots=True)
class Verb:
    """Something the command line can do.

    Attributes:
        name: the word to type; also the name of the module in this folder that does it, by `run(words) -> int`.
        question: what a user who needs it asks.
        extra: the extra of anybatch whose package brings it, as an entry point of `ENTRY_POINTS`; None: it is ours.
    """

    name: str
    question: str
    extra: str | None = None


VerbFunction = Callable[[Sequence[str]], int]
"""Takes the words after the verb, and returns an exit status."""
ENTRY_POINTS = "anybatch.verbs"
"""The group in which other packages name their verbs: `name = "module:function"`."""

VERBS = (
    Verb("train", "How do I train at the batch size I name, on whatever is here?"),
    Verb("plan", "What fits into a device that is not here, and what would make more fit?"),
    Verb("check", "Is what I train exactly what I think?"),
    Verb("tune", "Which micro-batch size is the fastest here, and does loading keep up?"),
    Verb("compare", "Which way of using devices is best here: accumulation, DDP, ZeRO-1, FSDP?"),
    Verb("scale", "Why are N ranks not N times as fast, and what should I change?"),
    Verb("advise", "Which effective batch size is worth it here, and does accumulating pay?"),
    Verb("spikes", "Has a run left its course, and where?"),
    Verb("trace", "What did each rank do, and when?"),
    Verb("watch", "How are my runs doing, now and beside each other?", extra="guide"),
    Verb("memory", "Where does the memory of a step go, and how much is left?"),
    Verb("demo", "What does it do, in a minute?"),
    Verb("guide", "What happens in a step, and what changes if I do it otherwise?", extra="guide"),
    Verb("init", "How does a recipe of my own begin?"),
    Verb("env", "What should a bug report say about this machine?"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        words: what follows the program's name; None takes it from the process.
    """
    try:
        status = _run_command(sys.argv[1:] if words is None else words)
        # Output that cannot be written fails here, and not when the interpreter exits.
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, it ends here, in words)
        return _report(error)
    return status


def _run_command(words: Sequence[str]) -> int:
    """Run a command line and return its exit status; errors pass."""
    if len(words) > 1 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return Status.DONE
    if words[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"anybatch {version('anybatch')}\n")
        return Status.DONE
    verb = next((verb for verb in VERBS if verb.name == words[0]), None)
    if verb is None:
        sys.stderr.write(unknown_verb(words[0]))
        return Status.USAGE
    try:
        return int(function_of(verb)(words[1:]))
    except SystemExit as end:
        # argparse ends the program on --help and on a wrong option; any other exit is the user's code.
        if isinstance(end.code, int) and _raised_by_argparse(end):
            return end.code
        return _report(end)


def _report(error: BaseException) -> int:
    """Print an error and return the exit status; nothing is printed if the reader of the output has gone."""
    from anybatch.cli.failure import explain  # noqa: PLC0415 (not needed unless something fails)
    from anybatch.cli.output import discard_unwritable_output  # noqa: PLC0415 (the same)

    status = status_of(error)
    if status is not Status.CLOSED_PIPE:
        with suppress(OSError):  # results that were written so far come before the error
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.write(f"{explain(error)}\n")
    discard_unwritable_output()
    return status


def _raised_by_argparse(error: SystemExit) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename == argparse.__file__


def function_of(verb: Verb) -> VerbFunction:
    """Import what does a verb, only now: some bring torch along, which takes seconds.

    Raises:
        UserError: its package is not installed.
    """
    if verb.extra is None:
        return cast("VerbFunction", importlib.import_module(f"anybatch.cli.{verb.name}").run)
    for found in entry_points(group=ENTRY_POINTS, name=verb.name):
        return cast("VerbFunction", found.load())
    message = f"`anybatch {verb.name}` is a package of its own: pip install 'anybatch[{verb.extra}]'"
    raise UserError(message)


def overview() -> str:
    """Return the verbs, as the questions they answer."""
    width = max(len(verb.name) for verb in VERBS)
    lines = [f"  anybatch {verb.name:<{width}}  {verb.question}\n" for verb in VERBS]
    return (
        "anybatch: name the effective batch size; any hardware trains it, exactly.\n\n"
        f"{''.join(lines)}\n"
        "`anybatch VERB --help` says what a verb takes. To begin: anybatch train digits\n"
    )


def unknown_verb(word: str) -> str:
    """Return the message about an unknown command, with the nearest one."""
    names = [verb.name for verb in VERBS]
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"Did you mean `anybatch {near[0]}`?" if near else f"Commands: {', '.join(names)}."
    return f"anybatch: unknown command {word!r}. {hint}\n"
