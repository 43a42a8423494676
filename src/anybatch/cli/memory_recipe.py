"""`anybatch memory RECIPE`: a step that is not the first, recorded."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from anybatch.cli.status import Status
from anybatch.diagnostics.memory.memory_report import MemoryReport, record_memory
from anybatch.recipes.load import load_recipe
from anybatch.recipes.run.start import start

MOST_STEPS = 3
"""The first step makes the optimizer's state and checks the loss; it is not like those that follow."""


def measure(recipe: str, *, limit: int | None, figure: Path | None, allocator: bool, **choices: Any) -> int:  # noqa: ANN401
    """Run a step, print its report, and return the exit status.

    Args:
        recipe: as `load_recipe` takes it.
        limit: bytes that there are; None for what the device has.
        figure: file for a picture of memory over the step.
        allocator: add what torch's allocator says of itself.
        **choices: what `start` takes.

    Raises:
        UserError: the recipe or a choice cannot be used.
    """
    report = record(recipe, limit=limit, allocator=allocator, **choices)
    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(report)
    else:
        sys.stdout.write(f"{report}\n")
    if figure is not None:
        report.draw(figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE


def record(recipe: str, *, limit: int | None, allocator: bool, **choices: Any) -> MemoryReport:  # noqa: ANN401
    """Return the report of a recipe's second step, or of its third where an epoch's end makes the second smaller."""
    if choices["accumulation_steps"] is not None:
        del choices["micro_batch_size"]
    run = start(load_recipe(recipe), steps=MOST_STEPS, **choices)
    data = iter(run.batches)
    with run.engine as engine:
        first = next(data)
        engine.step(first)
        batch = next(data)
        if len(batch.sample_ids) < len(first.sample_ids):
            engine.step(batch)
            batch = next(data)
        with record_memory(engine, limit_bytes=limit, summary=allocator) as recording:
            engine.step(batch)
    return recording.report
