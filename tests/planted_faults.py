"""Plant the faults declared next to tests (`tests/faults.py`) one by one, and check that those tests fail.

python -m tests.planted_faults                    all faults
python -m tests.planted_faults clip resume        faults with one of these words in their name
python -m tests.planted_faults --stale            only list faults whose text has left its file
python -m tests.planted_faults --seconds 60       random faults until the time is up; for CI
        --seed 7                                  repeat an earlier random order

Each fault is planted in a copy of the project in a temporary folder, where its tests run under a time limit. Unless
faults are drawn at random, all tests first run in an unchanged copy, where they must pass: a test that always fails
detects nothing.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.architecture.source_tree import ROOT
from tests.faults import Fault, StaleFaultError, faulty, read_faults

COPIED = ("src", "tests", "examples", "guide", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("node_modules")
TIME_LIMIT_SECONDS = 240.0  # a fault may make a test hang
UNTOUCHED_LIMIT_SECONDS = 3600.0
HUNG = "still waiting after"
CONSEQUENCE = "has ruined the"  # ranks lost earlier say nothing about the fault


def plant(fault: Fault, project: Path) -> None:
    """Plant a fault in its file.

    Raises:
        StaleFaultError: its text does not occur exactly once.
    """
    path = project / fault.file
    path.write_text(faulty(path.read_text(encoding="utf-8"), fault), encoding="utf-8")


def copy_project(target: Path) -> None:
    """Copy the files that tests need, including compiled ones, whose time stamps show changes."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=LEFT_OUT)
        else:
            shutil.copy2(source, target / name)


def failed_tests(
    project: Path, tests: Sequence[str], limit_seconds: float = TIME_LIMIT_SECONDS
) -> tuple[set[str], str]:
    """Run tests in a project; return the failed ones and pytest's output."""
    report = project / "outcome.xml"
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    sources = os.pathsep.join(str(project / folder) for folder in ("src", "guide/src"))
    environment = {**os.environ, "PYTHONPATH": sources, "CI": "1"}  # CI: Hypothesis tries fixed examples
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
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        output = process.communicate()[0] + f"\n{HUNG} {limit_seconds:.0f} seconds"
    if not report.exists():
        return set(), output
    return {name for name, failed in _outcomes(report) if failed}, output


def _outcomes(report: Path) -> list[tuple[str, bool]]:
    found = []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 (pytest has just written it)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        reasons = [*case.iter("failure"), *case.iter("error")]
        text = "".join((reason.get("message") or "") + (reason.text or "") for reason in reasons)
        found.append((name, bool(reasons) and CONSEQUENCE not in text))
    return found


def undetected(tests: Sequence[str], failed: set[str]) -> list[str]:
    """Return the tests that did not fail."""
    failed = failed | {name.partition("[")[0] for name in failed}
    return [test for test in tests if test not in failed]


def check_fault(fault: Fault) -> bool:
    """Plant a fault and return whether its tests failed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
        project = Path(folder)
        copy_project(project)
        plant(fault, project)
        failed, output = failed_tests(project, fault.tests)
    hung = HUNG in output and pass_untouched(fault.tests)
    passed = [] if hung else undetected(fault.tests, failed)
    verdict = "NOT DETECTED" if passed else "tests hang" if hung else "detected"
    _print(f"{verdict:16}  {fault.name}  ({time.monotonic() - start:.0f} s)")
    if passed:
        _print(f"    {fault.place}")
        _print("\n".join([f"    by {test}" for test in passed] + [f"    | {x}" for x in output.splitlines()[-12:]]))
    return not passed


def pass_untouched(tests: Sequence[str], limit_seconds: float = TIME_LIMIT_SECONDS) -> bool:
    """Return whether tests pass without a fault, and print failures."""
    with tempfile.TemporaryDirectory(prefix="no-fault-") as folder:
        copy_project(Path(folder))
        failed, output = failed_tests(Path(folder), tests, limit_seconds)
    if failed or " passed" not in output:
        _print(f"without any fault, these tests fail already: {sorted(failed)}\n{output[-2000:]}")
        return False
    return True


def check_all(table: Sequence[Fault]) -> bool:
    """Plant every fault, after all their tests passed without any."""
    tests = sorted({test for fault in table for test in fault.tests})
    return pass_untouched(tests, UNTOUCHED_LIMIT_SECONDS) and _summed_up(check_fault(fault) for fault in table)


def check_some(table: Sequence[Fault], seconds: float, seed: int) -> bool:
    """Plant random faults until the time is up; equal seeds give the same order."""
    _print(f"planting faults for {seconds:.0f} seconds; the same ones again: --seconds {seconds:.0f} --seed {seed}")
    drawn = random.Random(seed).sample(table, len(table))
    end = time.monotonic() + seconds
    return _summed_up(check_fault(fault) for fault in _until(end, drawn))


def stale(table: Sequence[Fault]) -> list[str]:
    """Describe each fault that cannot be planted, with the files that now have its text."""
    names = [path.relative_to(ROOT) for name in COPIED for path in (ROOT / name).rglob("*.py")]
    texts = {name.as_posix(): (ROOT / name).read_text(encoding="utf-8") for name in names if "tests" not in name.parts}
    found = []
    for fault in table:
        try:
            faulty(texts.get(fault.file, ""), fault)
        except StaleFaultError as error:
            elsewhere = [name for name, text in texts.items() if text.count(fault.old) == 1 and name != fault.file]
            found.append(f"{error} It occurs in {elsewhere or 'no other file'}.\n{fault.old}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Plant all faults, or those selected by name or drawn; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args(arguments)
    table = [fault for fault in read_faults(ROOT) if not given.words or any(word in fault.name for word in given.words)]
    if given.stale:
        found = stale(table)
        _print("\n".join([*found, f"{len(found)} of {len(table)} faults are stale"]))
        return int(bool(found))
    good = check_all(table) if given.seconds is None else check_some(table, given.seconds, given.seed)
    return int(not good)


def _until(end: float, table: Iterable[Fault]) -> Iterator[Fault]:
    for fault in table:
        if time.monotonic() > end:
            return
        yield fault


def _summed_up(outcomes: Iterable[bool]) -> bool:
    seen = list(outcomes)
    _print(f"{sum(seen)} of {len(seen)} faults were seen")
    return all(seen)


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 (a script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
