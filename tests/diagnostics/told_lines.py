"""A file to which other processes write their progress messages, for tests."""

from pathlib import Path


def note_in(file: Path, words: str) -> None:
    """Append a line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{words}\n")
