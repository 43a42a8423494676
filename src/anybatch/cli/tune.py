"""`anybatch tune RECIPE`: speed and memory by micro-batch size, and whether loading keeps up."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser, add_recipe, count, whole
from anybatch.cli.threads import let_threads_sleep
from anybatch.cli.train_request import DEFAULT_RECIPE

_DESCRIPTION = (
    "Make whole steps of a recipe at many micro-batch sizes, in turns, and print samples per second and memory of "
    "each; load its data with several numbers of workers, and say whether that keeps up. What is trained is not kept."
)
_EPILOG = "`anybatch train` tries a few sizes by itself (docs/auto_size.md); this shows the whole curve."


def run(words: Sequence[str]) -> int:
    """Measure what a command line names; return the exit status."""
    given = make_parser().parse(words)
    let_threads_sleep()
    # It brings torch, which takes seconds, and is not needed to say that an option is wrong.
    return int(importlib.import_module("anybatch.cli.tune_recipe").tune_recipe(**vars(given)))


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("tune", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step (default: the recipe's)")
    add(
        "--micro-batch-size",
        type=count,
        action="append",
        metavar="N",
        help="a size to try; may be given several times (default: the batch in 1, 2, 4, ... parts)",
    )
    add(
        "--workers",
        type=whole,
        action="append",
        metavar="N",
        help="a number of loading processes to try; may be given several times (default: 0, 1 and 2)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    add("--seed", type=whole, default=0, metavar="N", help="of the parameters and the order (default: 0)")
    add("--figure", type=Path, metavar="FILE", help="draw both curves: .png, .svg or .pdf")
    return parser
