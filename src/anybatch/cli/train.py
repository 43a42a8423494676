"""`anybatch train`: parse the options of a run, and report wrong ones before importing torch."""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import cast

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
from anybatch.cli.train_request import DEFAULT_RECIPE, PRELOADED, RUNS, Resume, TrainRequest
from anybatch.parallel.fork_server import start_fork_server

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
    given = vars(parser.parse(words))
    recipe, out, resume, ranks = (given.pop(name) for name in ("recipe", "out", "resume", "ranks"))
    if resume in ("always", "auto") and out is None:
        newest = _newest_run() if resume == "always" else ""
        parser.error(f"--resume needs --out, the folder of the run to resume{newest}")
    checkpoint_seconds = given.pop("checkpoint_seconds")
    # The resumed run or the recipe provides missing options.
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
    """Return the parser of this command."""
    parser = Parser("train", _DESCRIPTION, epilog=_EPILOG, explain_unknown=explain_unknown)
    add = parser.add_argument
    add_recipe(parser, None, DEFAULT_RECIPE)
    add(
        "--effective-batch-size",
        type=effective_batch_size,
        metavar="N",
        help="samples of one optimizer step, over all ranks; 32,128@20000: 32, and 128 after 20,000 samples",
    )
    add(
        "--micro-batch-size",
        type=micro_batch_size,
        metavar="N",
        help="maximum samples per forward and backward; auto: the fastest of a few that fit; remeasure: auto, but "
        "ignore cached measurements (default: auto)",
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
        help="maximum tokens per forward and backward, including padding, instead of --micro-batch-size: cuts batches "
        "by length if the recipe gives lengths",
    )
    add(
        "--ranks",
        type=count_or_auto,
        metavar="N",
        help="processes on this machine, or auto: one per accelerator, else one (default: auto)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=count, metavar="N", help="passes over the data, counted from the start")
    length.add_argument("--steps", type=count, metavar="N", help="optimizer steps, counted from the start")
    add("--learning-rate", type=number, metavar="X", help="learning rate at the base batch size")
    add("--base-batch-size", type=count, metavar="N", help="samples per step for which the learning rate was tuned")
    add(
        "--learning-rate-rule",
        choices=("linear", "sqrt", "none"),
        help="how to scale the learning rate with the effective batch size (default: depends on the optimizer)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), help="number format of forward and backward (default: fp32)")
    add(
        "--strategy",
        metavar="NAME",
        help="how ranks sum gradients: all_reduce, ddp, zero1, fsdp, or data_parallel in one process (default: auto)",
    )
    add(
        "--average-decay",
        type=number,
        metavar="X",
        help="evaluate with weights averaged over steps, with this decay, such as 0.999",
    )
    add("--seed", type=integer, metavar="N", help="seed of weights, order, augmentation and dropout (default: 0)")
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
