"""`anybatch trace RUN`: convert the log of a run to a trace for Perfetto."""

from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.command import Parser, integer, output_file, print_report
from anybatch.events.chrome_trace import rank_logs, write_chrome_trace

_DESCRIPTION = (
    "Convert the log of a finished or running run to a trace: phases, micro-batches and reductions of each rank on one "
    "time axis, with memory, loss and the engine's warnings. Open the trace in https://ui.perfetto.dev."
)
_EPILOG = "Times are measured on the host: the work of an accelerator appears where the host waits for it."


def run(argv: Sequence[str]) -> int:
    """Run `anybatch trace` and return the exit status."""
    args = make_parser().parse(argv)
    logs = rank_logs(args.run)
    target = args.out or logs[0].with_name("trace.json")
    report = write_chrome_trace(logs, target, first_step=args.first_step, last_step=args.last_step)
    return print_report(str(report), report, args)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("trace", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a run, or its events.jsonl; the logs of other ranks are in the same folder",
    )
    add("--out", type=output_file, metavar="FILE", help="file to write (default: trace.json next to the log)")
    add("--first-step", type=integer, default=0, metavar="N", help="first step to include (default: 0)")
    add("--last-step", type=integer, metavar="N", help="last step to include (default: the last in the log)")
    return parser
