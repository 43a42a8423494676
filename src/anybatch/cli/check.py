"""`anybatch check`: judge what a user has; the exit status is the verdict, for CI."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser, add_recipe, count, whole
from anybatch.cli.status import Status
from anybatch.cli.train_request import DEFAULT_RECIPE

_DESCRIPTION = (
    "Say whether micro-batches give the gradient of the un-split batch. A recipe's model and loss are run on a few of "
    "its samples, whole and cut, in float64; what makes them differ is named, and how to mend it. "
    "--loop judges a training loop as it is, by running it on a recording model; nothing is converted or changed."
)
_EPILOG = "The exit status is 0 where nothing was found, and 8 otherwise; docs/command_line.md has the list."
_LOOP = "loop", "trains, such as train(model, loader, optimizer, accumulation_steps)"


def run(words: Sequence[str]) -> int:
    """Check what a command line names; return the exit status."""
    parser = make_parser()
    given = parser.parse(words)
    if given.loop is not None:
        if given.recipe is not None:
            parser.error(f"check a recipe or a loop, one at a time: {given.recipe} or --loop {given.loop}")
        return _check_loop(given)
    # They bring torch, which takes seconds, and are not needed to say that an option is wrong.
    check_recipe = importlib.import_module("anybatch.cli.check_recipe").check_recipe
    return int(
        check_recipe(
            given.recipe or DEFAULT_RECIPE,
            num_samples=given.samples,
            micro_batch_sizes=given.micro_batch_size,
            seed=given.seed,
            figure=given.figure,
        )
    )


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("check", _DESCRIPTION, epilog=_EPILOG)
    add_recipe(parser, None, DEFAULT_RECIPE)
    parser.add_argument("--samples", type=count, default=12, metavar="N", help="size of the batch (default: 12)")
    parser.add_argument(
        "--micro-batch-size",
        type=count,
        action="append",
        metavar="N",
        help="a cut to try; may be given several times (default: 1, and 2 and 3 fifths of the batch)",
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of what is drawn (default: 0)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the errors by layer: .png, .svg or .pdf")
    loop = parser.add_argument_group("a loop of one's own")
    loop.add_argument("--loop", metavar="FILE.py:FUNCTION", help="the function that trains")
    loop.add_argument(
        "--data",
        choices=("classes", "tokens", "values"),
        help="what it trains on (default: the first of these that it can run)",
    )
    loop.add_argument(
        "--ranks", type=int, choices=(1, 2), help="processes to run it on (default: 2 if it uses torch.distributed)"
    )
    return parser


def _check_loop(given: argparse.Namespace) -> int:
    """Print the report of a loop; return the exit status."""
    # They bring torch, which takes seconds, and are not needed to say that an option is wrong.
    function = importlib.import_module("anybatch.recipes").load_function(given.loop, *_LOOP)
    diagnostics = importlib.import_module("anybatch.diagnostics")
    report = diagnostics.check_loop(function, data=given.data, ranks=given.ranks)
    sys.stdout.write(f"{report}\n")
    return Status.NOT_EXACT if report.findings else Status.DONE
