"""`anybatch spikes LOG`: find loss spikes in the log of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.command import Parser
from anybatch.cli.status import Status

_DESCRIPTION = (
    "Search the losses and gradient norms in the log of a finished or running run for jumps, rises and non-finite "
    "values that the steps before do not explain."
)


def run(words: Sequence[str]) -> int:
    """Run `anybatch spikes` and return the exit status."""
    given = make_parser().parse(words)
    from anybatch.core.spikes import SpikeRule
    from anybatch.diagnostics.spike_log import read_spikes

    report = read_spikes(given.log, SpikeRule(strictness=given.strictness))
    sys.stdout.write(f"Loss spikes in {given.log}\n{report}\n")
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("spikes", _DESCRIPTION)
    parser.add_argument("log", type=Path, metavar="LOG", help="events.jsonl, or the folder of a run")
    parser.add_argument(
        "--strictness",
        type=float,
        default=7.0,
        metavar="X",
        help="how unlikely a rise must be by chance; lower finds more, with more false alarms (default: 7)",
    )
    return parser
