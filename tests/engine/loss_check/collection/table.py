"""Print the verdicts of the loss check on all setups: `python -m tests.engine.loss_check.collection.table [WORD]...`.

Words select setups by name and print their diagnosis, too. `--check` also runs `ab.check`.
"""

import sys
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from typing import Any

import torch

import anybatch as ab
from tests.engine.loss_check.collection import (
    right,
    right_forms,
    right_habits,
    right_models,
    transformers_models,
    wrong,
    wrong_habits,
)
from tests.engine.loss_check.collection.setups import built, check

WRONG: dict[str, Any] = {**wrong.TABLE.setups, **transformers_models.WRONG.setups}
RIGHT: dict[str, Any] = {
    **right.TABLE.setups,
    **right_models.TABLE.setups,
    **right_forms.TABLE.setups,
    **transformers_models.RIGHT.setups,
}
WRONG_HABITS: dict[str, Any] = wrong_habits.TABLE.setups
RIGHT_HABITS: dict[str, Any] = right_habits.TABLE.setups
GROUPS: dict[str, dict[str, Any]] = {
    "wrong": WRONG,
    "wrong, habits": WRONG_HABITS,
    "right": RIGHT,
    "right, habits": RIGHT_HABITS,
}
UNDECIDED: dict[str, str] = {
    "NaN-safe mean over positives": "not finite",
    "mixup by numpy": "numpy",
    "running margin in a number of Python": "Python",
    "checkpointing, reentrant": "use_reentrant",
    "pairs of neighbours that broadcast": "even sizes agree",
    "transformers: Wav2Vec2 with masks of numpy": "numpy",
}
"""Setups whose verdict is "undecided", with a word of the reason; the engine refuses reentrant checkpointing."""


def expected(group: str, name: str) -> str:
    """Return the expected verdict of a setup."""
    return "undecided" if name in UNDECIDED else "broken" if group.startswith("wrong") else "holds"


def is_there(setup: Any) -> bool:
    """Whether the package that a setup needs is installed."""
    return not setup.needs or find_spec(setup.needs) is not None


def main(arguments: list[str]) -> None:
    """Run all setups, or those whose names contain a word."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asks_check = "--check" in arguments
    words = [word for word in arguments if word != "--check"]
    for group, setups in GROUPS.items():
        begun, verdicts, others = time.perf_counter(), Counter[str](), Counter[str]()
        for name, setup in setups.items():
            if (words and not any(word in name for word in words)) or not is_there(setup):
                continue
            for dtype in setup.dtypes:
                verdict, found = check(setup, dtype, diagnoses=bool(words))
                kind = f"{verdict.kind}{' (nothing to compare)' * verdict.is_harmless}"
                verdicts[kind] += 1
                if words or kind != expected(group, name):
                    print(f"  {name} ({dtype}): {kind} {verdict.error:.1e} {verdict.reason}", flush=True)  # noqa: T201
                    if found is not None:
                        print(f"    {found.cause}: {found.fault} {found.remedy}", flush=True)  # noqa: T201
            if asks_check:
                others[asked(group, name, setup)] += 1
        seconds = time.perf_counter() - begun
        line = f"{group}: {len(setups)} setups, {dict(verdicts)}, {seconds:.0f} s"
        print(line + (f"; ab.check: {dict(others)}" if asks_check else ""), flush=True)  # noqa: T201


def asked(group: str, name: str, setup: Any) -> str:
    """Return the verdict of `ab.check`, and print it if it is not expected."""
    model, loss, batch = built(setup, setup.dtypes[0])
    try:
        report = ab.check(model, loss, batch)
    except Exception as error:  # noqa: BLE001 (some setups cannot be copied or cut)
        print(f"  ab.check of {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)  # noqa: T201
        return type(error).__name__
    if report.equal == group.startswith("wrong"):
        codes = [finding.code for finding in report.findings]
        print(f"  ab.check of {name}: {report.verdict} {codes}", flush=True)  # noqa: T201
    return "equal" if report.equal else "not equal"


if __name__ == "__main__":
    main(sys.argv[1:])
