"""Complete programs that the guide shows, runs and hands out: what each prints is what stands on the page beside it."""

from pathlib import Path

from anybatch_guide.tracing import TracedFile


def listing(name: str) -> TracedFile:
    """Return one of these programs, to be watched while it runs."""
    return TracedFile(Path(__file__).parent / name, f"guide/src/anybatch_guide/listings/{name}")
