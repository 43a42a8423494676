"""`anybatch demo`: a batch that does not fit into memory, and the same batch with three changed lines."""

from collections.abc import Sequence

from anybatch.cli.command import Parser, let_threads_sleep

_DESCRIPTION = (
    "Run two training loops in a minute, on any machine: a plain loop exceeds an enforced memory limit; the same loop "
    "with three changed lines finishes at the same batch size, with the same gradient. The limit counts the memory of "
    "tensors on the CPU."
)


def run(arguments: Sequence[str]) -> int:
    """Run the demonstration; return the exit status."""
    Parser("demo", _DESCRIPTION).parse(arguments)
    let_threads_sleep()
    from anybatch_guide.demo.run import demonstrate  # noqa: PLC0415 (a slow import that --help does not need)

    return int(demonstrate())
