"""`anybatch train`: the options of a run. What can be refused without torch is refused before it is imported."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from anybatch.cli.fork_server import start_fork_server
from anybatch.cli.frozen_imports import frozen_imports
from anybatch.cli.option_hints import explain_unknown
from anybatch.cli.parser import (
    Parser,
    add_recipe,
    count,
    count_or_auto,
    effective_batch_size,
    integer,
    micro_batch_size,
    number,
)
from anybatch.cli.threads import let_threads_sleep
from anybatch.cli.train_request import DEFAULT_RECIPE, RUNS, Resume, TrainRequest

_DESCRIPTION = (
    "Train a recipe at the effective batch size you name: the samples of one optimizer step, over all ranks. "
    "How it is cut and spread is only hardware, and does not change the result."
)
_EPILOG = (
    "Exit status: 0 done, 1 an error in the recipe, 2 a wrong request, 3 stopped and saved, 4 loss or gradient not "
    "finite, 5 full disk or damaged checkpoint, 6 a rank failed, 7 out of memory."
)


def run(words: Sequence[str]) -> int:
    """Train what a command line asks for; return the exit status."""
    request = read(words)
    let_threads_sleep()
    # Before torch is imported, so that the server imports it at the same time as this process.
    if request.ranks not in (None, "auto", 1):
        start_fork_server()
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    with frozen_imports():
        from anybatch.cli.launch import launch  # noqa: PLC0415 (brings torch)

    return launch(request)


def read(words: Sequence[str]) -> TrainRequest:
    """Return the request of a command line, or end the program with a sentence about its first mistake."""
    parser = make_parser()
    given = vars(parser.parse(words))
    recipe, out, resume, ranks = (given.pop(name) for name in ("recipe", "out", "resume", "ranks"))
    if resume in ("always", "auto") and out is None:
        newest = _newest_run() if resume == "always" else ""
        parser.error(f"--resume needs --out, the folder of the run to go on with{newest}")
    checkpoint_seconds = given.pop("checkpoint_seconds")
    # What was not given is left to the run that is resumed, or to the recipe.
    choices = {name: value for name, value in given.items() if value is not None}
    return TrainRequest(
        recipe=recipe,
        folder=out,
        resume=resume,
        ranks=ranks,
        checkpoint_seconds=checkpoint_seconds,
        choices=choices,
    )


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("train", _DESCRIPTION, epilog=_EPILOG, explain_unknown=explain_unknown)
    add = parser.add_argument
    add_recipe(parser, None, DEFAULT_RECIPE)
    add(
        "--effective-batch-size",
        type=effective_batch_size,
        metavar="N",
        help="samples of one optimizer step, over all ranks; 32,128@20000: of 32 samples, and of 128 after 20,000",
    )
    add(
        "--micro-batch-size",
        type=micro_batch_size,
        metavar="N",
        help="most samples of one forward and backward; auto: the fastest of a few that fit; remeasure: the same, "
        "without what was measured on this machine before (default: auto)",
    )
    add(
        "--accumulation-steps",
        type=count,
        metavar="N",
        help="micro-batches per rank and step, instead of --micro-batch-size",
    )
    add(
        "--micro-batch-tokens",
        type=count,
        metavar="N",
        help="most tokens of one forward and backward, padding included, instead of --micro-batch-size: batches are "
        "cut by length, where the recipe knows lengths",
    )
    add(
        "--ranks",
        type=count_or_auto,
        metavar="N",
        help="processes on this machine, or auto: one per accelerator, else one (default: auto)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=count, metavar="N", help="passes over the data, from the very beginning")
    length.add_argument("--steps", type=count, metavar="N", help="optimizer steps, from the very beginning")
    add("--learning-rate", type=number, metavar="X", help="at the base batch size")
    add("--base-batch-size", type=count, metavar="N", help="samples per step that the learning rate was found with")
    add(
        "--learning-rate-rule",
        choices=("linear", "sqrt", "none"),
        help="how the learning rate follows the effective batch size (default: by the optimizer)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), help="number format of forward and backward (default: fp32)")
    add(
        "--strategy",
        metavar="NAME",
        help="how ranks sum gradients: all_reduce, ddp, zero1 or fsdp; data_parallel: one process (default: auto)",
    )
    add(
        "--average-decay",
        type=number,
        metavar="X",
        help="average the weights over steps, to evaluate with: 0.999",
    )
    add("--seed", type=integer, metavar="N", help="of parameters, order, augmentation and dropout (default: 0)")
    add("--out", type=Path, metavar="FOLDER", help=f"for the log and checkpoints (default: {RUNS}/RECIPE-DATE-TIME)")
    add(
        "--resume",
        type=when_to_resume,
        nargs="?",
        const="always",
        metavar="auto|never",
        help="go on with the run in --out; options not given are as they were. auto: if it was begun, else begin it; "
        "never: not even after memory has run out in a step that cannot be repeated, or when a launcher restarts it",
    )
    add(
        "--checkpoint-seconds",
        type=number,
        metavar="X",
        help="most time between two checkpoints (default: 600)",
    )
    return parser


def when_to_resume(text: str) -> Resume:
    """Return when to go on with a run: "always", as without a word, "auto" or "never"."""
    if text in ("always", "auto", "never"):
        return cast("Resume", text)
    if Path(text).is_dir():
        message = f"the run to go on with is named by --out: --resume --out {text}"
    else:
        message = f"{text!r} must be auto, never or nothing; the recipe comes before it: {text} --resume"
    raise ArgumentTypeError(message)


def _newest_run() -> str:
    """Return the end of a sentence that names the run most likely meant."""
    headers = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    return f": the newest is --out {headers[-1].parent}" if headers else ""
