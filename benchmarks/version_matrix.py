"""Versions of torch and Python that work: the fast tests and the exactness tests, in an environment for each.

```bash
make matrix                                     # all; writes benchmarks/results/matrix_cpu_<date>.md
make matrix ARGS="--python 3.11"                # every torch on this Python; writes the same
make matrix ARGS="--python 3.12 --torch 2.13"   # one of them; writes nothing
```

Every torch runs on the oldest Python, and the newest torch on every Python: what breaks with a version of torch seldom
depends on Python, and the whole table would take twelve environments of up to 6 GB each. They are kept in `.matrix/`,
so that a second run only tests; `make clean` removes them. A Python is looked for on the PATH and where pyenv keeps it.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".matrix"
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXACTNESS = (
    "tests/core",
    "tests/engine/test_exactness.py",
    "tests/engine/test_steps.py",
    "tests/engine/test_resume.py",
    "tests/engine/test_static_gradients.py",
    "tests/engine/test_two_pass.py",
    "tests/engine/test_compatibility.py",
)
FAST = ("tests/norms", "tests/data", "tests/events", "tests/checkpoints", "tests/parallel", "tests/memory")
INTERNALS = ("tests/core/test_torch_internals.py", "tests/planner/test_torch_internals.py")  # others are in FAST
MOST_NAMED = 12  # failures listed in the table; other failures usually share a cause


@dataclass(frozen=True, slots=True)
class Pair:
    """One row: a Python and a torch, such as 3.12 and 2.13."""

    python: str
    torch: str

    @property
    def folder(self) -> Path:
        """Path of its environment."""
        return ENVIRONMENTS / f"py{self.python}-torch{self.torch}"


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of a pair.

    Attributes:
        pair: the versions.
        versions: of Python and torch, in full.
        passed: number of passed tests.
        skipped: number of skipped tests, for lack of a GPU, for example.
        failed: names of failed tests, or errors that kept tests from running.
        seconds: time of the tests.
        missing: the reason why no test could run; empty if they ran.
    """

    pair: Pair
    versions: str = ""
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    missing: str = ""

    def __str__(self) -> str:
        """Return the row of the table."""
        if self.missing:
            return f"| {self.pair.python} | {self.pair.torch} | | | | | {self.missing} |"
        python, torch = self.versions.split()
        named = [*self.failed[:MOST_NAMED], *(["..."] if len(self.failed) > MOST_NAMED else [])]
        numbers = f"{self.passed:,} | {len(self.failed)} | {self.skipped} | {self.seconds / 60:.1f}"
        return f"| {python} | {torch} | {numbers} | {', '.join(named)} |"


def pairs(python: str | None, torch: str | None) -> list[Pair]:
    """Return the rows for the requested Python and torch versions, or all."""
    found = [Pair(PYTHONS[0], torch) for torch in TORCHES]
    found += [Pair(python, TORCHES[-1]) for python in PYTHONS[1:]]
    if python is not None and torch is not None:
        return [Pair(python, torch)]
    return [pair for pair in found if python in {None, pair.python} and torch in {None, pair.torch}]


def interpreter(python: str) -> str | None:
    """Return the path of a working Python of that minor version, or None."""
    known = [shutil.which(f"python{python}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    known += [str(path) for path in sorted(pyenv.glob(f"versions/{python}.*/bin/python"))]
    ask = [f"import sys; sys.exit(sys.version_info[:2] != ({python.replace('.', ', ')}))"]
    for path in known:
        if path and not subprocess.run([path, "-c", *ask], capture_output=True, check=False).returncode:
            return path
    return None


def environment(pair: Pair) -> tuple[Path | None, str]:
    """Create or reuse the environment of a pair; return its Python, or the reason for its absence."""
    program = pair.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    made = pair.folder / "made"
    if made.exists():
        return program, ""
    base = interpreter(pair.python)
    if base is None:
        return None, f"no Python {pair.python} on this machine"
    subprocess.run([base, "-m", "venv", str(pair.folder)], check=True)
    constraints = pair.folder / "constraints.txt"
    constraints.write_text(f"torch=={pair.torch}.*\n", encoding="utf-8")
    install = [str(program), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--constraint", str(constraints), "--editable", ".[test]", "--editable", "./guide"]
    done = subprocess.run([*install, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return None, last[-1].removeprefix("ERROR: ").replace("|", "/")
    made.touch()
    return program, ""


def tested(pair: Pair) -> Row:
    """Run the tests on a pair of versions."""
    program, missing = environment(pair)
    if program is None:
        return Row(pair, missing=missing)
    ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.run([program, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
    report = pair.folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", f"--junit-xml={report}"]
    begin = time.monotonic()
    done = subprocess.run(
        [program, "-m", "pytest", *options, *FAST, *INTERNALS, *EXACTNESS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - begin
    (pair.folder / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if not report.exists():
        return Row(pair, missing=f"pytest did not run: see {pair.folder.relative_to(ROOT)}/output.txt")
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 (pytest has just written it)
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = sorted({re.sub(r"^tests\.", "", f"{case.get('classname')}.{case.get('name')}") for case in bad})
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Row(pair, versions, len(cases) - len(bad) - skipped, skipped, tuple(names), seconds)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table in Markdown."""
    head = ["| Python | torch | passed | failed | skipped | minutes | what fails |", "|---|---|--:|--:|--:|--:|---|"]
    return [*head, *map(str, rows)]


def private_names(rows: Sequence[Row]) -> list[str]:
    """Return a table: the private names of torch that each folder uses, and the versions on which its tests pass."""
    versions = [row for row in rows if row.pair.python == PYTHONS[0] and not row.missing]
    lines = [
        "| folder | private names | " + " | ".join(row.pair.torch for row in versions) + " |",
        "|---|---|" + "---|" * len(versions),
    ]
    program, _ = environment(versions[0].pair)
    command = [str(program), str(ROOT / "benchmarks" / "private_names.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        folder, names = line.split(": ")
        passed = [not any(failed.startswith(f"{folder}.") for failed in row.failed) for row in versions]
        seen = " | ".join("yes" if each else "no" for each in passed)
        lines.append(f"| {folder} | {names} | {seen} |")
    return lines


def write(lines: Sequence[str]) -> Path:
    """Write the table with its date and tests."""
    today = datetime.now(tz=UTC).date()
    path = ROOT / "benchmarks" / "results" / f"matrix_cpu_{today}.md"
    head = [
        "# On which versions of torch and Python the tests pass",
        "",
        f"{today}, {platform.machine()} CPU, {os.cpu_count()} cores.",
        f"The tests of {', '.join((*FAST, *INTERNALS))} and, for exactness, of {', '.join(EXACTNESS)}.",
        "",
        "`make matrix`",
        "",
    ]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Test all pairs in sequence; fail if a test failed anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=PYTHONS, help="only this one")
    parser.add_argument("--torch", choices=TORCHES, help="only this one")
    given = parser.parse_args()
    rows = []
    for pair in pairs(given.python, given.torch):
        rows.append(tested(pair))
        print(rows[-1], flush=True)
    print("\n".join(["", *table(rows)]))
    if given.torch is None and given.python in {None, PYTHONS[0]}:
        names = [
            "",
            "Private names of torch, and whether the tests of the folder that uses them pass:",
            "",
            *private_names(rows),
        ]
        print(f"\nwritten to {write([*table(rows), *names]).relative_to(ROOT)}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
