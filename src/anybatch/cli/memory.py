"""`anybatch memory`: run a step of a recipe and report its memory."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from anybatch.cli.parser import Parser, add_recipe, count, count_or_auto, integer, memory_size, picture_file
from anybatch.cli.status import Status
from anybatch.cli.train_request import DEFAULT_RECIPE

if TYPE_CHECKING:
    from anybatch.diagnostics.memory.memory_report import MemoryReport

_DESCRIPTION = (
    "Run the first steps of a recipe on one rank, and report the memory of the last one: by category, its peak, and "
    "the free rest. The model is new, no run is created, and nothing is kept."
)
_EPILOG = "`anybatch train` prints the peak of a whole run in its summary."
_MOST_STEPS: Final = 3
"""The first step allocates the optimizer state, so it is not typical."""


def run(words: Sequence[str]) -> int:
    """Run `anybatch memory` and return the exit status."""
    given = vars(make_parser().parse(words))
    return measure(given.pop("recipe"), **given)


def make_parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser("memory", _DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step (default: the recipe's)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--micro-batch-size",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="maximum samples per forward and backward, or auto: the fastest of a few that fit (default: auto)",
    )
    sizes.add_argument(
        "--accumulation-steps", type=count, metavar="N", help="micro-batches, instead of --micro-batch-size"
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    add(
        "--seed", type=integer, default=0, metavar="N", help="random seed for initialisation and shuffling (default: 0)"
    )
    add(
        "--limit",
        type=memory_size,
        metavar="SIZE",
        help="available memory, such as 24GiB (default: the accelerator's)",
    )
    add("--figure", type=picture_file, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    add("--allocator", action="store_true", help="add torch.cuda.memory_summary, on a CUDA device")
    return parser


def measure(recipe: str, *, limit: int | None, figure: Path | None, allocator: bool, **choices: Any) -> int:  # noqa: ANN401
    """Run a step, print its report, and return the exit status."""
    report = record(recipe, limit=limit, allocator=allocator, **choices)
    from rich.console import Console  # noqa: PLC0415 (slow to import, and not needed to report a wrong option)

    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(report)
    else:
        sys.stdout.write(f"{report}\n")
    if figure is not None:
        report.draw(figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE


def record(recipe: str, *, limit: int | None, allocator: bool, **choices: Any) -> "MemoryReport":  # noqa: ANN401
    """Return the report of a recipe's second step, or of its third if the second is smaller (end of an epoch)."""
    # Imported late: importing torch takes seconds, and a wrong option is reported without it.
    from anybatch.diagnostics.memory.memory_report import record_memory  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.load import load_recipe  # noqa: PLC0415 (imports torch)
    from anybatch.recipes.run.start import start  # noqa: PLC0415 (imports torch)

    # The engine accepts one of the two, and the size always has a default.
    if choices["accumulation_steps"] is not None:
        del choices["micro_batch_size"]
    # The loss check may run again in the second step, and needs more memory than a step.
    run = start(load_recipe(recipe), steps=_MOST_STEPS, check_loss=False, **choices)
    data = iter(run.batches)
    with run.engine as engine:
        first = next(data)
        engine.step(first)
        batch = next(data)
        # The last step of an epoch may be smaller and would need less memory.
        if len(batch.sample_ids) < len(first.sample_ids):
            engine.step(batch)
            batch = next(data)
        with record_memory(engine, limit_bytes=limit, summary=allocator) as recording:
            engine.step(batch)
    return recording.report
