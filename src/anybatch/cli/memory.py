"""`anybatch memory`: run a step of a recipe and report its memory."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from anybatch.cli.command import (
    DEFAULT_RECIPE,
    Parser,
    add_figure,
    add_recipe,
    add_settings,
    memory_size,
    print_report,
    settings_of,
)
from anybatch.core.run_config import RunConfig

if TYPE_CHECKING:
    from anybatch.diagnostics.memory_report import MemoryReport

_DESCRIPTION = (
    "Run two or three steps of a recipe on one rank, and report the memory of the last step: by category, at its peak, "
    "and how much remains free. The steps start from new weights; no run folder is created, and nothing is saved."
)
_EPILOG = "`anybatch train` prints the peak of a whole run in its summary."
_MAX_STEPS: Final = 3
"""Maximum number of steps: the first allocates the optimizer state, and the second or third is recorded."""


def run(argv: Sequence[str]) -> int:
    """Run `anybatch memory` and return the exit status."""
    args = make_parser().parse(argv)
    report = record(args.recipe, settings_of(args), limit=args.limit)
    return print_report(str(report), report, args, draw=lambda report, path: report.draw(path))


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("memory", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add_settings(add, "effective_batch_size", "precision", "seed", effective_batch_size="the recipe's")
    add_settings(parser.add_mutually_exclusive_group().add_argument, "micro_batch_size", "accumulation_steps")
    add(
        "--limit", type=memory_size, metavar="SIZE", help="available memory, such as 24GiB (default: the accelerator's)"
    )
    add_figure(add, "memory over the step")
    return parser


def record(recipe: str, config: RunConfig, *, limit: int | None) -> "MemoryReport":
    """Return the memory report of a recipe's second step, or of the third if the second has fewer samples."""
    from anybatch.diagnostics.memory_report import record_memory
    from anybatch.recipes.load import load_recipe
    from anybatch.recipes.start import start

    # A loss check in the recorded step would need more memory than a step.
    run = start(load_recipe(recipe), dataclasses.replace(config, steps=_MAX_STEPS), check_loss=False)
    data = iter(run.batches)
    with run.engine as engine:
        first = next(data)
        engine.step(first)
        batch = next(data)
        # The last step of an epoch may have fewer samples and would need less memory.
        if len(batch.sample_ids) < len(first.sample_ids):
            engine.step(batch)
            batch = next(data)
        with record_memory(engine, limit_bytes=limit) as recording:
            engine.step(batch)
    return recording.report
