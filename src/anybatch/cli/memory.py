"""`anybatch memory`: run a step of a recipe and say what it held in memory."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser, add_recipe, count, count_or_auto, size, whole
from anybatch.cli.train_request import DEFAULT_RECIPE

_DESCRIPTION = (
    "Run the first steps of a recipe on one rank, and say of the last of them what it held in memory: for what, when "
    "it was most, and what is left. The model is the recipe's, new; no run is begun, and nothing is kept."
)
_EPILOG = "docs/command_line.md has an example. `anybatch train` says the peak of a whole run in its summary."


def run(words: Sequence[str]) -> int:
    """Measure what a command line names; return the exit status."""
    given = vars(make_parser().parse(words))
    # It brings torch, which takes seconds, and is not needed to say that an option is wrong.
    return int(importlib.import_module("anybatch.cli.memory_recipe").measure(given.pop("recipe"), **given))


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("memory", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step (default: the recipe's)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--micro-batch-size",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="most samples of one forward and backward, or auto: what fits (default: auto)",
    )
    sizes.add_argument(
        "--accumulation-steps", type=count, metavar="N", help="micro-batches, instead of --micro-batch-size"
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    add("--seed", type=whole, default=0, metavar="N", help="of parameters, order and what is drawn (default: 0)")
    add("--limit", type=size, metavar="SIZE", help="what there is, such as 24GiB (default: what the accelerator has)")
    add("--figure", type=Path, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    add("--allocator", action="store_true", help="with torch.cuda.memory_summary, on a CUDA device")
    return parser
