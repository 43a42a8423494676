"""Reproduce recordings with their commands, and report differences.

python -m guide.tests.recorded_again              all of them, in almost an hour
python -m guide.tests.recorded_again claims_ walk recordings whose names contain one of these
"""

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from anybatch_guide.catalogue import experiments
from anybatch_guide.recording import differences, read_recording
from tests.architecture.source_tree import ROOT

RECORDINGS = ROOT / "guide" / "web" / "recordings"


def made_again(name: str, folder: Path) -> list[str]:
    """Run the command in a recording, and return the differences from the committed one.

    Noisy values, mostly times, may differ; numbers may differ within the experiment's tolerance.
    """
    committed = read_recording(RECORDINGS / f"{name}.json")
    words = [*shlex.split(committed.made.command), "--to", str(folder)]
    assert words[0] == "anybatch"
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)  # noqa: S603 (our own)
    made = read_recording(folder / f"{name}.json")
    experiment = experiments()[name]
    return differences(committed.data, made.data, tolerance=experiment.tolerance, noisy=experiment.noisy)


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
