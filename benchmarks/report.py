"""Print the table of a benchmark, and write it to a file with date, versions and machine."""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch

Kept = TypeVar("Kept")


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that all benchmarks have."""
    made = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="file to write the table to, in Markdown")
    return made


def device_name() -> str:
    """Return the hardware and versions as text."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU"


def kept(path: Path | None, key: str, make: Callable[[], Kept]) -> Kept:
    """Return the result under a key of a JSON file; if it is missing, make it and store it there.

    So a long benchmark can be run in parts.
    """
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if key not in known:
        known[key] = make()
        if path is not None:
            path.write_text(json.dumps(known))
    found: Kept = known[key]
    return found


def publish(lines: Sequence[str], *, title: str, command: str, setting: str, out: Path | None) -> None:
    """Print the lines, and write them to `out` under a heading with their source."""
    print("\n".join(lines))
    if out is None:
        return
    today = datetime.now(tz=UTC).date()
    head = [
        f"# {title}",
        "",
        f"{today}, torch {torch.__version__}, {device_name()}, {setting}.",
        "",
        f"`{command}`",
        "",
    ]
    out.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
