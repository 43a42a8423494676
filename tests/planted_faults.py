"""Plants the faults of `planted_faults.toml` one by one, and sees the tests that are there for them fail.

python -m tests.planted_faults                    all of them; writes docs/planted_faults.md if every one was seen
python -m tests.planted_faults clip resume        those with one of these words in their name

Each fault goes into a copy of the project in a temporary folder, where its tests run under a time limit. Before that
all tests run once in an untouched copy, where they must pass: a test that always fails sees nothing.
"""

import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.architecture.source_tree import ROOT

TABLE = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "planted_faults.md"
COPIED = (
    "src",
    "tests",
    "guide/src",
    "guide/tests",
    "guide/web/recordings",
    "guide/web/tests",
    "examples",
    "conftest.py",
    "pyproject.toml",
)
TIME_LIMIT_SECONDS = 240.0  # a fault may make a test wait for ever
UNTOUCHED_LIMIT_SECONDS = 3600.0
CONSEQUENCE = "has ruined the"  # a test of ranks that were lost before it says nothing about the fault
HEAD = """\
# Planted faults

A test that cannot fail proves nothing.
Each of these faults was planted into a copy of the project, and every test named beside it failed there.
Without the faults all of these tests pass.

```bash
python -m tests.planted_faults
```

writes this page, if every fault is seen.
The faults are in `tests/planted_faults.toml`; a test holds that their places and tests are still there.

| fault | in the code | seen by |
|---|---|---|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: in `file`, `old` (which stands there exactly once) becomes `new`, and every one of `tests` must fail.

    A test without parameters in its name fails if it does with any of them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def difference(self) -> str:
        """Return the lines that differ, as a cell of a table."""
        lines = difflib.ndiff(self.old.strip("\n").splitlines(), self.new.strip("\n").splitlines())
        changed = [line[0] + " " + line[2:].strip() for line in lines if line[0] in "+-" and line[2:].strip()]
        return "<br>".join(f"`{line}`" for line in [self.file, *changed]).replace("|", "\\|")


class StaleFaultError(Exception):
    """The text that a fault replaces does not stand in its file exactly once."""


def faults() -> tuple[Fault, ...]:
    """Return the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["fault"]
    return tuple(Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def plant(fault: Fault, project: Path) -> None:
    """Change the file.

    Raises:
        StaleFaultError: its text is not there exactly once.
    """
    path = project / fault.file
    source = path.read_text(encoding="utf-8")
    if (found := source.count(fault.old)) != 1:
        message = f"{fault.name!r} replaces a text that stands {found} times in {fault.file}; bring it up to date."
        raise StaleFaultError(message)
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")


def copy_project(target: Path) -> None:
    """Copy what tests need, compiled files too: their time stamps say which one is not what it was."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        else:
            shutil.copy2(source, target / name)


def failed_tests(
    project: Path, tests: Sequence[str], limit_seconds: float = TIME_LIMIT_SECONDS
) -> tuple[set[str], str]:
    """Run tests in a project; return which failed, and the end of what pytest said."""
    told = project / "outcome.xml"
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={told}"]
    sources = os.pathsep.join(str(project / name) for name in ("src", "guide/src"))
    environment = {**os.environ, "PYTHONPATH": sources, "CI": "1"}  # CI: Hypothesis always tries the same
    process = subprocess.Popen(  # noqa: S603 (our own tests)
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        said = process.communicate()[0] + f"\nended after {limit_seconds} seconds"
    if not told.exists():
        return set(), said
    return {name for name, failed in _outcomes(told) if failed}, said


def _outcomes(told: Path) -> list[tuple[str, bool]]:
    found = []
    for case in ET.parse(told).iter("testcase"):  # noqa: S314 (pytest has just written it)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        reasons = [*case.iter("failure"), *case.iter("error")]
        said = "".join((reason.get("message") or "") + (reason.text or "") for reason in reasons)
        found.append((name, bool(reasons) and CONSEQUENCE not in said))
    return found


def unseen(tests: Sequence[str], failed: set[str]) -> list[str]:
    """Return the tests that are not among those that failed."""
    failed = failed | {name.partition("[")[0] for name in failed}
    return [test for test in tests if test not in failed]


def see(fault: Fault) -> bool:
    """Plant a fault and say whether its tests failed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
        project = Path(folder)
        copy_project(project)
        plant(fault, project)
        failed, said = failed_tests(project, fault.tests)
    passed = unseen(fault.tests, failed)
    verdict = "NOT SEEN" if passed else "failed as wanted"
    print(f"{verdict:16}  {fault.name}  ({time.monotonic() - start:.0f} s)", flush=True)  # noqa: T201 (a script)
    if passed:
        print("\n".join([f"    by {test}" for test in passed] + [f"    | {x}" for x in said.splitlines()[-12:]]))  # noqa: T201
    return not passed


def page(table: Sequence[Fault]) -> str:
    """Return the page of the docs."""
    rows = (
        f"| {fault.name} | {fault.difference} | " + "<br>".join(_short(test) for test in fault.tests) + " |"
        for fault in table
    )
    return HEAD + "\n".join(rows) + "\n"


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return f"`{path.removeprefix('tests/').removesuffix('.py')}`: `{name.removeprefix('test_')}`"


def main(words: Sequence[str]) -> int:
    """See all faults, or those named; return the exit status."""
    table = [fault for fault in faults() if not words or any(word in fault.name for word in words)]
    tests = sorted({test for fault in table for test in fault.tests})
    with tempfile.TemporaryDirectory(prefix="no-fault-") as folder:
        copy_project(Path(folder))
        failed, said = failed_tests(Path(folder), tests, UNTOUCHED_LIMIT_SECONDS)
    if failed or " passed" not in said:
        print(f"without any fault, these fail already: {sorted(failed)}\n{said[-2000:]}")  # noqa: T201
        return 1
    seen = [see(fault) for fault in table]
    print(f"{sum(seen)} of {len(seen)} faults were seen, by {len(tests)} tests")  # noqa: T201
    if all(seen) and not words:
        PAGE.write_text(page(table), encoding="utf-8")
    return 0 if all(seen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
