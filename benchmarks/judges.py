"""The judges on a collection: loops rewritten from public repositories, and setups with known faults.

`check_loop` judges the loops of tests/diagnostics/published_loops.py and more_loops.py in a folder with files of a
user's, all of which are compared afterwards. A false alarm is a finding in the gradients of a loop that is right; a
miss is a wrong loop without its required finding. `check` judges the setups of tests/diagnostics/faulty.py: it must
report the code and place of each fault, and report the other setups as equal.

    python benchmarks/judges.py [--out benchmarks/results/NAME.md]
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import report

import anybatch as ab
from anybatch.diagnostics import check_loop
from anybatch.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1]))  # the loops and setups come from the tests
from tests.diagnostics import more_loops, published_loops
from tests.diagnostics.faulty import FAULTS, HELD
from tests.diagnostics.test_check import HEALTHY

NUM_RIGHT_SETUPS = 8


def loops_table(files: dict[str, str]) -> Iterator[str]:
    """Yield the table of loops, and the number of wrong judgments."""
    collection = published_loops.PUBLISHED | more_loops.MORE
    loops = {loop.__name__: (loop, *known) for loop, known in collection.items()}
    alarms = misses = refused = touched = 0
    rows = ["| loop | rewritten from | must be found | verdict | found |", "|---|---|---|---|---|"]
    for name, (loop, source, codes) in loops.items():
        try:
            found = check_loop(loop)
        except UserError as error:
            refused += 1
            rows.append(f"| {name} | {source} | {', '.join(sorted(codes))} | refused: {str(error)[-80:]} | |")
            continue
        in_gradient = {one.code for one in found.findings if one.in_gradient}
        alarms += bool(in_gradient and not codes)
        misses += bool(codes - found.codes)
        cells = (name, source, ", ".join(sorted(codes)) or "nothing", found.verdict, ", ".join(sorted(found.codes)))
        rows.append(f"| {' | '.join(cells)} |")
        touched += files != contents()
    yield f"{len(loops)} loops, {sum(not codes for _, _, codes in loops.values())} of them right."
    yield f"False alarms {alarms}, misses {misses}, refused {refused}, files touched {touched}."
    yield ""
    yield from rows


def contents() -> dict[str, str]:
    """Return the files of the working folder."""
    return {path.as_posix(): path.read_text(encoding="utf-8") for path in sorted(Path().rglob("*")) if path.is_file()}


def setups_table() -> Iterator[str]:
    """Yield the table of setups, and the number of correct ones."""
    wrong, named, equal = 0, 0, 0
    rows = ["| setup | fault | named | where | right |", "|---|---|---|---|---|"]
    for name, fault in FAULTS.items():
        found = ab.check(fault.subject.model(), fault.subject.loss(), fault.subject.batch())
        breaking = [(one.code, one.where) for one in found.findings if one.breaks_equality]
        is_right = breaking == [(fault.code, fault.where)] and any(fault.change in one.change for one in found.findings)
        wrong, named = wrong + 1, named + is_right
        shown = ", ".join(f"{code} | {where or '-'}" for code, where in breaking) or "nothing | -"
        rows.append(f"| {name} | {fault.code} | {shown} | {'yes' if is_right else 'no'} |")
    right = {**HELD, **dict(list(HEALTHY.items())[:: len(HEALTHY) // (NUM_RIGHT_SETUPS - len(HELD))])}
    right = dict(list(right.items())[:NUM_RIGHT_SETUPS])
    for name, subject in right.items():
        found = ab.check(subject.model(), subject.loss(), subject.batch())
        equal += found.equal
        rows.append(f"| {name} | none | {found.verdict} | - | {'yes' if found.equal else 'no'} |")
    yield f"{wrong + len(right)} setups, {wrong} of them wrong."
    yield f"Causes named, with place and change, {named} of {wrong}; right ones found equal {equal} of {len(right)}."
    yield ""
    yield from rows


def main() -> None:
    """Judge both, and write the tables."""
    given = report.parser(__doc__).parse_args()
    out = None if given.out is None else given.out.resolve()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("best.pt", "history.csv", "checkpoint.pt"):
            Path(name).write_text("a user's", encoding="utf-8")
        lines = ["## Loops", "", *loops_table(contents()), "", "## Setups", "", *setups_table()]
        os.chdir(before)
    report.publish(
        lines,
        title="Judges on loops from public repositories and on setups with known faults",
        command="python benchmarks/judges.py",
        setting="two epochs of each loop; 12 samples of each setup in float64",
        out=out,
    )


if __name__ == "__main__":
    main()
