"""Complete programs that the guide shows and runs; the page shows the output of each next to it."""

from pathlib import Path

from anybatch_guide.tracing import TracedFile


def listing(name: str) -> TracedFile:
    """Return one of these programs for tracing."""
    return TracedFile(Path(__file__).parent / name, f"guide/src/anybatch_guide/listings/{name}")
