"""`anybatch trace RUN`: a run's log as a trace for Perfetto."""

import sys
from collections.abc import Sequence
from pathlib import Path

from anybatch.cli.parser import Parser, integer, output_file
from anybatch.cli.status import Status
from anybatch.events.chrome_trace import rank_logs, write_chrome_trace

_DESCRIPTION = (
    "Write the log of a run, finished or still going on, as a trace: phases, micro-batches and reductions of each rank "
    "on one line of time, with memory, loss and diagnoses. https://ui.perfetto.dev opens it."
)
_EPILOG = "Times are host times; on an accelerator, work shows where the host waits for it."


def run(words: Sequence[str]) -> int:
    """Write the trace that a command line asks for; return the exit status.

    Raises:
        UserError: there is no such run, or no such step in it.
    """
    given = make_parser().parse(words)
    logs = rank_logs(given.run)
    target = given.out or logs[0].with_name("trace.json")
    report = write_chrome_trace(logs, target, first_step=given.first_step, last_step=given.last_step)
    ranks = f"{report.num_ranks} rank{'s' * (report.num_ranks != 1)}"
    sys.stdout.write(f"wrote {target}: {report.num_steps} steps, {ranks}, {report.num_events} events\n")
    if report.num_skipped:
        sys.stdout.write(f"left out {report.num_skipped} lines that are none of a log\n")
    if report.shifted:
        names = ", ".join(map(str, report.shifted))
        sys.stdout.write(f"other clocks than rank 0's: {names}; their steps stand where rank 0's end\n")
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("trace", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or its events.jsonl; logs of other ranks lie beside it")
    add("--out", type=output_file, metavar="FILE", help="where to write it (default: trace.json beside the log)")
    add("--first-step", type=integer, default=0, metavar="N", help="the first step that is wanted (default: 0)")
    add("--last-step", type=integer, metavar="N", help="the last one (default: the last of the log)")
    return parser
