"""A preview of a long log: a few steps from positions across the file."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from anybatch.events.log_lines import JsonLine, decoded_line
from anybatch_guide.watch.curve import FARTHEST, plain
from anybatch_guide.watch.fields import integer, number

MIN_BYTES: Final = 32 * 2**20
"""Shorter logs are read in about the same time."""
NUM_PLACES: Final = 200
_PLACE_BYTES: Final = 1 << 16
_STEP: Final = b'"kind":"step"'


def sketched(path: Path, size: int) -> dict[str, Any] | None:
    """Return about `NUM_PLACES` steps of a log as points of a curve; None without a usable preview.

    Samples are estimated: all steps are assumed to have the same number. Logs with repeated steps or a changed clock
    have no usable preview.
    """
    try:
        rows = list(_found(path, size))
    except OSError:
        return None
    steps = [step for step, *_ in rows]
    seconds = [at for *_, at in rows]
    is_in_order = all(a < b for a, b in itertools.pairwise(steps)) and seconds == sorted(seconds)
    if len(rows) < NUM_PLACES // 4 or not is_in_order:
        return None
    return {
        "step": [min(step, FARTHEST) for step in steps],
        "samples": [min((step + 1) * samples, FARTHEST) for step, samples, *_ in rows],
        "seconds": [round(min(at - seconds[0], 1e9), 3) for at in seconds],
        "value": [plain(loss) for _, _, loss, _ in rows],
    }


def _found(path: Path, size: int) -> Iterator[tuple[int, int, float, float]]:
    """Yield step, samples, loss and time of the first step after each position."""
    last = -1
    with path.open("rb") as file:
        for place in range(NUM_PLACES):
            file.seek(place * size // NUM_PLACES)
            line = _first_step(file.read(_PLACE_BYTES))
            if line is None:
                continue
            step, samples = integer(line, "step"), integer(line, "num_samples")
            loss, now = number(line, "loss"), number(line, "time_seconds")
            if step is not None and samples is not None and now is not None and abs(now) < FARTHEST and step != last:
                last = step
                yield step, samples, float("nan") if loss is None else loss, now


def _first_step(block: bytes) -> JsonLine | None:
    """Return the first complete step line in a piece of a log."""
    # The piece starts within a line.
    at = block.find(_STEP, block.find(b"\n") + 1)
    begin, end = block.rfind(b"\n", 0, max(0, at)), block.find(b"\n", max(0, at))
    return decoded_line(block[begin + 1 : end]) if at >= 0 and begin >= 0 and end >= 0 else None
