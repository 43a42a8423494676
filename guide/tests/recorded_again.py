"""Reproduce recordings with their commands, and report differences.

python -m guide.tests.recorded_again              all of them, in almost an hour
python -m guide.tests.recorded_again claims_ walk recordings whose names contain one of these
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anybatch_guide.catalogue import experiments
from anybatch_guide.experiment import Data
from tests.architecture.source_tree import ROOT

RECORDINGS = ROOT / "guide" / "web" / "recordings"
ROUNDING = 1e-14
"""Numbers below this are rounding errors in float64, whose digits depend on the processor."""


def recording(name: str, folder: Path = RECORDINGS) -> Any:
    """Return a recording as a JSON object."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def differences(one: Data, other: Data, *, tolerance: float = 0.0, noisy: tuple[str, ...] = ()) -> list[str]:
    """Return descriptions of the differences between two recordings; empty if they are equal within the tolerance."""
    return list(_differences("data", one, other, tolerance, noisy))


def _differences(path: str, one: object, other: object, tolerance: float, noisy: tuple[str, ...]) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                yield f"{path}.{name} is only in one of them"
            elif name not in noisy:
                yield from _differences(f"{path}.{name}", one[name], other[name], tolerance, noisy)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{path}[{number}]", first, second, tolerance, noisy)
    elif isinstance(one, int | float) and isinstance(other, int | float):
        larger = max(abs(one), abs(other))
        if larger > ROUNDING and abs(one - other) > tolerance * larger:
            yield f"{path}: {one!r} and {other!r}"
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


def made_again(name: str, folder: Path) -> list[str]:
    """Run the command in a recording, and return the differences from the committed one.

    Noisy values, mostly times, may differ; numbers may differ within the experiment's tolerance.
    """
    committed = recording(name)
    words = [*shlex.split(committed["made"]["command"]), "--to", str(folder)]
    assert words[0] == "anybatch"
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)  # noqa: S603 (our own)
    made = recording(name, folder)
    experiment = experiments()[name]
    return differences(committed["data"], made["data"], tolerance=experiment.tolerance, noisy=experiment.noisy)


def main(words: Sequence[str]) -> int:
    """Reproduce them; return 0 if nothing differs."""
    names = [name for name in experiments() if not words or any(word in name for word in words)]
    same = 0
    for name in names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = made_again(name, Path(folder))
        same += not found
        print(f"{name}: {'; '.join(found[:5]) or 'the same'} ({time.monotonic() - start:.0f} s)", flush=True)  # noqa: T201
    print(f"{same} of {len(names)} were reproduced")  # noqa: T201 (a script)
    return int(same != len(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
