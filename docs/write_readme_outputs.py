"""Run the README's commands and write down what they print: `python docs/write_readme_outputs.py`.

Every fenced block of the kind `console` has a line `$ command`; what follows it is replaced by what the command prints.
The commands run one after the other in one empty folder, with the `anybatch` of the Python that runs this.
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
    """Return the commands of a page, each with the output that stands below it."""
    return [(found["command"], found["output"]) for found in BLOCK.finditer(page)]


def printed_by(command: str, folder: Path) -> str:
    """Return what a command prints in a folder, to both of its outputs."""
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
    """Return a page with the outputs of its commands as they are printed now."""
    return BLOCK.sub(
        lambda found: f"{found[1]}$ {found['command']}\n{printed_by(found['command'], folder)}{found[4]}", page
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        README.write_text(rewritten(README.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")
