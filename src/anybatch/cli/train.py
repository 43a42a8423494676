"""`anybatch train`: parse the options of a run, and report wrong ones before importing torch."""

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from anybatch.cli.option_hints import explain_unknown
from anybatch.cli.parser import Parser, add_recipe, add_settings, count_or_auto, number, settings_of
from anybatch.cli.torch_import import frozen_imports, let_threads_sleep
from anybatch.cli.train_request import DEFAULT_RECIPE, PRELOADED, RUNS, Resume, TrainRequest
from anybatch.core.run_config import RunConfig
from anybatch.errors import UserError
from anybatch.parallel.launchers import start_fork_server

_DESCRIPTION = (
    "Train a recipe at a given effective batch size: the samples of one optimizer step, over all ranks. "
    "The split into micro-batches and ranks depends on the hardware and does not change the result."
)
_EPILOG = (
    "Exit status: 0 done, 1 an error in the recipe, 2 a wrong request, 3 stopped and saved, 4 loss or gradient not "
    "finite, 5 full disk or damaged checkpoint, 6 a rank failed, 7 out of memory."
)


def run(words: Sequence[str]) -> int:
    """Run `anybatch train` and return the exit status."""
    request = read(words)
    let_threads_sleep()
    # Before importing torch, so that the server and this process import it in parallel.
    if request.ranks not in (None, "auto", 1):
        start_fork_server(*PRELOADED)
    # Imported late: importing torch takes seconds, and a wrong option is reported without it.
    with frozen_imports():
        from anybatch.cli.launch import launch  # noqa: PLC0415 (imports torch)

    return launch(request)


def read(words: Sequence[str]) -> TrainRequest:
    """Return the request of a command line, or exit with the first error in it."""
    parser = make_parser()
    given = parser.parse(words)
    if given.resume in ("always", "auto") and given.out is None:
        newest = _newest_run() if given.resume == "always" else ""
        parser.error(f"--resume needs --out, the folder of the run to resume{newest}")
    try:
        config = settings_of(given)
    except UserError as error:
        parser.error(str(error))
    # The resumed run or the recipe provides missing options.
    return TrainRequest(
        recipe=given.recipe,
        folder=given.out,
        resume=given.resume,
        ranks=given.ranks,
        checkpoint_seconds=given.checkpoint_seconds,
        config=config,
    )


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("train", _DESCRIPTION, epilog=_EPILOG, explain_unknown=explain_unknown)
    add = parser.add_argument
    add_recipe(parser, None, DEFAULT_RECIPE)
    add_settings(add, *(field.name for field in dataclasses.fields(RunConfig)))
    add(
        "--ranks",
        type=count_or_auto,
        metavar="N",
        help="processes on this machine, or auto: one per accelerator, else one (default: auto)",
    )
    add("--out", type=Path, metavar="FOLDER", help=f"log and checkpoints (default: {RUNS}/RECIPE-DATE-TIME)")
    add(
        "--resume",
        type=when_to_resume,
        nargs="?",
        const="always",
        metavar="auto|never",
        help="resume the run in --out, keeping options that are not given; auto: resume if the run exists, else start "
        "it; never: do not resume, not even after out of memory or a restart by a launcher",
    )
    add(
        "--checkpoint-seconds",
        type=number,
        metavar="X",
        help="maximum seconds between checkpoints (default: 600)",
    )
    return parser


def when_to_resume(text: str) -> Resume:
    """Return when to resume a run: "always" (the option without a value), "auto" or "never"."""
    if text in ("always", "auto", "never"):
        return cast("Resume", text)
    if Path(text).is_dir():
        message = f"--resume does not take a folder; use --resume --out {text}"
    else:
        message = f"{text!r} must be auto, never or omitted; put a recipe first: {text} --resume"
    raise ArgumentTypeError(message)


def _newest_run() -> str:
    """Return a hint with the newest run, to append to a message; empty without runs."""
    headers = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    return f": the newest is --out {headers[-1].parent}" if headers else ""
