"""`anybatch advise RECIPE`: which effective batch size is worth it here, from a short run or a finished log."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.cli.forecast_options import link
from anybatch.cli.parser import Parser, add_recipe, count, integer, output_file, picture_file
from anybatch.cli.report_files import write_report_files
from anybatch.cli.status import Status
from anybatch.cli.threads import let_threads_sleep
from anybatch.cli.train_request import DEFAULT_RECIPE

if TYPE_CHECKING:
    from anybatch.diagnostics.advising.advice import Advice

_DESCRIPTION = (
    "Train a recipe for some steps, measure the noise of its gradient and what a step takes, and say what a larger or "
    "smaller effective batch would cost, where the time to a loss is least, the learning rate there, and whether "
    "accumulating pays here at all. What is trained is not kept."
)


def run(words: Sequence[str]) -> int:
    """Give advice on the recipe or the log that a command line names; return the exit status.

    Raises:
        UserError: the recipe, the log or a number cannot be used.
    """
    parser = make_parser()
    given = parser.parse(words)
    if given.ranks and given.link is None:
        parser.error("--ranks needs --link RATE,LATENCY, such as --link 25Gbit,20us")
    let_threads_sleep()
    # torch takes seconds to import, and is not needed to say that an option is wrong.
    from anybatch.diagnostics.advising.advise import advise  # noqa: PLC0415 (brings torch)
    from anybatch.diagnostics.advising.figure import draw_advice  # noqa: PLC0415 (brings torch)

    ranks = tuple(given.ranks or ())
    if given.log is not None:
        advice = advise(given.log, ranks=ranks, link=given.link)
    else:
        advice = _advise_on_recipe(given, ranks)
    sys.stdout.write(f"{given.log or given.recipe}: which effective batch size?\n{advice}\n")
    write_report_files(advice, draw_advice, json_file=given.json, figure=given.figure)
    return Status.DONE


def make_parser() -> Parser:
    """Return the parser of this verb."""
    parser = Parser("advise", _DESCRIPTION)
    add = parser.add_argument
    add_recipe(parser, DEFAULT_RECIPE, DEFAULT_RECIPE)
    add("--effective-batch-size", type=count, metavar="N", help="samples of one optimizer step (default: the recipe's)")
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="of one forward and backward; noise is seen between micro-batches (default: a quarter of the batch)",
    )
    add("--steps", type=count, default=200, metavar="N", help="to train for (default: 200)")
    add("--every", type=count, default=2, metavar="N", help="steps from one measurement to the next (default: 2)")
    add("--ranks", type=count, action="append", metavar="N", help="predict for so many ranks; may be given again")
    add("--link", type=link, metavar="RATE,LATENCY", help="between ranks, such as 25Gbit,20us")
    add("--seed", type=integer, default=0, metavar="N", help="of the parameters and the order (default: 0)")
    add("--log", type=Path, metavar="FILE", help="read the log of a run that measured noise instead")
    add("--figure", type=picture_file, metavar="FILE", help="draw time and samples by batch size: .png, .svg or .pdf")
    add("--json", type=output_file, metavar="FILE", help="write everything that was found")
    return parser


def _advise_on_recipe(given: argparse.Namespace, ranks: tuple[int, ...]) -> "Advice":
    from anybatch.diagnostics.advising.advise import advise  # noqa: PLC0415 (brings torch)
    from anybatch.engine.gradient_noise import GradientNoise  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.load import load_recipe  # noqa: PLC0415 (brings torch)
    from anybatch.recipes.run.start import start  # noqa: PLC0415 (brings torch)

    job = load_recipe(given.recipe)
    size = given.effective_batch_size or job.defaults.largest_batch_size
    # Without a schedule: it would end with these few steps.
    job = replace(job, noise=GradientNoise(every=given.every), scheduler=None)
    trained = start(
        job,
        effective_batch_size=size,
        steps=given.steps,
        seed=given.seed,
        micro_batch_size=given.micro_batch_size or max(1, -(-size // 4)),
    )
    with trained.engine as engine:
        return advise(engine, trained.batches, steps=given.steps, ranks=ranks, link=given.link)
