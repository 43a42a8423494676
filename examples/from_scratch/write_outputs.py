"""Run the programs and write their outputs into the blocks of README.md.

python examples/from_scratch/write_outputs.py        all of them
python examples/from_scratch/write_outputs.py 03 05  only those whose names start with 03 or 05
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
BLOCK = re.compile(r"(^### (?P<name>\w+\.py)$.*?^```text\n)(?P<text>.*?)(?=^```$)", flags=re.MULTILINE | re.DOTALL)
TIME_LIMIT_SECONDS = 300


def shown(page: str) -> dict[str, str]:
    """Return the expected output of each program, read from a page."""
    return {match["name"]: match["text"] for match in BLOCK.finditer(page)}


def with_outputs(page: str, printed: dict[str, str]) -> str:
    """Return the page with the new outputs in its blocks."""
    return BLOCK.sub(lambda match: match[1] + printed.get(match["name"], match["text"]), page)


def run(program: str) -> str:
    """Return the output of a program.

    Raises:
        subprocess.SubprocessError: the program fails or exceeds the time limit.
    """
    command = [sys.executable, str(FOLDER / program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=True).stdout


def main(beginnings: Sequence[str]) -> None:
    """Run programs and write the page; a failure leaves the page unchanged."""
    page = PAGE.read_text(encoding="utf-8")
    chosen = [name for name in shown(page) if not beginnings or name.startswith(tuple(beginnings))]
    printed = {}
    for name in chosen:
        printed[name] = run(name)
        print(f"{name}\n{printed[name]}", flush=True)
    PAGE.write_text(with_outputs(page, printed), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
