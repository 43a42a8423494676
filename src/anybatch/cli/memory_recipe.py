"""`anybatch memory RECIPE`: two steps, the second of them recorded."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from anybatch.cli.status import Status
from anybatch.diagnostics.memory_report import MemoryReport, record_memory
from anybatch.errors import DataError
from anybatch.recipes.load import load_recipe
from anybatch.recipes.start import start

NUM_STEPS = 2
"""The first step makes the optimizer's state and checks the loss; the second is like all that follow."""


def measure(recipe: str, *, limit: int | None, figure: Path | None, allocator: bool, **choices: Any) -> int:  # noqa: ANN401
    """Run the steps, print the report of the last one, and return the exit status.

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
    """Return the report of a recipe's second step."""
    if choices["accumulation_steps"] is not None:
        del choices["micro_batch_size"]
    run = start(load_recipe(recipe), steps=NUM_STEPS, **choices)
    with run.engine as engine:
        recording = record_memory(engine, limit_bytes=limit, summary=allocator)
        for batch in run.batches:
            if engine.num_steps == NUM_STEPS - 1:
                with recording:
                    engine.step(batch)
                return recording.report
            engine.step(batch)
    message = f"{recipe} has no data for {NUM_STEPS} steps, of which the second is measured."
    raise DataError(message)
