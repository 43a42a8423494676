"""`anybatch spikes LOG`: find loss spikes in the log of a run."""

from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.command import Parser, number, print_report

_DESCRIPTION = (
    "Search the losses and gradient norms in the log of a finished or running run for non-finite values, and for jumps "
    "and rises that are larger than the noise of the previous steps."
)


def run(argv: Sequence[str]) -> int:
    """Run `anybatch spikes` and return the exit status."""
    args = make_parser().parse(argv)
    from anybatch.core.spikes import SpikeRule
    from anybatch.diagnostics.spike_log import read_spikes

    report = read_spikes(args.log, SpikeRule(strictness=args.strictness))
    return print_report(f"Loss spikes in {args.log}\n{report}", report, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("spikes", _DESCRIPTION)
    parser.add_argument("log", type=Path, metavar="LOG", help="events.jsonl, or the folder of a run")
    parser.add_argument(
        "--strictness",
        type=number,
        default=7.0,
        metavar="X",
        help="threshold for a rise; noise alone exceeds it in about exp(-2 X) of the steps, 1e-6 for 7 (default: 7)",
    )
    return parser
