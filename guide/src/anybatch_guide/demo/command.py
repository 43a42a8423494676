"""`anybatch demo`: a batch that does not fit into memory, and the same batch with three changed lines."""

import sys
from collections.abc import Sequence

from anybatch.cli.command import Parser, let_threads_sleep, print_report
from anybatch.cli.status import Status

_DESCRIPTION = (
    "Run two training loops in a minute, on any machine: a plain loop exceeds an enforced memory limit; the same loop "
    "with three changed lines finishes at the same batch size, with the same gradient. The limit counts the memory of "
    "tensors on the CPU."
)


def run(arguments: Sequence[str]) -> int:
    """Run the demonstration; return the exit status."""
    args = make_parser().parse(arguments)
    let_threads_sleep()
    from anybatch_guide.demo.run import demonstrate  # noqa: PLC0415 (a slow import that --help does not need)

    lines: list[str] = []
    report = demonstrate(lines.append if args.json else sys.stdout.write)
    status = Status.DONE if report.is_as_intended else Status.UNEXPECTED
    return print_report("".join(lines).rstrip(), report, args, status=status)


def make_parser() -> Parser:
    """Return the parser of this command."""
    return Parser("demo", _DESCRIPTION)
