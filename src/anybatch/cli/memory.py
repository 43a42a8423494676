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
    "Run the first steps of a recipe on one rank, and report the memory of the last of them: for what, when it was "
    "most, and how much is left. The model is the recipe's, new; no run is begun, and nothing is kept."
)
_EPILOG = "`anybatch train` prints the peak of a whole run in its summary."
_MOST_STEPS: Final = 3
"""The first step makes the optimizer's state; it is not like those that follow."""


def run(words: Sequence[str]) -> int:
    """Measure a step of the recipe that a command line names; return the exit status."""
    given = vars(make_parser().parse(words))
    return measure(given.pop("recipe"), **given)


def make_parser() -> Parser:
    """Return the parser of this verb."""
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
        help="most samples of one forward and backward, or auto: the fastest of a few that fit (default: auto)",
    )
    sizes.add_argument(
        "--accumulation-steps", type=count, metavar="N", help="micro-batches, instead of --micro-batch-size"
    )
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format (default: fp32)")
    add("--seed", type=integer, default=0, metavar="N", help="of parameters, order and dropout (default: 0)")
    add(
        "--limit",
        type=memory_size,
        metavar="SIZE",
        help="memory there is, such as 24GiB (default: the accelerator's)",
    )
    add("--figure", type=picture_file, metavar="FILE", help="draw memory over the step: .png, .svg or .pdf")
    add("--allocator", action="store_true", help="with torch.cuda.memory_summary, on a CUDA device")
    return parser


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
    from rich.console import Console  # noqa: PLC0415 (takes a while, and a wrong option does not need it)

    if sys.stdout.isatty():
        Console(highlight=False, markup=False, emoji=False).print(report)
    else:
        sys.stdout.write(f"{report}\n")
    if figure is not None:
        report.draw(figure)
        sys.stdout.write(f"wrote {figure}\n")
    return Status.DONE


def record(recipe: str, *, limit: int | None, allocator: bool, **choices: Any) -> "MemoryReport":  # noqa: ANN401
    """Return the report of a recipe's second step, or of its third where an epoch's end makes the second smaller.

    Args:
        recipe: as `load_recipe` takes it.
        limit: bytes that there are; None for what the device has.
        allocator: add what torch's allocator says of itself.
        **choices: what `start` takes.
    """
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    from anybatch.diagnostics.memory.memory_report import record_memory  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.load import load_recipe  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.run.start import start  # noqa: PLC0415 (brings torch)

    # The engine takes one of the two, and the size always has a default.
    if choices["accumulation_steps"] is not None:
        del choices["micro_batch_size"]
    # The check of the loss may come back in the second step, and holds more than the step does.
    run = start(load_recipe(recipe), steps=_MOST_STEPS, check_loss=False, **choices)
    data = iter(run.batches)
    with run.engine as engine:
        first = next(data)
        engine.step(first)
        batch = next(data)
        # At the end of an epoch a step may be smaller, and would show less memory.
        if len(batch.sample_ids) < len(first.sample_ids):
            engine.step(batch)
            batch = next(data)
        with record_memory(engine, limit_bytes=limit, summary=allocator) as recording:
            engine.step(batch)
    return recording.report
