"""One rank misbehaves in over a hundred ways under each strategy: do all ranks end soon, with the right reason?

Each case runs five steps, a save, an evaluation and a load on two or three forked gloo ranks. One rank raises, dies, is
late, makes different calls, builds something different, or has different data. The correct result is an end within 60
seconds with an error that names the cause on every rank, or the same weights on all ranks.

    python benchmarks/misbehaving_ranks.py [WORD ...] [--strategy NAME ...] [--jobs 2] [--out FILE]
"""

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import report

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the cases, which tests use too

import anybatch as ab
from tests.engine.misbehaving_ranks import Misbehaviour, Strategy, Verdict, run_case
from tests.engine.misbehaviours import all_misbehaviours

KINDS = ("right", "hang", "raw error", "wrong reason", "numbers")


def run_named(name: str, strategy: Strategy, deadline_seconds: float) -> Verdict:
    """Run a case, and print its failures."""
    verdict = run_case(all_misbehaviours()[name], strategy, deadline_seconds=deadline_seconds)
    if verdict.kind != "right":
        lines = [f"{verdict.kind}: {name}, {strategy}"]
        for rank, ending in enumerate(verdict.endings):
            lines.append(f"    rank {rank} after {ending.seconds:.1f} s: {ending.text[:400]!r}")
            lines += [f"        survived {survived[:200]!r}" for survived in ending.survived]
        print("\n".join(lines), flush=True)
    return verdict


def main() -> None:
    """Run the selected cases, and print a table."""
    parser = report.parser(__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of cases to run; none: all")
    parser.add_argument("--strategy", nargs="*", default=list(get_args(Strategy)))
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds after which a rank counts as hanging")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    cases: list[tuple[Misbehaviour, Strategy]] = [
        (case, strategy)
        for name, case in all_misbehaviours().items()
        if not arguments.words or any(word in name for word in arguments.words)
        for strategy in case.strategies
        if strategy in arguments.strategy
    ]
    begun = time.monotonic()
    # Each worker forks its ranks, so it must not have threads.
    with ProcessPoolExecutor(arguments.jobs, get_context("fork")) as executor:
        names, strategies = [case.name for case, _ in cases], [strategy for _, strategy in cases]
        verdicts = list(executor.map(run_named, names, strategies, repeat(arguments.deadline)))
    longest = max(ending.seconds for verdict in verdicts for ending in verdict.endings)
    lines = [f"| strategy | ways | {' | '.join(KINDS)} |", "|---" * (2 + len(KINDS)) + "|"]
    for strategy in arguments.strategy:
        counts = Counter(v.kind for v, (_, one) in zip(verdicts, cases, strict=True) if one == strategy)
        lines.append(f"| {strategy} | {counts.total()} | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
    lines += ["", f"The longest case took {longest:.1f} s, all together {time.monotonic() - begun:.0f} s."]
    report.publish(
        lines,
        title="One rank misbehaves",
        command=f"python benchmarks/misbehaving_ranks.py {' '.join(arguments.words)}".strip(),
        setting=f"anybatch {ab.__version__}, gloo, {arguments.jobs} cases at a time",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
