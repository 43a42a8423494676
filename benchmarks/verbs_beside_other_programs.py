"""Conclusions of `tune`, `scale`, `scale --forecast` and `compare`: alone, and next to busy programs.

    python benchmarks/verbs_beside_other_programs.py [--runs 10] [--programs 2]

Idle and busy runs alternate, so run it on a machine without other work; while a busy run lasts, other processes
compute in a loop. A conclusion is wrong if it contradicts all idle ones. A number is impossible if a time, a memory
size or a speed is negative, or if a share is above 1.
"""

import json
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import report

_VERBS = {
    "tune": "tune digits",
    "scale": "scale digits --ranks 2",
    "forecast": "scale digits --forecast 64 --link 10Gbit,50us",
    "compare": "compare digits",
}
_BUSY = "other programs"


def _loop() -> None:
    while True:
        sum(range(10**6))


def _result(words: str, programs: int) -> dict[str, Any]:
    """Return the JSON of a verb that runs next to some busy programs."""
    others = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(programs)]
    for other in others:
        other.start()
    command = [sys.executable, "-m", "anybatch", *words.split(), "--json", "--quiet"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    finally:
        for other in others:
            other.terminate()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _conclusions(verb: str, found: dict[str, Any]) -> frozenset[str]:
    """Return what the verb recommends or names, as text; `_BUSY` if it only names other programs, empty if nothing."""
    if verb == "scale":
        cause = next(iter(found["causes"]), {"code": "", "change": ""})
        return frozenset({_BUSY if _BUSY in cause["change"] or not cause["code"] else cause["code"]})
    if found["doubt"]:
        return frozenset({_BUSY}) if _BUSY in found["doubt"] else frozenset()
    if verb == "compare":
        return frozenset(each["way"]["name"] for each in found["fastest"])
    return frozenset({str(found["recommended" if verb == "tune" else "largest_useful"])})


def _impossible(found: object, name: str = "") -> Iterator[str]:
    """Yield the impossible numbers of a result, with their keys; intervals of differences may be negative."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from () if key in ("exposed", "low", "longer") else _impossible(value, f"{name}.{key}")
    elif isinstance(found, list):
        for value in found:
            yield from _impossible(value, name)
    elif isinstance(found, float) and (found < 0.0 or ("share" in name and found > 1.0)):
        yield f"{name} = {found:.3g}"


def main() -> None:
    """Run every verb many times, idle and busy, and print how often it concluded what."""
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of each verb, idle and busy")
    parser.add_argument("--programs", type=int, default=2, help="busy programs")
    args = parser.parse_args()
    lines = [
        "| verb | machine | concluded | conclusions | contradictions | impossible numbers |",
        "|---|---|--:|---|--:|--:|",
    ]
    for verb, words in _VERBS.items():
        runs: dict[str, list[dict[str, Any]]] = {"idle": [], "busy": []}
        for _ in range(args.runs):
            for state, found in runs.items():
                found.append(_result(words, args.programs * (state == "busy")))
        drawn = {state: [_conclusions(verb, each) for each in found] for state, found in runs.items()}
        known = frozenset().union(*drawn["idle"])
        for state, found in runs.items():
            clear = [each for each in drawn[state] if each - {_BUSY}]
            wrong = [each for each in clear if not each & known]
            counted = Counter(" = ".join(sorted(each)) or "nothing" for each in drawn[state])
            texts = "; ".join(f"{text} ({number})" for text, number in counted.most_common())
            odd = [text for each in found for text in _impossible(each)]
            lines.append(f"| {verb} | {state} | {len(clear)} of {args.runs} | {texts} | {len(wrong)} | {len(odd)} |")
            print(lines[-1], *odd, sep="\n")
    report.publish(
        lines,
        title="Conclusions beside other programs",
        command=f"python benchmarks/verbs_beside_other_programs.py --runs {args.runs} --programs {args.programs}",
        setting="idle and busy runs alternate",
        out=args.out,
    )


if __name__ == "__main__":
    main()
