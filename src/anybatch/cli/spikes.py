"""`anybatch spikes LOG`: where a run has left its course, by its log."""

import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser
from anybatch.cli.status import Status

_DESCRIPTION = (
    "Look through the losses and gradient norms in the log of a run, finished or still going on, for what the steps "
    "before would not lead one to expect: jumps, rises, what is not finite."
)


def run(words: Sequence[str]) -> int:
    """Read the log that a command line names; return the exit status."""
    given = make_parser().parse(words)
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    from anybatch.core.spikes import SpikeRule  # noqa: PLC0415 (brings torch)
    from anybatch.diagnostics.spike_log import read_spikes  # noqa: PLC0415 (brings torch)

    report = read_spikes(given.log, SpikeRule(strictness=given.strictness))
    sys.stdout.write(f"{given.log}: has this run left its course?\n{report}\n")
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("spikes", _DESCRIPTION)
    parser.add_argument("log", type=Path, metavar="LOG", help="events.jsonl, or the folder of a run")
    parser.add_argument(
        "--strictness",
        type=float,
        default=7.0,
        metavar="X",
        help="how certain a rise must be; lower finds more, and more by chance (default: 7)",
    )
    return parser
