"""Random plans for Python and for the page: `python -m guide.tests.planner_cases` writes a thousand of Python's.

Tracing every step takes minutes, so Python's plans are committed. A test recomputes the plans of two steps, and the
page must give all thousand from its tables, with the same numbers and words.
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

from anybatch.planner.envelopes import Envelopes
from anybatch.planner.plan import Plan
from anybatch_guide.memory.planning import OFFERED_MODELS, PlanRequest, Traced, Variant, planned, trace
from anybatch_guide.memory.tables import DEVICE_NAMES, EFFECTIVE_BATCH_SIZES, NUM_RANKS

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "guide" / "web" / "recordings" / "memory_planner.json"
GOLDEN = ROOT / "guide" / "web" / "tests" / "planner.golden.json"
NUM_CASES, BATCHES = 1000, 10
VARIANTS = tuple(variant for one in OFFERED_MODELS for variant in one.variants())
LEFT_OUT = ("fastest", "planned in", "time")
"""Rows that depend on the table of changes, or on time."""


def recorded() -> dict[str, Any]:
    """Return the recorded data."""
    return dict(json.loads(RECORDING.read_text(encoding="utf-8"))["data"])


def requests(variants: Sequence[Variant]) -> Iterator[tuple[int, PlanRequest]]:
    """Yield a thousand random requests that the page offers: 100 variants on devices, with 10 batches each."""
    draw = random.Random(64)
    # Python takes half a minute to replay the first step of a large model on several ranks.
    weights = [0.1 if one.multi_rank and one.model != "gpt2" else 1.0 for one in variants]
    for _ in range(NUM_CASES // BATCHES):
        (number,) = draw.choices(range(len(variants)), weights)
        device = draw.choice(DEVICE_NAMES)
        for _ in range(BATCHES):
            ranks = draw.choice(NUM_RANKS[1:]) if variants[number].multi_rank else 1
            size = draw.choice(EFFECTIVE_BATCH_SIZES)
            yield number, PlanRequest(device=device, effective_batch_size=size, world_size=ranks)


class Remembering:
    """Envelopes with a cache of allocator replays by limit and size."""

    def __init__(self, envelopes: Envelopes) -> None:
        self._envelopes = envelopes
        self.largest_allocated = functools.cache(envelopes.largest_allocated)
        self.reserved_bytes = functools.cache(envelopes.reserved_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._envelopes, name)


@functools.cache
def traced(variant: Variant) -> Traced:
    """Return a newly traced step, with caching envelopes."""
    found = trace(variant)
    return dataclasses.replace(found, envelopes=cast("Envelopes", Remembering(found.envelopes)))


def lines_of(plan: Plan) -> list[str]:
    """Return the lines of a plan that do not depend on time or on the table of changes."""
    lines = str(plan).splitlines()
    upper = lines[: lines.index("", 3)]
    return [line for line in upper if not line.startswith(LEFT_OUT)]


def row_of(number: int, request: PlanRequest, plan: Plan) -> list[Any]:
    """Return a plan for comparison: integers, and the digest of its lines."""
    fit = plan.baseline
    digest = hashlib.sha256("\n".join(lines_of(plan)).encode()).hexdigest()[:16]
    return [
        *(number, request.device, plan.budget.total_bytes, request.effective_batch_size, request.world_size),
        *(fit.largest, fit.micro_batch_size, fit.accumulation_steps, fit.peak.num_bytes, fit.reserved_bytes),
        *(plan.bytes_by_purpose().get("activations", 0), fit.limit, digest),
    ]


def main() -> None:
    """Compute all plans and write the results."""
    torch.set_num_threads(1)
    rows = []
    for done, (number, request) in enumerate(requests(VARIANTS)):
        rows.append(row_of(number, request, planned(traced(VARIANTS[number]), request)))
        if done % 50 == 0:
            sys.stdout.write(f"{done} of {NUM_CASES}\n")
            sys.stdout.flush()
    text = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f"[\n{text}\n]\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
