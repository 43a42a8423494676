"""`anybatch demo`: a batch that does not fit, and the same batch, exactly, with three lines changed."""

from collections.abc import Sequence

from anybatch.cli.parser import Parser
from anybatch.cli.threads import let_threads_sleep

_DESCRIPTION = (
    "See it in a minute, on any machine: a plain training loop runs out of an enforced memory budget; the same loop "
    "with three lines changed finishes at the same batch size, with the same gradient. The budget is kept by counting "
    "what tensors hold, on the CPU."
)


def run(words: Sequence[str]) -> int:
    """Run the demonstration; return the exit status."""
    Parser("demo", _DESCRIPTION).parse(words)
    let_threads_sleep()
    from anybatch.recipes.demonstration.run import demonstrate  # noqa: PLC0415 (brings torch, see above)

    return int(demonstrate())
