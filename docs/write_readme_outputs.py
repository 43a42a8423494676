"""Run the README's commands and update their outputs in the README: `python docs/write_readme_outputs.py`.

Every fenced `console` block starts with a line `$ command`; this program replaces the lines after it by the command's
output. The commands run one after another in one temporary folder, with the Python that runs this program.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(```console\n)\$ (?P<command>[^\n]+)\n(?P<output>.*?)(```\n)", re.DOTALL)
SECONDS = 300


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the commands of a page, each with its output on the page."""
    return [(found["command"], found["output"]) for found in BLOCK.finditer(page)]


def printed_by(command: str, folder: Path) -> str:
    """Return what a command prints in a folder, to standard output and standard error."""
    program, *words = shlex.split(command.removesuffix("2>/dev/null"))
    assert program == "anybatch", f"{command!r} must begin with anybatch"
    done = subprocess.run(
        [sys.executable, "-m", "anybatch", *words],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if command.endswith("2>/dev/null") else subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.stdout


def rewritten(page: str, folder: Path) -> str:
    """Return a page with the current outputs of its commands."""
    return BLOCK.sub(
        lambda found: f"{found[1]}$ {found['command']}\n{printed_by(found['command'], folder)}{found[4]}", page
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        README.write_text(rewritten(README.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
