"""Plans at random, for Python and for the page: `python -m guide.tests.planner_cases` writes a thousand of Python's.

Replaying the allocator takes Python half a second for each plan, so what it plans is committed. A test plans some of
them anew, and the page's arithmetic has to find all of them, number by number and word by word.
"""

import dataclasses
import functools
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from anybatch.planner.cost.devices import DEVICES
from anybatch.planner.envelopes import Envelopes
from anybatch.planner.report import Plan
from anybatch_guide.memory.planning import Traced, Variant, Wish, planned, read, variants_of

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "guide" / "web" / "recordings" / "memory_planner.json"
GOLDEN = ROOT / "guide" / "web" / "tests" / "planner.golden.json"
NUM_CASES, BATCHES = 1000, 5
SIZES_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
HEADROOMS = (0.0, 0.05, 0.1, 0.15, 0.15, 0.15, 0.25)
LEFT_OUT = ("smallest", "planned in")
"""Rows that depend on changes that were tried, and on the clock."""


def recorded() -> dict[str, Any]:
    """Return what is recorded."""
    return dict(json.loads(RECORDING.read_text(encoding="utf-8"))["data"])


class Remembering:
    """Envelopes that replay the allocator once for each limit: several wishes share one."""

    def __init__(self, envelopes: Envelopes) -> None:
        self._envelopes = envelopes
        self._largest: dict[int, int | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envelopes, name)

    def largest_allocated(self, limit_bytes: int) -> int | None:
        """Return what the envelopes return, and keep it."""
        if limit_bytes not in self._largest:
            self._largest[limit_bytes] = self._envelopes.largest_allocated(limit_bytes)
        return self._largest[limit_bytes]


def remembering(traced: Traced) -> Traced:
    """Return the step with envelopes that remember."""
    return dataclasses.replace(traced, envelopes=cast("Envelopes", Remembering(traced.envelopes)))


def wishes(variants: Sequence[Variant]) -> Iterator[tuple[int, Wish]]:
    """Yield a thousand random wishes, each for one of the variants: 200 variants on devices, with 5 batches each."""
    draw = random.Random(64)
    devices = [one.name for one in DEVICES] + [f"{size}GiB" for size in SIZES_GIB]
    # To replay the first step of a large model on several ranks takes Python half a minute.
    weights = [0.1 if one.several and one.model != "gpt2" else 1.0 for one in variants]
    for _ in range(NUM_CASES // BATCHES):
        (number,) = draw.choices(range(len(variants)), weights)
        device, headroom = draw.choice(devices), draw.choice(HEADROOMS)
        for _ in range(BATCHES):
            size = draw.choice((draw.randint(1, 64), draw.randint(1, 4096), 2 ** draw.randint(0, 12)))
            ranks = draw.choice((2, 3, 4, 8, draw.randint(2, 64))) if variants[number].several else 1
            yield number, Wish(device=device, effective_batch_size=size, world_size=ranks, headroom=headroom)


def lines_of(plan: Plan) -> list[str]:
    """Return the words of a plan, without those that depend on the clock or on changes that were tried."""
    lines = str(plan).splitlines()
    upper = lines[: lines.index("", 3)]
    return [line for line in upper if not line.startswith(LEFT_OUT)]


def row_of(number: int, wish: Wish, plan: Plan) -> list[Any]:
    """Return a plan as it is compared: whole numbers, and the digest of its words."""
    fit = plan.as_it_is
    digest = hashlib.sha256("\n".join(lines_of(plan)).encode()).hexdigest()[:16]
    return [
        *(number, wish.device, plan.budget.total_bytes, wish.effective_batch_size, wish.world_size, wish.headroom),
        *(fit.largest, fit.micro_batch_size, fit.accumulation_steps, fit.peak.num_bytes, fit.reserved_bytes),
        *(plan.bytes_by_purpose().get("activations", 0), fit.binds, digest),
    ]


def main() -> None:
    """Plan all of them, and write them down."""
    torch.set_num_threads(1)
    data = recorded()
    step = functools.cache(lambda number: remembering(read(data, number)))
    rows = []
    for done, (number, wish) in enumerate(wishes(variants_of(data))):
        rows.append(row_of(number, wish, planned(step(number), wish)))
        if done % 50 == 0:
            sys.stdout.write(f"{done} of {NUM_CASES}\n")
            sys.stdout.flush()
    text = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f"[\n{text}\n]\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
