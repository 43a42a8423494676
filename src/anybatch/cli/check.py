"""`anybatch check`: judge what a user has; the exit status is the verdict, for CI."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from anybatch.cli.parser import Parser
from anybatch.cli.status import Status

_DESCRIPTION = (
    "Say whether the gradient of every optimizer step is that of its un-split batch. "
    "--loop judges a training loop as it is, by running it on a recording model; nothing is converted or changed."
)
_EPILOG = "The exit status is 0 where nothing was found, and 8 otherwise; docs/command_line.md has the list."
_LOOP = "loop", "trains, such as train(model, loader, optimizer, accumulation_steps)"


def run(words: Sequence[str]) -> int:
    """Check what a command line names; return the exit status."""
    parser = make_parser()
    given = parser.parse(words)
    if given.loop is None:
        parser.error("name what to check: --loop file.py:function")
    return _check_loop(given)


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("check", _DESCRIPTION, epilog=_EPILOG)
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
