"""Where other processes write down what they are about to do, for tests that read it."""

from pathlib import Path


def note_in(file: Path, words: str) -> None:
    """Write a line behind the others."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{words}\n")
